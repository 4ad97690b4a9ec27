"""A model with states in the engine, beside the same engine with transformers' functions in torch, and llama.cpp.

Usage: python bench/hybrid.py [--dtype float32] [--threads N] [--quick] [--json FILE]

The model is of the shape of Granite 4, with random weights: 7 layers of Mamba 2 to one of attention, hidden 768, an MLP
of 2,048 features in each layer. llama.cpp reads the same weights from a GGUF file, if xllamacpp is installed; the table
says which share of the first tokens is the same. A decode is 32 requests at once, a prompt is one of 512 tokens; times
are of the CPU. Those of a decode step are the difference between many and few output tokens.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import torch
from harness import dtype_name, hardware, parse_args, print_table, write_json
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagedattn_serve import LLM, SamplingParams
from pagedattn_serve.models import transformers_states

try:
    import xllamacpp
except ImportError:
    xllamacpp = None

NUM_SEQS, NUM_PROMPT_TOKENS, FEW, MANY = 32, 512, 2, 12
VOCAB_SIZE = 8192
MLP = "shared_mlp.input_linear"
NAMES = {  # of llama.cpp, by those of transformers
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "shared_mlp.output_linear.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
}
Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and a number of tokens to output tokens


def make_model(num_layers: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "granitemoehybrid", vocab_size=VOCAB_SIZE, hidden_size=768, shared_intermediate_size=2048,
        num_hidden_layers=num_layers, num_attention_heads=12, num_key_value_heads=4, num_local_experts=0,
        layer_types=["full_attention" if i % 8 == 5 else "linear_attention" for i in range(num_layers)],
        mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128, mamba_n_groups=1, attention_multiplier=0.125,
        max_position_embeddings=1024, tie_word_embeddings=False, position_embedding_type="nope",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.03 if "embed" not in name else 1.0)
    return model.eval()


def write_gguf(model: PreTrainedModel, file: Path, dtype: torch.dtype) -> None:
    """As llama.cpp's converter has it: matrices in `dtype`, all else in fp32."""
    config: Any = model.config
    writer = gguf.GGUFWriter(file, arch := "granitehybrid")
    is_mamba = [kind == "linear_attention" for kind in config.layer_types]
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.shared_intermediate_size,
        "attention.head_count": config.num_attention_heads, "vocab_size": config.vocab_size,
        "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_array(f"{arch}.attention.head_count_kv", [0 if m else config.num_key_value_heads for m in is_mamba])
    scales = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }  # fmt: skip
    for name, scale in scales.items():
        writer.add_float32(f"{arch}.{name}", scale)
    writer.add_bool(f"{arch}.rope.scaling.finetuned", False)  # the layers have no positions
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\u2581t{i}" for i in range(config.vocab_size)])
    writer.add_token_scores([float(-i) for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    for name, tensor in model.state_dict().items():
        for own, data in converted(name, tensor.float()).items():
            is_matrix = data.dim() == 2 and min(data.shape) > 1 and "conv" not in own and "norm" not in own
            kind = gguf.GGMLQuantizationType.BF16 if is_matrix and dtype == torch.bfloat16 else 0
            writer.add_tensor(own, gguf.quants.quantize(data.numpy(), gguf.GGMLQuantizationType(kind)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of a GGUF file that have this one of transformers, by name."""
    if name in NAMES:
        return {NAMES[name]: tensor}
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if part.startswith(MLP):
        return dict(zip((f"blk.{layer}.ffn_gate.weight", f"blk.{layer}.ffn_up.weight"), tensor.chunk(2), strict=True))
    if part == "mamba.A_log":
        tensor = -tensor.exp()
    if part in ("mamba.A_log", "mamba.D"):
        tensor = tensor[:, None]
    elif part == "mamba.norm.weight":
        tensor = tensor[None]
    elif part == "mamba.conv1d.weight":
        tensor = tensor[:, 0]
    return {f"blk.{layer}.{NAMES[part]}": tensor.contiguous()}


def ours(directory: Path, dtype: torch.dtype) -> Generate:
    llm = LLM(directory, dtype=dtype, enable_prefix_caching=False, max_num_seqs=NUM_SEQS, kv_cache_memory=1 << 29)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def in_torch(directory: Path, dtype: torch.dtype) -> Generate:
    """The engine, with mixers as transformers has them."""
    functions = [transformers_states.ON_OPS, *transformers_states.OF_SLOTS.values()]
    kept = [dict(each) for each in functions]
    for each in functions:
        each.clear()
    try:
        return ours(directory, dtype)
    finally:
        for each, names in zip(functions, kept, strict=True):
            each.update(names)


def llama_cpp(file: Path, dtype: torch.dtype) -> Generate:
    """Its server, with a slot for each request."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.kv_unified = 8192, NUM_SEQS, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity = -1
    if dtype == torch.float32:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        fields = {"n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: server.handle_completions({**fields, "prompt": prompt}), prompts))
        return [[int(word[1:]) for word in answer["choices"][0]["text"].split()] for answer in answers]

    return generate


def random_prompts(num_prompts: int, length: int) -> list[list[int]]:
    tokens: list[list[int]] = torch.randint(3, VOCAB_SIZE, (num_prompts, length)).tolist()
    return tokens


def cpu_seconds(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    begin = time.process_time()
    generate(prompts, num_tokens)
    return time.process_time() - begin


def measure(generate: Generate) -> tuple[float, float]:
    """Seconds of a decode step, and of a prompt."""
    prompts = random_prompts(NUM_SEQS, 8)
    few, many = (cpu_seconds(generate, prompts, num_tokens) for num_tokens in (FEW, MANY))
    return (many - few) / (MANY - FEW), cpu_seconds(generate, random_prompts(1, NUM_PROMPT_TOKENS), 1)


def share_of_equal_tokens(systems: dict[str, Generate]) -> dict[str, float]:
    """With ours, of the first tokens of each prompt."""
    prompts = random_prompts(NUM_SEQS, 8)
    outputs = {name: torch.tensor(generate(prompts, FEW)) for name, generate in systems.items()}
    return {name: float((tokens == outputs["ours"]).float().mean()) for name, tokens in outputs.items()}


def main() -> None:
    args = parse_args(__doc__.partition("\n")[0])
    if args.device != "cpu":
        raise SystemExit("bench/hybrid.py: llama.cpp is measured on the CPU only")
    if args.plot:
        raise SystemExit("bench/hybrid.py: expected no --plot, there are no shares of a probe to draw")
    facts, report = hardware(args.device), {}
    model = make_model(num_layers=8)
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model.to(dtype).save_pretrained(directory)
            systems = {"ours": ours(directory, dtype), "mixers in torch": in_torch(directory, dtype)}
            if xllamacpp is not None:
                write_gguf(model, directory / "model.gguf", dtype)
                systems["llama.cpp"] = llama_cpp(directory / "model.gguf", dtype)
            equal = share_of_equal_tokens(systems)
            rounds = [{key: measure(each) for key, each in systems.items()} for _ in range(2 if args.quick else 5)]
        report[dtype_name(dtype)] = {"rounds": rounds, "equal tokens": equal}
        table = [["", "decode of 32, ms", "ours is", "prompt of 512, ms", "ours is", "equal tokens"]]
        for key in systems:
            cells = []
            for i in range(2):
                ratio = median(each[key][i] / each["ours"][i] for each in rounds)
                cells += [f"{1e3 * median(each[key][i] for each in rounds):.1f}", f"{ratio:.2f}x"]
            table.append([f"{key}, {dtype_name(dtype)}", *cells, f"{equal[key]:.0%}"])
        print_table(table)
    if args.json:
        write_json(args.json, facts, report)


if __name__ == "__main__":
    main()

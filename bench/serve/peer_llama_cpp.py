"""llama.cpp, through llama-cpp-python, beside the engine: its file of the same weights, and continuous batching.

The batches are those of llama.cpp's own server: a step decodes one token of each sequence whose prompt is computed, and
then as much of the waiting prompts as has room. The most likely token is found by numpy's argmax, which is faster than
llama.cpp's sampler. The requests share one cache (`kv_unified`, not the default of the library). With a cache of its
own for each request, 32 requests of ShareGPT's lengths make 12% fewer tokens of a CPU-second, and few long prompts some
per cent more (bf16, one thread of a Zen 4). `pip install llama-cpp-python gguf` compiles it for the machine at hand.
"""

import ctypes
import json
from pathlib import Path

import gguf
import llama_cpp
import numpy
from safetensors.torch import load_file
from torch import Tensor

from serve.peers import Loaded, measure
from serve.run import Run
from serve.workloads import Request

FORMATS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
MAX_BATCH_TOKENS = 2048  # its default


def load(model: str, weight_format: str, threads: int, made: str, flash_attention: bool) -> Loaded:
    """model: directory of a LLaMA; made: one to write to, which may have its file already."""
    path = Path(made) / f"{FORMATS[weight_format].name}.gguf"
    if not path.exists():
        write_gguf(Path(model), str(path), FORMATS[weight_format])
    system = LlamaCpp(str(path), threads, exact=weight_format == "float32", flash_attention=flash_attention)
    settings = f"weights {FORMATS[weight_format].name}, cache {'F32' if weight_format == 'float32' else 'F16'}"
    return Loaded(system.serve, f"{settings}, kv_unified, {flash_attention=}, version={llama_cpp.__version__}")


# ---- the file -------------------------------------------------------------------------------------------------------


def write_gguf(model: Path, path: str, of_matrices: gguf.GGMLQuantizationType) -> None:
    config = json.loads((model / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            tensor = interleave(tensor, num_heads)
        elif name.endswith("k_proj.weight"):
            tensor = interleave(tensor, num_kv_heads)
        data_type = of_matrices if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.float().numpy(), data_type)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's rotary embedding turns neighbours; that of a Hugging Face checkpoint turns the halves of a head."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


# ---- the batches ----------------------------------------------------------------------------------------------------


class LlamaCpp:
    """exact: whether the cache is fp32; else fp16, its default."""

    def __init__(self, path: str, threads: int, exact: bool, flash_attention: bool) -> None:
        silence()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False  # so that weights may be repacked for the CPU
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"{path} does not load")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.cache_type = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        self.flash_attention = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )

    def serve(self, requests: list[Request]) -> Run:
        context = self.make_context(requests)
        batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        try:
            return measure(lambda: self.generate(context, batch, requests))
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def make_context(self, requests: list[Request]) -> object:
        longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = len(requests) * -(-longest // 256) * 256
        params.n_seq_max = len(requests)
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.cache_type
        params.kv_unified = True
        params.flash_attn_type = self.flash_attention
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"no context of {params.n_ctx} tokens")
        return context

    def generate(self, context: object, batch: object, requests: list[Request]) -> list[list[int]]:
        token_ids: list[list[int]] = [[] for _ in requests]
        num_computed = [0] * len(requests)
        running = list(range(len(requests)))
        while running:
            batch.n_tokens = 0
            sampling = []  # index of the request, row of the batch
            computed = [i for i in running if token_ids[i]]
            for i in computed + [i for i in running if not token_ids[i]]:
                prompt = requests[i].prompt_token_ids
                new = [token_ids[i][-1]] if token_ids[i] else prompt[num_computed[i] :]
                new = new[: MAX_BATCH_TOKENS - batch.n_tokens]
                for token_id in new:
                    add_row(batch, token_id, num_computed[i], i)
                    num_computed[i] += 1
                if new and num_computed[i] >= len(prompt):
                    sampling.append((i, batch.n_tokens - 1))
                    batch.logits[batch.n_tokens - 1] = True
            if llama_cpp.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode fails")
            for i, row in sampling:
                logits = llama_cpp.llama_get_logits_ith(context, row)
                token_ids[i].append(int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
            running = [i for i in running if len(token_ids[i]) < requests[i].max_tokens]
        return token_ids


def add_row(batch: object, token_id: int, position: int, sequence: int) -> None:
    row = batch.n_tokens
    batch.token[row] = token_id
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence
    batch.logits[row] = False
    batch.n_tokens += 1


@llama_cpp.llama_log_callback
def no_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


def silence() -> None:
    llama_cpp.llama_log_set(no_log, ctypes.c_void_p(0))

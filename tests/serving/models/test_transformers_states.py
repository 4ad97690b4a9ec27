"""Models whose layers keep a state between tokens, through transformers: equal to `generate`, whatever becomes of their
slots."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMALL, greedy_references
from engine_runs import finish_all, run, token_ids
from test_transformers_models import EXPERTS, Save, prompts_of, references, save
from torch import Tensor, nn
from warm_ranks import StartedRanks

from pagedattn_serve.cli import main
from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.engine_setup import limit_to_cache, limit_to_memory
from pagedattn_serve.llm import LLM
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models.linear import PackedLinear
from pagedattn_serve.models.transformers_model import TransformersCausalLM
from pagedattn_serve.models.transformers_states import ON_OPS, MixerForward, mixers
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling import state_slots

__all__ = ["save"]  # the fixture

HYBRID = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
MAMBA_2: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=12, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=8)
SCAN: dict[str, Any] = dict(state_size=8, expand=2, intermediate_size=96)
# By model type: what makes it small, and how many of its layers keep keys and values.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "bamba": (dict(**MAMBA_2, attn_layer_indices=[1]), 1),
    "falcon_h1": (dict(**MAMBA_2 | dict(mamba_d_ssm=48, mamba_n_heads=4)), 2),  # both in each layer
    "falcon_mamba": (SCAN, 0),
    "granitemoehybrid": (dict(**MAMBA_2, **EXPERTS, layer_types=HYBRID, shared_intermediate_size=24), 1),
    "jamba": (
        dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8)
        | dict(mamba_dt_rank=4, use_mamba_kernels=False),
        1,
    ),
    "kimi_linear": (
        dict(**EXPERTS, layer_types=HYBRID, linear_head_dim=8, linear_num_heads=4, num_key_value_heads=4)
        | dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12),
        1,
    ),
    "lfm2": (dict(layer_types=["conv", "full_attention"]), 1),
    "lfm2_moe": (dict(**EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1), 1),
    "mamba": (SCAN, 0),
    "mamba2": (dict(state_size=16, head_dim=12, num_heads=8, n_groups=2, chunk_size=8, expand=2), 0),
    "minimax": (dict(**EXPERTS, layer_types=HYBRID, head_dim=12, block_size=8), 1),
    "nemotron_h": (
        dict(layers_block_type=["mamba", "attention", "mlp"], num_hidden_layers=3, head_dim=12, mamba_num_heads=8)
        | dict(mamba_head_dim=12, n_groups=1, ssm_state_size=16, chunk_size=8),
        1,
    ),
    "olmo_hybrid": (dict(**DELTA, layer_types=HYBRID), 1),
    "qwen3_5_text": (dict(**DELTA, layer_types=HYBRID, head_dim=16), 1),
    "qwen3_next": (dict(**DELTA, **EXPERTS, layer_types=HYBRID, head_dim=16, shared_expert_intermediate_size=24), 1),
    "zamba": (
        dict(layers_block_type=["mamba", "hybrid"], num_key_value_heads=4, attention_hidden_size=96, mamba_d_state=8)
        | dict(attention_head_dim=24, mamba_dt_rank=4, use_mamba_kernels=False),
        1,
    ),
    "zamba2": (
        dict(layers_block_type=["linear_attention", "hybrid"], mamba_d_state=16, n_mamba_heads=8, mamba_headdim=12)
        | dict(mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, adapter_rank=8),
        1,
    ),
}
CONVOLUTION = {"causal_conv1d_fn", "causal_conv1d_update"}
MAMBA = {"mamba2_chunk_scan", "mamba2_selective_state_update"}
MAMBA_1 = {"mamba_selective_scan", "mamba_selective_state_update"}
DELTA_RULE = {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}
OF_MAMBA_1 = ("falcon_mamba", "jamba", "mamba", "zamba")
OPS_OF = {  # what of a mixer runs on the ops; all others are Mamba 2
    **dict.fromkeys(("kimi_linear", "lfm2", "lfm2_moe"), CONVOLUTION),
    **dict.fromkeys(OF_MAMBA_1, CONVOLUTION | MAMBA_1),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_next"), CONVOLUTION | DELTA_RULE),
    "minimax": set(),
}
LENGTHS = (1, 17, 9, 33)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def fields_of(model_type: str) -> dict[str, Any]:
    return FAMILIES[model_type][0]


def expect_nothing_held(engine: LLMEngine) -> None:
    manager = engine.scheduler.block_manager
    manager.check_integrity()
    assert (manager.num_used_blocks, manager.states.num_used_slots) == (0, 0)


def names_on_ops(engine: LLMEngine) -> set[str]:
    """The functions of transformers that the ops have replaced in the engine's mixers."""
    names: set[str] = set()
    for mixer in mixers(engine.model_runner.model.model):
        forward = mixer._on_ops
        called = ON_OPS.keys() & set(forward.__code__.co_names)
        names |= {name for name in called if forward.__globals__[name] is ON_OPS[name]}
    return names


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_equals_hugging_face_under_preemption(save: Save, model_type: str) -> None:
    """In chunks, beside others, in slots that others have left, and computed anew."""
    path, model = save(model_type, **fields_of(model_type))
    prompts = prompts_of(model_type, LENGTHS)
    # MiniMax is asked one prompt at a time, because padding changes what transformers says to it.
    refer = references if model_type == "minimax" else greedy_references
    expected = refer(model, prompts, NUM_TOKENS)
    engine = LLMEngine(path, **SMALL)
    assert token_ids(run(engine, prompts, GREEDY)) == expected
    assert engine.stats().num_preemptions > 0
    assert names_on_ops(engine) == OPS_OF.get(model_type, CONVOLUTION | MAMBA)
    is_mamba_1 = model_type in OF_MAMBA_1  # whose prompts leave no checkpoints
    assert engine.model_runner.model.forgets_states == is_mamba_1
    assert engine.stats().num_state_slots == (3 if is_mamba_1 else 6)  # as many as sequences run, and checkpoints
    assert len(engine.model_runner.model.cache_shapes) == FAMILIES[model_type][1]
    expect_nothing_held(engine)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2"])
def test_samples_and_beams(save: Save, model_type: str, preemption_mode: str) -> None:
    """States fork with their sequences, and go out and come in with the blocks; also where there are no caches."""
    path, _ = save(model_type, **fields_of(model_type))
    prompts = prompts_of(model_type, (7, 12, 5, 9))
    params = [
        SamplingParams(n=3, seed=1, max_tokens=NUM_TOKENS),
        SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=NUM_TOKENS),
        SamplingParams(n=2, best_of=3, seed=2, max_tokens=NUM_TOKENS),
        SamplingParams(seed=3, max_tokens=NUM_TOKENS),
    ]
    roomy = LLMEngine(path, block_size=8, num_blocks=100)
    expected = [[each.token_ids for each in output.outputs] for output in run(roomy, prompts, params)]
    engine = LLMEngine(path, block_size=4, num_blocks=18, max_num_seqs=6, preemption_mode=preemption_mode)
    assert [[each.token_ids for each in output.outputs] for output in run(engine, prompts, params)] == expected
    stats = engine.stats()
    assert (stats.num_swaps if preemption_mode == "swap" else stats.num_recomputes) > 0
    expect_nothing_held(engine)


# Torch's functions of single elements round the last few of a tensor in another way, where these are less than 32. So
# all widths are multiples, as those of real models are.
WIDE = dict(hidden_size=64, intermediate_size=96)
BITS: dict[tuple[str, str], dict[str, int]] = {
    ("falcon_h1", "bfloat16"): dict(mamba_d_ssm=64, mamba_d_head=16),  # a gate behind what the op rounds
    ("mamba2", "float32"): dict(num_heads=16, head_dim=8),  # a last layer whose weight is asked for its dtype
    ("qwen3_5_text", "float32"): dict(
        linear_num_value_heads=32, linear_num_key_heads=8, linear_key_head_dim=4, linear_value_head_dim=4
    ),
}


@pytest.mark.parametrize(("model_type", "dtype"), BITS)
def test_the_bits_are_those_of_a_sequence_alone(save: Save, model_type: str, dtype: str) -> None:
    """In a batch, in chunks, a chunk of one token among them, and computed anew."""
    path, _ = save(model_type, **fields_of(model_type) | WIDE | BITS[model_type, dtype])
    prompts = prompts_of(model_type, LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)

    def logprobs(engine: LLMEngine, prompts: list[list[int]]) -> list[Any]:
        return [output.outputs[0].logprobs for output in run(engine, prompts, params)]

    alone = LLMEngine(path, dtype=dtype, block_size=8, enable_prefix_caching=False)
    engine = LLMEngine(path, dtype=dtype, **SMALL)
    assert logprobs(engine, prompts) == [logprobs(alone, [prompt])[0] for prompt in prompts]
    assert engine.stats().num_preemptions > 0


def test_a_step_that_failed_runs_from_the_first_token(save: Save) -> None:
    """In the first layer the state is already that after the step."""
    path, model = save("mamba2", **fields_of("mamba2"))
    prompts = prompts_of("failure", (5, 9))
    expected = references(model, prompts, NUM_TOKENS)
    engine = LLMEngine(path, **SMALL, enforce_eager=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt_token_ids=prompt, sampling_params=GREEDY)
    for _ in range(4):
        engine.step()
    last = engine.model_runner.model.model.backbone.layers[1]

    def fail(*_: object) -> None:
        raise RuntimeError("as it happens")

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="as it happens"):
        engine.step()
    hook.remove()
    outputs = finish_all(engine)
    assert [outputs[str(i)][-1].outputs[0].token_ids for i in range(2)] == expected


def test_decodes_are_one_call_and_each_prompt_is_one(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save("qwen3_5_text", **fields_of("qwen3_5_text"))
    engine = LLMEngine(path, enforce_eager=True)
    mixer = engine.model_runner.model.model.model.layers[0].linear_attn
    assert isinstance(mixer.forward, MixerForward)
    shapes: list[tuple[int, ...]] = []
    forward = mixer.forward._on_ops

    def count(hidden: Tensor, **arguments: Any) -> Any:
        shapes.append(tuple(hidden.shape[:2]))
        return forward(hidden, **arguments)

    monkeypatch.setattr(mixer.forward, "_on_ops", count)
    run(engine, prompts_of("calls", (5, 1, 9)), SamplingParams(temperature=0, max_tokens=3))
    assert shapes == [(1, 5), (1, 1), (1, 9), (3, 1), (3, 1)]


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "qwen3_5_text"])
def test_prompts_begin_with_what_others_have_computed(
    save: Save, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the end of a block where a prompt has left its state: its last full block, or a period of tokens."""
    monkeypatch.setattr(state_slots, "CHECKPOINT_TOKENS", 16)
    path, model = save(model_type, **fields_of(model_type))
    first, other = prompts_of(model_type, (45, 30))
    prompts = [first, first, first + other, first[:36] + other, first[:20] + other, other]
    expected = greedy_references(model, prompts, NUM_TOKENS)
    engine = LLMEngine(path, block_size=8, max_num_seqs=16)
    found = []
    for prompt, tokens in zip(prompts, expected, strict=True):  # one after the other
        before = engine.stats().num_found_tokens
        assert token_ids(run(engine, [prompt], GREEDY)) == [tokens]
        found.append(engine.stats().num_found_tokens - before)
    assert found == [0, 40, 40, 32, 16, 0]
    few = LLMEngine(path, block_size=8, max_num_seqs=4)  # so that checkpoints go again
    for _ in range(2):
        assert token_ids(run(few, prompts, GREEDY)) == expected  # together
    assert few.stats().num_found_tokens > 0
    expect_nothing_held(few)


def test_decodes_run_as_graphs(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    """Unless a layer does what no replay can repeat; then the states are those before the capture."""
    path, model = save("minimax", **fields_of("minimax"))  # whose states functions of torch write
    prompts = prompts_of("graphs", (7, 12))
    expected = references(model, prompts, NUM_TOKENS)
    engine = LLMEngine(path, max_num_seqs=2)
    assert token_ids(run(engine, prompts, GREEDY)) == expected
    assert engine.model_runner._graphs is not None and list(engine.model_runner._graphs._graphs) == [(0, 2)]
    engine = LLMEngine(path, max_num_seqs=2)
    last = engine.model_runner.model.model.model.norm
    last.register_forward_pre_hook(lambda _, args: args[0].sum().item() and None)
    with caplog.at_level(logging.INFO, logger="pagedattn_serve"):
        assert token_ids(run(engine, prompts, GREEDY)) == expected
    assert caplog.text.count("no CPU graphs: CPUGraph: ") == 1


def test_what_a_model_with_states_goes_without(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    """Guesses; and prefixes, if chunks of prompts run token by token. The log says so, and the tokens are the same."""
    path, model = save("mamba", **fields_of("mamba"))
    with caplog.at_level(logging.INFO, logger="pagedattn_serve"):
        engine = LLMEngine(path, block_size=8, speculation="ngram")
    said = [record.getMessage().partition(":")[0] for record in caplog.records if " keeps states" in record.message]
    assert said == ["enable_prefix_caching", "speculation"]
    prompts = [[5, 6, 7] * 9] * 2
    expected = references(model, prompts, NUM_TOKENS)
    for prompt, tokens in zip(prompts, expected, strict=True):  # one after the other
        assert token_ids(run(engine, [prompt], GREEDY)) == [tokens]
    assert engine.stats().num_found_tokens == engine.stats().num_proposed_tokens == 0


def test_states_are_not_kept_on_disk(save: Save, tmp_path: Path) -> None:
    path, _ = save("qwen3_5_text", **fields_of("qwen3_5_text"))
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: expected None, as .* keeps states beside"):
        LLMEngine(path, block_size=8, prefix_cache_dir=tmp_path / "blocks")


def test_a_registered_prefix_is_found_when_all_else_is_gone(save: Save) -> None:
    """Its states are kept beside its blocks, where it ends."""
    path, model = save("qwen3_5_text", **fields_of("qwen3_5_text"))
    prefix, other = prompts_of("prefix", (27, 30))
    expected = greedy_references(model, [prefix + other], NUM_TOKENS)
    llm = LLM(path, block_size=8, max_num_seqs=1, num_blocks=20)  # two slots, and one of them for the prefix
    assert llm.register_prefix(prefix) == 24
    for prompt in (other, other[1:]):  # each leaves its states in the other slot
        llm.generate(prompt_token_ids=[prompt], sampling_params=GREEDY, use_tqdm=False)
    assert llm.llm_engine.stats().num_found_tokens == 0
    [output] = llm.generate(prompt_token_ids=[prefix + other], sampling_params=GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids] == expected
    assert llm.llm_engine.stats().num_found_tokens == 24
    expect_nothing_held(llm.llm_engine)


def test_ranks_keep_the_same_states(save: Save, ranks: StartedRanks) -> None:
    """Each copies, swaps, and keeps checkpoints, as rank 0 says."""
    path, model = save("qwen3_next", **fields_of("qwen3_next"))
    prompts = prompts_of("ranks", (17, 9, 33))
    expected = greedy_references(model, prompts, NUM_TOKENS)
    engine = LLMEngine(path, **SMALL | dict(max_num_seqs=4), preemption_mode="swap", tensor_parallel_size=2)
    outputs = run(engine, prompts, SamplingParams(n=2, temperature=0, max_tokens=NUM_TOKENS))
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [[each] * 2 for each in expected]
    assert engine.stats().num_swaps > 0
    for _ in range(2):
        assert token_ids(run(engine, prompts[:1], GREEDY)) == expected[:1]
    assert engine.stats().num_found_tokens == 16
    expect_nothing_held(engine)


def test_weights_that_a_mixer_reads_stay_and_others_are_packed(save: Save) -> None:
    """Mamba multiplies by dt_proj.weight itself, and only asks for the dtype of its head's weight."""
    path, _ = save("mamba", **fields_of("mamba"))
    model = load_model(path)
    assert isinstance(model.model.lm_head.linear, PackedLinear)
    of_mixer = {name.rpartition(".")[2]: layer for name, layer in model.named_modules() if "mixer." in name}
    assert isinstance(of_mixer["dt_proj"], nn.Linear) and isinstance(of_mixer["in_proj"], PackedLinear)


# ---- memory ---------------------------------------------------------------------------------------------------------

# qwen3_5_text, in fp32: a convolution of 2 * 16 + 32 channels and 4 columns, 4 heads of 8 x 8; keys and values.
STATE_BYTES = 4 * (64 * 4 + 4 * 8 * 8)
TOKEN_BYTES = 2 * 4 * 2 * 16


def test_info_says_what_a_sequence_and_a_token_take(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for model_type in ("qwen3_5_text", "mamba2"):
        path, _ = save(model_type, model_type, **fields_of(model_type))
        capsys.readouterr()
        assert main(["info", path, "--kv-cache-memory", "40000"]) == 0
        shown[model_type] = {line[:15].rstrip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    hybrid, pure = shown["qwen3_5_text"], shown["mamba2"]
    assert hybrid["states"] == f"{STATE_BYTES:,} bytes per sequence"
    assert hybrid["cache"].startswith(f"{TOKEN_BYTES:,} bytes per token")
    num_states = 20_000 // STATE_BYTES  # half of the memory
    num_blocks = (40_000 - num_states * STATE_BYTES) // (16 * TOKEN_BYTES)
    fit = f"{num_states} state slots and {num_blocks} blocks ({16 * num_blocks} tokens) in 40,000 bytes"
    assert hybrid["that fit"] == fit
    state_bytes = 2 * 4 * (160 * 4 + 8 * 12 * 16)
    assert pure["states"] == f"{state_bytes:,} bytes per sequence" and not pure.keys() & {"cache", "heads"}
    assert pure["that fit"] == f"{40_000 // state_bytes} state slots in 40,000 bytes"


def test_states_and_blocks_share_the_memory(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = save("qwen3_5_text", **fields_of("qwen3_5_text"))
    model = build_model(path)
    assert isinstance(model, TransformersCausalLM)
    scheduler_config = SchedulerConfig(max_model_len=128, max_num_seqs=10)

    def limit(memory: int, swap_space: float = 0.0) -> CacheConfig:
        config = CacheConfig(num_blocks=UNBOUNDED, kv_cache_memory=memory, swap_space=swap_space)
        return limit_to_memory(config, model, scheduler_config, "cpu")

    block_bytes = 16 * TOKEN_BYTES
    tight = limit(STATE_BYTES + block_bytes)
    assert (tight.num_state_slots, tight.num_blocks) == (1, 1)
    with pytest.raises(ArgumentError, match=f"kv_cache_memory: .*{STATE_BYTES + block_bytes} bytes"):
        limit(STATE_BYTES + block_bytes - 1)
    half = limit(6 * STATE_BYTES, swap_space=(4 * STATE_BYTES) / (1 << 30))
    assert (half.num_state_slots, half.num_blocks) == (3, 3 * STATE_BYTES // block_bytes)
    assert (half.num_host_state_slots, half.num_host_blocks) == (2, 2 * STATE_BYTES // block_bytes)
    assert limit_to_cache(scheduler_config, half).max_num_seqs == 3
    assert "max_num_seqs: cut from 10 to 3" in caplog.text
    assert limit(10**9).num_state_slots == 20  # ten for checkpoints


def test_a_config_without_positions_has_a_limit(save: Save) -> None:
    path, _ = save("mamba", **fields_of("mamba"))
    file = Path(path) / "config.json"
    fields = json.loads(file.read_text())
    del fields["max_position_embeddings"]  # which Mamba's own checkpoints do not have
    file.write_text(json.dumps(fields))
    assert build_model(path).max_model_len == 1 << 16

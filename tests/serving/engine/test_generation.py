"""End to end: the tokens of Hugging Face `generate`, whatever the cache, the budget and the company."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FAMILIES,
    MAX_LEN,
    VARIANTS,
    VOCAB_SIZE,
    Checkpoint,
    change_config,
    greedy_reference,
    greedy_references,
    make_model,
)
from engine_runs import finish_all, run, token_ids
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.sampler import Sampler
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=24)
# The longest request has 64 tokens, so 8 blocks of 8 are the least that holds it.
ENGINES: dict[str, dict[str, Any]] = {
    "large cache": dict(),
    "large blocks": dict(block_size=64, num_blocks=8),
    "small budget": dict(max_num_batched_tokens=7),
    "one token a step": dict(max_num_batched_tokens=1),
    "one at a time": dict(max_num_seqs=1),
    "small cache": dict(num_blocks=10, block_size=8),
    "smallest cache": dict(num_blocks=8, block_size=8),
    "all small": dict(num_blocks=9, block_size=8, max_num_seqs=3, max_num_batched_tokens=7),
}
PREEMPTING = {"small cache", "smallest cache", "all small"}
FOR_ALL = {"large cache"}  # the others for one of each family; for all there are also "many preemptions" below
UNSCALED = dict(rope_type="default", rope_theta=10000.0)


@pytest.fixture(scope="module", autouse=True)
def steps_of_unknown_time() -> Iterator[None]:
    """How many tokens of a long prompt run, and so how often sequences are preempted, follows from the time that steps
    take. Here it must not hang on what else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "observe", lambda *_: None)
        yield


each_family = pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [(variant, name) for variant in VARIANTS for name in ENGINES if variant in FAMILIES or name in FOR_ALL],
    indirect=["checkpoint"],
)
def test_greedy_equals_hugging_face(checkpoint: Checkpoint, name: str) -> None:
    engine = LLMEngine(checkpoint.path, **ENGINES[name])
    outputs = run(engine, checkpoint.prompts, GREEDY)
    assert token_ids(outputs) == checkpoint.expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    num_preemptions = engine.stats().num_preemptions
    at_least = 3 if len(engine.scheduler.block_manager.windows) == 1 else 2  # windows give blocks back
    assert num_preemptions >= at_least if name in PREEMPTING else num_preemptions == 0


def test_many_preemptions_and_admission_in_pieces(checkpoint: Checkpoint) -> None:
    engine = LLMEngine(checkpoint.path, num_blocks=10, block_size=8, max_num_batched_tokens=11)
    assert token_ids(run(engine, checkpoint.prompts * 3, GREEDY)) == checkpoint.expected * 3
    assert engine.stats().num_preemptions >= 10


def test_expected_outputs_are_worth_comparing(checkpoint: Checkpoint) -> None:
    """A model that says one thing to everybody would prove nothing."""
    assert len({tuple(tokens) for tokens in checkpoint.expected}) == len(checkpoint.expected)
    assert sum(len(set(tokens)) for tokens in checkpoint.expected) > 5 * len(checkpoint.expected)


def test_every_parameter_is_worth_comparing(checkpoint: Checkpoint) -> None:
    """Without any one of them some token would be another, so none can be passed over or put in a wrong place.

    Not so the bias of keys: where they do not turn, it raises all scores of a row alike.
    """

    model = copy.deepcopy(checkpoint.model)

    def most_likely() -> Iterator[list[int]]:
        for prompt, output in zip(checkpoint.prompts, checkpoint.expected, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
            yield logits.argmax(dim=1).tolist()

    before = list(most_likely())
    for name, parameter in model.named_parameters():
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0)
            differs = any(tokens != others for tokens, others in zip(most_likely(), before, strict=True))
            assert differs or name.endswith("k_proj.bias"), name
            parameter.copy_(original)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-linear", dict(rope_parameters=UNSCALED)),
        ("llama-dynamic", dict(rope_parameters=UNSCALED)),
        ("llama-llama3", dict(rope_parameters={**UNSCALED, "rope_theta": 500000.0})),
        ("llama-yarn", dict(rope_parameters=UNSCALED)),
        ("llama-yarn-options", dict(rope_parameters={**UNSCALED, "rope_theta": 5000.0})),
        ("llama-longrope", dict(rope_parameters=UNSCALED)),
        (
            "llama-longrope",  # outputs without the factors behind the original length
            dict(rope_parameters={**VARIANTS["llama-longrope"][1]["rope_parameters"], "long_factor": [2.0] * 6}),
        ),
        ("mistral", dict(sliding_window=None)),
        ("mistral", dict(sliding_window=12)),
        ("qwen2-sliding", dict(use_sliding_window=False)),
        ("qwen2-sliding", dict(max_window_layers=0)),
        ("qwen3-tied-bias-sliding", dict(layer_types=["full_attention"] * 3)),
        ("gpt2-inner-untied", dict(scale_attn_by_inverse_layer_idx=False)),
        ("opt-no-bias-no-affine", dict(activation_function="relu")),
        ("bloom-post-norm", dict(apply_residual_connection_post_layernorm=False)),
    ],
)
def test_options_that_a_checkpoint_is_there_for_matter(
    get_checkpoint: Callable[[str], Checkpoint], name: str, options: dict[str, Any]
) -> None:
    """The same weights without the option say something else: an engine that passed it over would be found out."""
    checkpoint = get_checkpoint(name)
    other = make_model(name, **options)
    assert greedy_references(other, checkpoint.prompts, 24) != checkpoint.expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("mistral", dict(sliding_window=window)) for window in (2, 8, 16, 63, 64, 1000)),  # a block, all but one, ...
        *(("llama-gqa", dict(head_dim=head_size)) for head_size in (2, 4, 34, 130, 250, 256)),
        *(("gpt2", dict(n_embd=3 * head_size, n_head=3)) for head_size in (1, 3, 33)),
        *(("gpt2", dict(n_embd=head_size, n_head=1)) for head_size in (129, 255)),
        *(("bloom", dict(hidden_size=6 * num_heads, n_head=num_heads)) for num_heads in (1, 2, 3, 12, 16, 21)),
        *(("gpt2", dict(activation_function=name)) for name in ("relu", "gelu", "gelu_pytorch_tanh", "quick_gelu")),
        *(("opt-125m", dict(activation_function=name)) for name in ("gelu", "gelu_fast", "gelu_new")),
        *(("llama-gqa", dict(hidden_act=name)) for name in ("gelu", "gelu_pytorch_tanh")),
        ("gpt2", dict(scale_attn_weights=False)),
        ("gpt2", dict(n_layer=1, layer_norm_epsilon=0.1)),
        ("opt-125m", dict(_remove_final_layer_norm=True)),
        ("opt-125m", dict(do_layer_norm_before=False)),
        ("opt-350m", dict(do_layer_norm_before=True)),
        ("bloom", dict(layer_norm_epsilon=0.1)),
        ("bloom", dict(slow_but_exact=True)),  # which says nothing, as nothing was cut in parts
        ("bloom", dict(pretraining_tp=2)),
        ("qwen2-sliding", dict(layer_types=["sliding_attention", "full_attention"] * 2)),
        ("qwen3", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0))),
        ("mistral", dict(rms_norm_eps=0.1)),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_options(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = make_model(name, **options)
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(num_tokens)] for i, num_tokens in enumerate((3, 40, 20, 8))]
    engine = LLMEngine(str(tmp_path), num_blocks=10, block_size=8, max_num_batched_tokens=13)
    assert token_ids(run(engine, prompts, GREEDY)) == greedy_references(model, prompts, 24)
    gives_blocks_back = options.get("sliding_window") in (2, 8)  # so many that there is room for all
    assert (engine.stats().num_preemptions == 0) == gives_blocks_back


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-gqa", dict(sliding_window=5)),
        ("llama-gqa", dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
        ("llama-gqa", dict(partial_rotary_factor=0.5)),
        ("llama-gqa", dict(rope_parameters=dict(UNSCALED, partial_rotary_factor=0.5))),
        ("llama-gqa", dict(original_max_position_embeddings=16)),
        ("llama-gqa", dict(final_logit_softcapping=1.0, attention_multiplier=0.1, use_qk_norm=True, n_inner=8)),
        ("llama-gqa", dict(model_type="internlm3", sliding_window=5)),
        ("llama-gqa", dict(model_type="iquestcoder", sliding_window=5)),
        ("mistral", dict(partial_rotary_factor=0.5)),
        ("mistral", dict(attention_bias=True, mlp_bias=True)),
        ("mistral", dict(use_sliding_window=False, max_window_layers=0)),
        ("qwen2-tied", dict(partial_rotary_factor=0.5)),
        ("qwen2-tied", dict(attention_bias=True, mlp_bias=True)),
        ("qwen2-tied", dict(attention_bias=False, sliding_window=5)),
        ("qwen3", dict(partial_rotary_factor=0.5)),
        ("qwen3", dict(mlp_bias=True, sliding_window=5, max_window_layers=0)),
        *(
            (name, dict(head_dim=20, num_key_value_heads=1, sliding_window=5, attention_bias=False, rope_theta=5.0))
            for name in ("gpt2", "opt-125m", "bloom")
        ),
    ],
    ids=str,
)
def test_fields_of_other_families_count_for_nothing(
    get_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """As in Hugging Face's models; its cache, which this leaves out, does drop keys for LLaMA's `sliding_window`."""
    checkpoint = get_checkpoint(name)
    make_model(name).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt, expected = checkpoint.prompts[3], checkpoint.expected[3]
    assert greedy_reference(model, prompt, 24, use_cache=False) == expected
    assert token_ids(run(LLMEngine(str(tmp_path)), [prompt], GREEDY)) == [expected]


@pytest.mark.parametrize(
    ("biases", "fields"),
    [
        (
            dict(attention_bias=True, mlp_bias=True),
            dict(model_type="internlm3", attention_bias=None, mlp_bias=None, qkv_bias=True, bias=True),
        ),
        (dict(attention_bias=True), dict(model_type="iquestcoder")),
        (dict(mlp_bias=True), dict(model_type="iquestcoder")),
    ],
    ids=str,
)
def test_llama_under_another_name_has_its_biases(
    tmp_path: Path, biases: dict[str, bool], fields: dict[str, Any]
) -> None:
    model = make_model("llama-gqa", **biases)
    model.save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    expected = greedy_references(model, [[5, 6, 7]], 24)
    assert token_ids(run(LLMEngine(str(tmp_path)), [[5, 6, 7]], GREEDY)) == expected


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn"])
def test_original_length_beside_the_rotary_parameters(
    get_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, name: str
) -> None:
    """As in the configs of Phi-3. It counts more than that among the parameters."""
    make_model(name).save_pretrained(tmp_path)
    change_config(tmp_path, original_max_position_embeddings=16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt, other = get_checkpoint(name).prompts[5], get_checkpoint(name).expected[5]
    expected = greedy_reference(model, prompt, 24)
    assert expected != other
    assert token_ids(run(LLMEngine(str(tmp_path)), [prompt], GREEDY)) == [expected]


def test_up_to_the_last_position(checkpoint: Checkpoint) -> None:
    """The last one of the scaled positions, from a prompt within the original ones."""
    engine = LLMEngine(checkpoint.path, max_num_batched_tokens=50)
    config = checkpoint.model.config
    original_len = getattr(config, "max_position_embeddings", MAX_LEN)
    if hasattr(config, "rope_parameters") and config.rope_parameters["rope_type"] == "longrope":
        original_len = config.rope_parameters["original_max_position_embeddings"]
    prompt = [i % VOCAB_SIZE for i in range(original_len - 20)]
    [output] = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=None))
    num_tokens = engine.max_model_len - len(prompt)
    assert output.outputs[0].token_ids == greedy_reference(checkpoint.model, prompt, num_tokens)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
@pytest.mark.parametrize("budget", [1, 7, 100])
def test_rope_after_a_prompt_beyond_the_original_length(
    get_checkpoint: Callable[[str], Checkpoint], budget: int, name: str
) -> None:
    """As if it had been fed token by token: a key does not hang on how much of the prompt came with it."""
    checkpoint = get_checkpoint(name)
    prompt = [(5 * i) % VOCAB_SIZE for i in range(60)]
    tokens, cache = list(prompt), None
    for i in range(len(prompt) + 19):
        with torch.inference_mode():
            step = checkpoint.model(torch.tensor([tokens[i : i + 1]]), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        if i + 1 == len(tokens):
            tokens.append(int(step.logits[0, -1].argmax()))
    engine = LLMEngine(checkpoint.path, max_num_batched_tokens=budget)
    assert token_ids(run(engine, [prompt], SamplingParams(temperature=0, max_tokens=20))) == [tokens[60:]]


@pytest.mark.parametrize(
    ("checkpoint", "file"),
    [*((name, "generation_config.json") for name in FAMILIES), (FAMILIES[0], "config.json")],
    indirect=["checkpoint"],
)
def test_eos(checkpoint: Checkpoint, tmp_path: Path, file: str) -> None:
    early = checkpoint.expected[-1][:16]
    eos = max(early, key=early.index)  # the token that comes up latest
    assert early.index(eos) > 3
    expected = [greedy_reference(checkpoint.model, prompt, 24, eos_token_id=eos) for prompt in checkpoint.prompts]
    shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    fields = json.loads((tmp_path / file).read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps({**fields, "eos_token_id": eos if file == "config.json" else [10**6, eos]}))

    outputs = run(LLMEngine(str(tmp_path)), checkpoint.prompts, GREEDY)
    assert token_ids(outputs) == expected
    assert len(expected[-1]) < 24 and expected[-1][-1] == eos  # it ends early, and the token is part of the output
    for output in outputs:
        assert output.outputs[0].finish_reason == ("stop" if output.outputs[0].token_ids[-1] == eos else "length")
    ignoring = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert token_ids(run(LLMEngine(str(tmp_path)), checkpoint.prompts, ignoring)) == checkpoint.expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in FAMILIES), *((name, "float16") for name in ("llama-gqa", "gpt2", "bloom"))],
)
def test_half_precision(tmp_path: Path, name: str, dtype: str) -> None:
    """It runs with preemption, and of 40 first tokens 32 (bf16) or 38 (fp16) are those of fp32.

    No more than that: random models have close calls, and after one the rest of the output is another.
    """
    make_model(name).save_pretrained(tmp_path)
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(i + 1)] for i in range(40)]
    expected = token_ids(run(LLMEngine(str(tmp_path), dtype="float32"), prompts, GREEDY))
    engine = LLMEngine(str(tmp_path), dtype=dtype, num_blocks=20, max_num_batched_tokens=30)
    actual = token_ids(run(engine, prompts, GREEDY))
    assert engine.stats().num_preemptions > 0
    assert [len(tokens) for tokens in actual] == [24] * 40
    num_equal = sum(a[0] == b[0] for a, b in zip(actual, expected, strict=True))
    assert num_equal >= (32 if dtype == "bfloat16" else 38)


@each_family
def test_a_result_does_not_depend_on_the_company(checkpoint: Checkpoint) -> None:
    """Greedy and seeded requests beside each other and beside unseeded ones, alone and preempted."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=1, max_tokens=24),
        SamplingParams(temperature=1.5, top_k=20, seed=2, max_tokens=24),
        SamplingParams(max_tokens=24),
        SamplingParams(top_p=0.9, seed=-3, max_tokens=24),
    ]
    params = [kinds[i % len(kinds)] for i in range(len(checkpoint.prompts))]
    fixed = [i for i, param in enumerate(params) if param.greedy or param.seed is not None]
    engine = LLMEngine(checkpoint.path)
    alone = [token_ids(run(engine, [checkpoint.prompts[i]], params[i]))[0] for i in fixed]
    assert engine.stats().num_preemptions == 0

    engine = LLMEngine(checkpoint.path, num_blocks=10, block_size=8, max_num_batched_tokens=20)
    together = token_ids(run(engine, checkpoint.prompts, params))
    assert engine.stats().num_preemptions > 0
    assert [together[i] for i in fixed] == alone
    backwards = token_ids(run(engine, checkpoint.prompts[::-1], params[::-1]))[::-1]
    assert [backwards[i] for i in fixed] == alone


@each_family
def test_seeded_sampling_is_the_sampler_on_hugging_face_s_logits(checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=5, max_tokens=24)
    engine = LLMEngine(checkpoint.path, num_blocks=10, block_size=8)
    outputs = token_ids(run(engine, checkpoint.prompts, params))
    assert engine.stats().num_preemptions > 0
    for prompt, output in zip(checkpoint.prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = checkpoint.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert output == Sampler(0).sample(logits, [SamplingState(params, [1], [0] * i) for i in range(24)]).token_ids


@given(
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([8, 16, 32]),
            "max_num_seqs": st.integers(1, 10),
            "max_num_batched_tokens": st.integers(1, 60),
        }
    ),
    num_slots=st.integers(64, 200),
    # Which prompt, how many tokens, how many steps before the next one arrives; 0 tokens: aborted at that moment.
    arrivals=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 24), st.integers(0, 12)), min_size=1, max_size=14),
)
def test_any_load(
    llama: Checkpoint, options: dict[str, int], num_slots: int, arrivals: list[tuple[int, int, int]]
) -> None:
    engine = LLMEngine(llama.path, num_blocks=-(-num_slots // options["block_size"]), **options)
    results: dict[str, list[int]] = {}
    for i, (prompt, num_tokens, num_steps) in enumerate(arrivals):
        params = SamplingParams(temperature=0, max_tokens=num_tokens or 24)
        engine.add_request(str(i), sampling_params=params, prompt_token_ids=llama.prompts[prompt])
        for _ in range(num_steps):
            results.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
            engine.scheduler.block_manager.check_integrity()
        if num_tokens == 0:
            engine.abort_request(str(i))
    results.update((request_id, outputs[-1].outputs[0].token_ids) for request_id, outputs in finish_all(engine).items())
    for i, (prompt, num_tokens, _) in enumerate(arrivals):
        if num_tokens:
            assert results[str(i)] == llama.expected[prompt][:num_tokens]
        else:
            assert results.get(str(i), []) == llama.expected[prompt][: len(results.get(str(i), []))]

"""LLM.embed and LLM.score: sentence-transformers' vectors, with the same bits whatever else the engine does."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MAX_LEN, VOCAB_SIZE, Checkpoint, change_config, make_model
from embedders import make_embedder, make_reranker, reference_embeddings, reference_scores, write_modules
from engine_runs import finish_all
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM

from pagedattn_serve import LLM, EmbeddingRequestOutput, LLMEngine, PoolingParams, SamplingParams

MODES = ["lasttoken", "mean_tokens"]
CHUNKED: dict[str, Any] = dict(num_blocks=40, block_size=8, max_num_seqs=4, max_num_batched_tokens=9)
DRAW = random.Random(7)
# Of one token, of several steps' chunks, and as long as the model takes: nothing is generated.
PROMPTS = [[DRAW.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 5, 40, MAX_LEN, 17)]


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


def embed(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[float]]:
    return vectors(llm.embed(prompts, PoolingParams(**params), use_tqdm=False))


def expect_vectors(actual: list[list[float]], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(actual), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each mode."""
    directories = {mode: tmp_path_factory.mktemp(mode) for mode in MODES}
    for mode, directory in directories.items():
        make_embedder(directory, "qwen3", mode)
    return directories


@pytest.fixture(scope="module")
def llms(embedder: dict[str, Path]) -> dict[str, LLM]:
    return {mode: LLM(str(directory), **CHUNKED) for mode, directory in embedder.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "has_head"), [("qwen3", True), ("llama-gqa", False), ("mistral", False)])
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path, name: str, has_head: bool, mode: str) -> None:
    """And the same bits alone, in a batch, and in chunks of other sizes."""
    make_embedder(tmp_path, name, mode, has_head=has_head)
    llm = LLM(str(tmp_path), **CHUNKED)
    together = embed(llm, PROMPTS)
    expect_vectors(together, reference_embeddings(tmp_path, PROMPTS, mode))
    assert [embed(llm, [prompt])[0] for prompt in PROMPTS] == together
    assert embed(LLM(str(tmp_path), num_blocks=99, block_size=8), PROMPTS) == together


def test_a_model_that_generates_has_its_last_token_pooled(get_checkpoint: Callable[[str], Checkpoint]) -> None:
    directory = Path(get_checkpoint("opt-350m").path)  # whose rows before the head are narrower than the layers'
    llm = LLM(str(directory), **CHUNKED)
    expect_vectors(embed(llm, PROMPTS), reference_embeddings(directory, PROMPTS))


@pytest.mark.parametrize("modules", [["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]])
def test_what_is_not_normalised_stays(tmp_path: Path, modules: list[str]) -> None:
    make_embedder(tmp_path, "qwen3", "mean_tokens", modules)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')  # as it is written today
    llm = LLM(str(tmp_path), **CHUNKED)
    expected = reference_embeddings(tmp_path, PROMPTS, "mean_tokens", normalizes="Normalize" in modules)
    expect_vectors(embed(llm, PROMPTS), expected)


def test_a_model_through_transformers(tmp_path: Path) -> None:
    """Which caps its logits behind the head. Embeddings, and in the same batches tokens."""
    torch.manual_seed(0)
    shape = dict(hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, head_dim=12)
    config = AutoConfig.for_model(
        "gemma2", **shape, vocab_size=VOCAB_SIZE, num_key_value_heads=2, max_position_embeddings=MAX_LEN
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_modules(tmp_path, "mean_tokens")
    llm = LLM(str(tmp_path), **CHUNKED)
    params = SamplingParams(temperature=0, max_tokens=9)
    [alone] = llm.generate([PROMPTS[3]], params, use_tqdm=False)
    outputs = run_mixed(llm.llm_engine, [*PROMPTS[:4], PROMPTS[3]], [*[PoolingParams()] * 4, params])
    expect_vectors(
        [output.embedding for output in outputs[:4]], reference_embeddings(tmp_path, PROMPTS[:4], "mean_tokens")
    )
    assert outputs[4].outputs[0].token_ids == alone.outputs[0].token_ids


BETWEEN: dict[str, dict[str, Any]] = {
    "electra": dict(is_decoder=True, pad_token_id=1, embedding_size=40),
    "minicpm3": dict(
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        dim_model_base=12,
    ),
    "modernbert-decoder": dict.fromkeys((f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")), 0),
}


@pytest.mark.parametrize("model_type", BETWEEN)
def test_hidden_states_before_what_lies_between_them_and_the_head(tmp_path: Path, model_type: str) -> None:
    """Layers, also to rows of another size; or a scale."""
    torch.manual_seed(0)
    shape = dict(hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model(
        model_type, **shape, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN, **BETWEEN[model_type]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_modules(tmp_path, "lasttoken", ["Transformer", "Pooling"])
    llm = LLM(str(tmp_path), **CHUNKED)
    expect_vectors(embed(llm, PROMPTS), reference_embeddings(tmp_path, PROMPTS, normalizes=False))
    assert len(embed(llm, PROMPTS[:1], dimensions=48)[0]) == 48


def run_mixed(engine: LLMEngine, prompts: list[list[int]], params: list[Any], **options: Any) -> list[Any]:
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param, **options)
    outputs = finish_all(engine)
    return [outputs[str(i)][-1] for i in range(len(prompts))]


@pytest.mark.parametrize("mode", MODES)
def test_beside_requests_that_generate(llms: dict[str, LLM], mode: str) -> None:
    """No request notices the others."""
    llm, params = llms[mode], SamplingParams(temperature=0, max_tokens=20)
    alone, generated = embed(llm, PROMPTS), llm.generate(PROMPTS[:3], params, use_tqdm=False)
    outputs = run_mixed(llm.llm_engine, [*PROMPTS[:3], *PROMPTS], [*[params] * 3, *[PoolingParams()] * 6])
    assert [output.outputs for output in outputs[:3]] == [output.outputs for output in generated]
    assert [output.embedding for output in outputs[3:]] == alone
    assert all(output.finished and not output.outputs[0].token_ids for output in outputs[3:])


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("mode", MODES)
def test_preempted_amid_its_prompt(
    embedder: dict[str, Path], llms: dict[str, LLM], mode: str, preemption_mode: str
) -> None:
    """A request of better priority takes the place of one that is half summed up."""
    options = {**CHUNKED, "max_num_seqs": 1, "scheduling_policy": "priority", "preemption_mode": preemption_mode}
    engine = LLMEngine(str(embedder[mode]), **options)
    engine.add_request("long", PROMPTS[4], PoolingParams(), priority=1)
    for _ in range(5):
        assert not engine.step()
    engine.add_request("short", PROMPTS[0], PoolingParams(), priority=0)
    outputs = finish_all(engine)
    assert engine.stats().num_preemptions == 1
    assert [outputs[each][-1].embedding for each in ("short", "long")] == embed(llms[mode], [PROMPTS[0], PROMPTS[4]])
    engine.scheduler.block_manager.check_integrity()
    assert engine.stats().num_used_blocks == 0


def test_prefixes_are_found_unless_all_positions_are_needed(llms: dict[str, LLM]) -> None:
    prompt = [5, *PROMPTS[3]]  # of 41 tokens, so 5 full blocks
    for mode, num_cached in (("lasttoken", 40), ("mean_tokens", 0)):
        first, second = (llms[mode].embed([prompt], use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
        assert first.outputs == second.outputs


def test_a_registered_prefix(tmp_path: Path) -> None:
    """Of a model that cannot compute it by generating a token."""
    make_embedder(tmp_path, "llama-gqa", "lasttoken", has_head=False)
    llm = LLM(str(tmp_path), **CHUNKED)
    assert llm.register_prefix(PROMPTS[3]) == 40
    embed(llm, [PROMPTS[4], PROMPTS[4][::-1], PROMPTS[4][1:]])  # takes all other blocks
    [output] = llm.embed([[*PROMPTS[3], 5]], use_tqdm=False)
    assert output.num_cached_tokens == 40


def test_the_first_dimensions(llms: dict[str, LLM]) -> None:
    llm = llms["lasttoken"]
    [whole], [cut] = embed(llm, PROMPTS[3:4]), embed(llm, PROMPTS[3:4], dimensions=7)
    expect_vectors([cut], torch.nn.functional.normalize(torch.tensor([whole[:7]])))
    assert embed(llm, PROMPTS[3:4], dimensions=48) == [whole]
    for dimensions in (0, 49):
        with pytest.raises(ValueError, match=rf"dimensions: expected an int .*, got {dimensions}"):
            embed(llm, PROMPTS[3:4], dimensions=dimensions)


def test_what_is_given_to_embed(llms: dict[str, LLM]) -> None:
    llm = llms["mean_tokens"]
    each = [PoolingParams(dimensions=3), PoolingParams()]
    first, second = llm.embed(PROMPTS[:2], each, use_tqdm=False, lora_request=None)
    assert (first.outputs.hidden_size, second.outputs.hidden_size) == (3, 48)
    assert (first.prompt_token_ids, first.finished) == (PROMPTS[0], True)
    assert llm.embed([], use_tqdm=False) == []
    for params, message in [
        (SamplingParams(), "prompt 1 of 2: pooling_params: expected PoolingParams, got SamplingParams"),
        ([PoolingParams()], "pooling_params: expected one for all or one for each of 2 prompts, got 1"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            llm.embed(PROMPTS[:2], params, use_tqdm=False)
    with pytest.raises(
        ValueError, match=rf"prompt 2 of 2: expected 1 to {MAX_LEN} tokens \(max_model_len {MAX_LEN}\), got"
    ):
        llm.embed([PROMPTS[0], [1] * (MAX_LEN + 1)], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_scores(llms: dict[str, LLM]) -> None:
    llm = llms["lasttoken"]
    first, *others = torch.tensor(embed(llm, PROMPTS[:4]))
    scores = llm.score(PROMPTS[0], PROMPTS[1:4], use_tqdm=False)
    expected = [float(first @ other) for other in others]
    assert [score.outputs.score for score in scores] == pytest.approx(expected, abs=1e-6)
    assert scores[1].prompt_token_ids == PROMPTS[0] + PROMPTS[2]
    [same, other] = llm.score(PROMPTS[:2], [PROMPTS[0], PROMPTS[2]], use_tqdm=False)
    assert (same.outputs.score, other.outputs.score) == pytest.approx((1, float(others[0] @ others[1])), abs=1e-6)
    with pytest.raises(ValueError, match="text_1: expected one prompt, or 3 as in text_2, got 2"):
        llm.score(PROMPTS[:2], PROMPTS[1:4], use_tqdm=False)


TEXTS = ["the cat", "the hat sat on the mat", "end", "the end of the other story"]


@pytest.mark.parametrize(
    ("name", "fields", "is_squashed"),
    [
        ("qwen3", {}, False),
        ("qwen2-tied", {}, True),
        ("llama-gqa", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ("mistral", {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
    ],
)
def test_a_reranker_scores_pairs(tmp_path: Path, name: str, fields: dict[str, Any], is_squashed: bool) -> None:
    """In chunks, with the bits of a pair alone. It gives neither embeddings nor tokens."""
    make_reranker(tmp_path, name, **fields)
    if name == "qwen3":
        of_today = {"activation_fn": "torch.nn.modules.linear.Identity"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(of_today))
    llm = LLM(str(tmp_path), **CHUNKED)
    expected = reference_scores(tmp_path, [TEXTS[1]] * 4, TEXTS)
    expected = expected.sigmoid() if is_squashed else expected
    scores = [each.outputs.score for each in llm.score(TEXTS[1], TEXTS, use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-5)
    ids = [llm.llm_engine.tokenize(text) for text in TEXTS]
    assert [llm.score(ids[1], [each], use_tqdm=False)[0].outputs.score for each in ids] == scores
    assert llm.score(TEXTS[1], [], use_tqdm=False) == llm.score([], [], use_tqdm=False) == []
    with pytest.raises(ValueError, match=r"model: expected one that gives embeddings, got a reranker: call LLM\.score"):
        llm.embed(TEXTS, use_tqdm=False)
    with pytest.raises(ValueError, match=r"model: expected one with a head"):
        llm.generate(TEXTS, use_tqdm=False)


def test_what_is_broken_in_a_reranker(tmp_path: Path) -> None:
    make_reranker(tmp_path, "llama-gqa")
    tensors = load_file(tmp_path / "model.safetensors")
    narrow = tensors | {"score.weight": tensors["score.weight"][:, :10].contiguous()}
    save_file(narrow, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"one label: score\.weight \[1, hidden_size\], got \[1, 10\]"):
        LLM(str(tmp_path), num_blocks=8).score("the", "cat", use_tqdm=False)
    change_config(tmp_path, sentence_transformers="x")
    with pytest.raises(ValueError, match=r"config\.json: sentence_transformers: expected a JSON object, got 'x'"):
        LLM(str(tmp_path), num_blocks=8)


def test_pairs_that_end_in_padding_are_refused(tmp_path: Path) -> None:
    """transformers scores the token before."""
    make_reranker(tmp_path, "llama-gqa", pad_token_id=1)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"pairs end in another token than that of padding.*, got pad_token_id 1"):
        LLM(str(tmp_path), num_blocks=8).score("the", "cat", use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 3}, r"one label: score\.weight \[1, hidden_size\], got \[3, 48\]"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, ".*Identity, got Tanh"),
    ],
)
def test_other_classifiers_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    make_reranker(tmp_path, "qwen3", **fields)
    with pytest.raises(ValueError, match=f"model: expected a reranker with .*{message}"):
        LLM(str(tmp_path), num_blocks=8).score("the", "cat", use_tqdm=False)


def test_an_embedding_that_is_no_number(tmp_path: Path) -> None:
    """The error says whose it is. Requests of other callers go on."""
    make_embedder(tmp_path, "llama-gqa", "lasttoken")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(tmp_path), **CHUNKED)
    with pytest.raises(RuntimeError, match=r"prompt 2 of 2: .*hidden states: expected numbers, got NaN or infinity"):
        llm.embed([[1, 2], [4, 5]], use_tqdm=False)
    assert len(embed(llm, [[1, 2]])) == 1


def expect_no_embeddings(directory: Path, message: str) -> None:
    """Tokens are served all the same."""
    llm = LLM(str(directory), num_blocks=8)
    with pytest.raises(ValueError, match=f"prompt 1 of 2: model: expected {message}"):
        llm.embed([[1], [2]], use_tqdm=False)
    assert llm.generate([[1]], use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("mode", "modules", "message"),
    [
        ("cls_token", ["Transformer", "Pooling"], "pooling by lasttoken or mean in .*config.json, got cls"),
        ("lasttoken", ["Transformer", "Pooling", "Dense"], "Transformer, Pooling and perhaps Normalize in .*, Dense"),
        ("lasttoken", [], "Transformer, Pooling and perhaps Normalize in .*modules.json, got none"),
    ],
)
def test_other_ways_of_pooling_are_refused(tmp_path: Path, mode: str, modules: list[str], message: str) -> None:
    make_embedder(tmp_path, "llama-gqa", mode, modules)
    if mode == "cls_token":
        write_modules(tmp_path, mode, modules)
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    expect_no_embeddings(tmp_path, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("sentence_bert_config.json", '{"do_lower_case": true}', "one whose texts stay as they are, got do_lower_case"),
        ("modules.json", '[{"type": "x.Transformer", "path": "0"}]', "a Transformer with the path '' in .*, got '0'"),
        ("1_Pooling/config.json", None, "pooling by lasttoken or mean in .*1_Pooling/config.json, got no such file"),
    ],
)
def test_files_that_ask_for_more(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    make_embedder(tmp_path, "llama-gqa", "lasttoken")
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    expect_no_embeddings(tmp_path, message)


@pytest.mark.parametrize(
    ("metadata", "mode"),
    [({}, "lasttoken"), ({"pooling_type": 3}, "lasttoken"), ({"pooling_type": 1}, "mean_tokens")],
)
def test_a_gguf_file_is_pooled_as_it_says(tmp_path: Path, metadata: dict[str, Any], mode: str) -> None:
    model = make_model("qwen3")
    write_gguf(tmp_path / "m.gguf", model, **{f"qwen3.{key}": value for key, value in metadata.items()})
    model.save_pretrained(tmp_path)
    expected = reference_embeddings(tmp_path, PROMPTS, mode)
    expect_vectors(embed(LLM(str(tmp_path / "m.gguf"), **CHUNKED), PROMPTS), expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (2, r"pooling by lasttoken \(3\) or mean \(1\) in .*m\.gguf, got qwen3\.pooling_type 2"),
        (4, "pooling by .*, got qwen3.pooling_type 4"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path: Path, kind: int, message: str) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("qwen3"), **{"qwen3.pooling_type": kind})
    expect_no_embeddings(tmp_path / "m.gguf", message)

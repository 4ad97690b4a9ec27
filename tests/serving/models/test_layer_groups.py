"""Groups of layers by their windows: which caches share block tables and memory; and that models whose layers differ in
their windows give what `generate` gives, however their blocks come and go."""

from typing import Any

import pytest
from checkpoints import SMALL
from engine_runs import run, token_ids
from test_transformers_models import GREEDY, make_model, prompts_of, references

from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.models.cache_shape import CacheShape, group_caches
from pagedattn_serve.sampling_params import SamplingParams

GEMMA_3 = ["sliding_attention"] * 5 + ["full_attention"]
TOKEN_BYTES = 6 * 2 * 2 * 16 * 4  # of its six layers: keys and values of two heads, fp32


def layers(window: int, *, num_layers: int, every: int) -> list[CacheShape]:
    """Every so many layers, one sees all tokens, as in Gemma 3."""
    return [CacheShape(1, 256, window=None if (i + 1) % every == 0 else window) for i in range(num_layers)]


@pytest.mark.parametrize(
    ("num_layers", "every", "windows", "size"),
    [
        (18, 6, [512] * 5 + [None], 3),  # Gemma 3 270M
        (26, 6, [512] * 6 + [None], 4),  # 1B: 22 and 4
        (34, 6, [512] * 6 + [None], 5),  # 4B: 29 and 5
        (62, 6, [512] * 5 + [None], 11),  # 27B: 52 and 10
        (24, 2, [512, None], 12),  # gpt-oss 20B, Gemma 2
        (25, 2, [512, None], 13),  # 13 and 12: one place of one group is unused
        (32, 40, [512], 32),  # all alike
        (32, 32, [None], 32),  # 31 and 1: too many groups
    ],
)
def test_groups_of_caches(num_layers: int, every: int, windows: list[int | None], size: int) -> None:
    groups = group_caches(shapes := layers(512, num_layers=num_layers, every=every))
    assert (groups.windows, len(groups.shapes)) == (tuple(windows), size)
    assert len(set(groups.places)) == num_layers  # no two caches lie in one place
    for shape, (group, place) in zip(shapes, groups.places, strict=True):
        assert groups.windows[group] in (shape.window, None) and place < size


def test_caches_that_differ_otherwise_are_one_group() -> None:
    shapes = [CacheShape(2, 256, window=512), CacheShape(1, 512)]
    groups = group_caches(shapes)
    assert groups.windows == (None,) and list(groups.shapes) == shapes and groups.places == ((0, 0), (0, 1))


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma3_text", dict(num_hidden_layers=6, layer_types=GEMMA_3)),
        ("gpt_oss", dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)),
        ("gemma2", dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)),
    ],
)
def test_greedy_equals_hugging_face(
    tmp_path: Any, model_type: str, fields: dict[str, Any], preemption_mode: str
) -> None:
    """Prompts that begin alike, two outputs each, in a cache that is too small for them; and once more, when their
    beginnings are in the cache."""
    model = make_model(model_type, **fields)
    model.save_pretrained(tmp_path)
    beginning, *ends = prompts_of(model_type, (30, 1, 9, 15, 4))
    prompts = [beginning + end for end in ends]
    expected = references(model, prompts)
    num_groups, num_blocks = (6, 7) if model_type == "gemma3_text" else (2, 9)
    options = SMALL | dict(num_blocks=num_blocks, max_num_seqs=6, preemption_mode=preemption_mode, swap_space=1)
    engine = LLMEngine(str(tmp_path), **options)
    assert len(engine.scheduler.block_manager.windows) == num_groups
    for _ in range(2):
        outputs = run(engine, prompts, SamplingParams(temperature=0, max_tokens=GREEDY.max_tokens, n=2))
        assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == [[e, e] for e in expected]
    stats = engine.stats()
    assert (stats.num_swaps if preemption_mode == "swap" else stats.num_recomputes) > 0
    assert stats.num_found_tokens > 0 and stats.num_used_blocks == 0


def test_prefixes_on_disk(tmp_path: Any) -> None:
    """Of groups with windows only the blocks that the next token sees are there, under keys of the group."""
    model = make_model("gemma3_text", num_hidden_layers=6, layer_types=GEMMA_3)
    model.save_pretrained(tmp_path / "model")
    beginning, *ends = prompts_of("disk", (40, 1, 3, 2))
    prompts = [beginning + end for end in ends]
    options = SMALL | dict(num_blocks=20, prefix_cache_dir=tmp_path / "blocks")
    for asked, num_found in ((prompts, 80), (prompts[2:], 40)):
        engine = LLMEngine(str(tmp_path / "model"), **options)
        for prompt in asked:
            assert token_ids(run(engine, [prompt], GREEDY)) == references(model, [prompt])
        assert engine.stats().num_found_tokens == num_found
        engine.flush()
    assert 5 + 5 <= engine.stats().num_read_blocks < 5 * 6


def test_a_sequence_that_fits_because_its_windows_let_go(tmp_path: Any) -> None:
    """With all blocks of all groups it would take 6 * 12 blocks. It is the cache's only sequence, in chunks."""
    model = make_model("gemma3_text", num_hidden_layers=6, layer_types=GEMMA_3)
    model.save_pretrained(tmp_path)
    memory = (12 + 5 * 4) * 8 * TOKEN_BYTES // 6  # 11 and 9 tokens lie in 4 blocks at most
    engine = LLMEngine(str(tmp_path), **SMALL | dict(num_blocks=None, kv_cache_memory=memory))
    assert engine.max_model_len == 96
    [prompt] = prompts_of("long", (76,))
    assert token_ids(run(engine, [prompt], GREEDY)) == references(model, [prompt])
    engine.add_request("short", prompt_token_ids=[1, 2, 3], sampling_params=GREEDY)
    engine.step()
    assert engine.stats().num_used_blocks == 6


def test_info(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("gemma3_text", num_hidden_layers=6, layer_types=GEMMA_3).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["info", str(tmp_path), "--block-size", "8"]) == 0
    shown = {line[:15].rstrip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert shown["cache"].startswith(f"{TOKEN_BYTES:,} bytes per token, {8 * TOKEN_BYTES // 6:,} per block of 8, ")
    assert shown["layer groups"] == "5 of 1 caches that see 11 tokens; 1 of 1 caches that see all tokens"
    num_blocks = 128 // 8 + 5 * 3  # 11 tokens lie in 3 blocks at most
    assert shown["full length"].startswith(
        f"{num_blocks} blocks, {num_blocks * 8 * TOKEN_BYTES // 6:,} bytes a sequence"
    )

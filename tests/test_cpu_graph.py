"""CPUGraph: replays give what the ops give, on what the inputs hold then; what cannot be replayed is refused."""

import copy
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checks import assert_same_bits
from op_calls import CALLS, PACKING, SCHEMA_OF, call_wrapper, make_arguments, op_of, raw_op, tensors_in
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn_ext import CPUGraph, ops
from pagedattn_ext.cpu_graph import CaptureError, run_at_replays

CSRC = Path(__file__).resolve().parents[1] / "csrc"


RUN_AT_CAPTURES = ("batch_positions", "compute_slot_mapping", "consecutive_block_tables")


def make_layer() -> tuple[Tensor, Tensor]:
    """A packed weight of [32, 16], and its input."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 16, generator=generator)
    return ops.pack_linear_weight(weight), torch.randn(3, 16, generator=generator)


def test_memory_that_a_graph_keeps() -> None:
    """Of results alone: neither of weights, inputs and views, nor twice."""
    packed_weight, input = make_layer()
    graph = CPUGraph()
    assert graph.num_bytes == 0
    with graph.capture():
        hidden = ops.linear_packed(input, packed_weight, 32)
        out = ops.silu_and_mul(hidden.view(3, 32))
    del hidden
    assert graph.num_bytes == 4 * 3 * (32 + 16)
    graph.replay()
    assert out.shape == (3, 16) and graph.num_bytes == 4 * 3 * (32 + 16)
    graph.reset()
    assert graph.num_bytes == 0


def test_a_graph_keeps_what_an_op_makes() -> None:
    """Slots, lengths, positions and rotated tokens, which no tensor of the caller has."""
    arguments = make_arguments("append_and_attend with rotation")
    graph = CPUGraph()
    with graph.capture():
        ops.append_and_attend(**arguments)
    sizes = [tensor.nbytes for tensor in arguments.values() if isinstance(tensor, Tensor)]
    others = [torch.ones(size, dtype=torch.uint8) for size in sizes for _ in range(20)]
    graph.replay()
    assert all(bool(other.all()) and int(other.max()) == 1 for other in others)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which ops of torch run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


def tensors_of(arguments: dict[str, Any], result: Any) -> list[Tensor]:
    return [*tensors_in(arguments), *tensors_in({"result": [*result] if isinstance(result, tuple) else result})]


@pytest.mark.parametrize("call", CALLS)
def test_every_op(call: str) -> None:
    """Captured, it does nothing; replayed, all that it does otherwise."""
    expected, arguments = make_arguments(call), make_arguments(call)
    expected_result = raw_op(call)(**expected)
    graph = CPUGraph()
    with graph.capture():
        result = raw_op(call)(**arguments)
    for argument, untouched in zip(tensors_in(arguments), tensors_in(make_arguments(call)), strict=True):
        assert_same_bits(argument, untouched)
    graph.replay()
    for mine, eager in zip(tensors_of(arguments, result), tensors_of(expected, expected_result), strict=True):
        assert_same_bits(mine, eager)


def test_ops_in_a_row_on_other_inputs() -> None:
    """Memory between them is not given away; views and ops of torch are part of it."""
    packed, input = make_layer()

    def layers(rows: Tensor) -> Tensor:
        hidden = ops.silu_and_mul(ops.linear_packed(rows, packed, 32))
        hidden = functional.layer_norm(hidden, (16,)) + rows
        hidden.view(-1)[5:7].mul_(2)
        first, second = hidden.chunk(2, dim=-1)
        values, indices = torch.topk(first.float(), 4)
        return ops.linear_packed(torch.cat([values, indices.float(), second.contiguous()], dim=-1), packed, 32)

    graph = CPUGraph()
    with torch.inference_mode():
        with graph.capture():
            out = layers(input)
        for seed in range(3):
            input.copy_(torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)))
            others = [torch.full((3, 32), torch.nan) for _ in range(50)]  # where freed memory would be
            graph.replay()
            assert_same_bits(out, layers(input))
            del others


def test_replay_outside_of_inference_mode() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        out = ops.linear_packed(input * 2, packed, 32)
    graph.replay()
    assert_same_bits(out, ops.linear_packed(input * 2, packed, 32))


def test_arguments_are_checked_at_capture() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    with pytest.raises(ValueError, match="linear_packed: out_features: expected"), graph.capture():
        ops.linear_packed(input, packed, -1)
    with graph.capture():  # as nothing has been captured
        out = ops.linear_packed(input, packed, 32)
    graph.replay()
    assert_same_bits(out, ops.linear_packed(input, packed, 32))


@pytest.fixture
def new_memory_is_full() -> Iterator[None]:
    """Of NaN and of the greatest ints: what lies in new memory is not luck."""
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [name for name in SCHEMA_OF if name not in [*RUN_AT_CAPTURES, *PACKING]])
@pytest.mark.usefixtures("new_memory_is_full")
def test_what_wrappers_allocate_is_zeros_until_replay(name: str) -> None:
    """Probabilities, and tokens and flags alike. (Packed weights are in zeros of mmap, which no capture sees.)"""
    arguments = make_arguments(name)
    given = {tensor.data_ptr() for tensor in tensors_in(arguments)}
    with torch.inference_mode(), CPUGraph().capture():
        result = call_wrapper(name, arguments)
    for tensor in tensors_of({}, result):
        if tensor.data_ptr() not in given:
            assert tensor.count_nonzero() == 0


@pytest.mark.usefixtures("new_memory_is_full")
def test_allocations_of_torch_are_zeros_until_replay() -> None:
    ints = torch.ones(3, 4, dtype=torch.int64)
    with CPUGraph().capture():
        results = [
            torch.empty(3, dtype=torch.bool),
            torch.empty_like(ints),
            torch.empty_permuted((2, 3), (1, 0), dtype=torch.int32),
            torch.empty_strided((2, 3), (1, 2), dtype=torch.complex64),
            ints.new_empty(3),
            ints.new_empty_strided((2, 3), (1, 2)),
        ]
    assert not any(tensor.any() for tensor in results)


@pytest.mark.usefixtures("new_memory_is_full")
def test_sampled_tokens_are_looked_up() -> None:
    """Behind the op that samples them: any op of torch that takes indices."""
    generator = torch.Generator().manual_seed(0)
    table, logits = torch.randn(100, 8, generator=generator), torch.randn(4, 100, generator=generator)

    def step() -> list[Tensor]:
        tokens, is_valid = ops.sample_from_probs(ops.softmax(logits), seed=1)
        last = logits.gather(1, tokens.long()[:, None])
        return [table[tokens.long()], functional.embedding(tokens, table), last, tokens * is_valid]

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        results = step()
    logits.copy_(torch.randn(4, 100, generator=generator))
    graph.replay()
    for mine, eager in zip(results, step(), strict=True):
        assert_same_bits(mine, eager)


def test_results_are_zeros_until_replay() -> None:
    """Ops of torch run at the capture: with what lay in the memory before, sampling raised now and then."""
    rows, weight = torch.ones(20, 300), torch.ones(300)
    freed = [torch.full((20, 300), float("nan")) for _ in range(50)]
    del freed
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        results = [ops.rms_norm(rows, weight) for _ in range(20)] + [torch.empty(20, 300) for _ in range(20)]
        torch.multinomial(torch.softmax(results[0], dim=-1), num_samples=1)
    assert all(torch.count_nonzero(each) == 0 for each in results)
    graph.replay()
    assert all(torch.count_nonzero(each) == each.numel() for each in results[:20])


def test_what_a_replay_would_miss() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    message = r"CPUGraph: expected ops that return tensors, got aten\._local_scalar_dense"
    with pytest.raises(RuntimeError, match=message), graph.capture():
        ops.linear_packed(input, packed, 32)[0, 0].item()
    with pytest.raises(RuntimeError, match="expected a complete capture, got one that is failed"):
        graph.replay()
    with pytest.raises(RuntimeError, match="CPUGraph: expected tensors on the CPU, got one on meta"), graph.capture():
        torch.empty(3, device="meta") + 1
    assert ops.linear_packed(input, packed, 32).isfinite().all()


@pytest.mark.parametrize("compiles", [False, True])
def test_torch_s_compiler_is_not_imported(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """Which takes two seconds. But what compiles for the first time within a capture does not compile the capture."""
    compiler = importlib.import_module("torch._dynamo")
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    packed_weight, input = make_layer()

    def layer(x: Tensor) -> Tensor:
        return (ops.linear_packed(x, packed_weight, 32) * 2).relu()

    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        hidden = layer(input)
        assert "torch._dynamo" not in sys.modules
        if compiles:
            monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
            first, second = (torch.compile(layer, backend=backend)(x) for x in (input, input + 1))
    assert not compiled
    input.copy_(torch.randn(3, 16))
    graph.replay()
    assert torch.equal(hidden, layer(input))
    if compiles:
        assert torch.equal(first, layer(input)) and torch.equal(second, layer(input + 1))


def test_one_capture_at_a_time() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    message = "CPUGraph: expected no other capture under way on this thread"
    with pytest.raises(RuntimeError, match=message), graph.capture(), CPUGraph().capture():
        pass
    with graph.capture():
        out = ops.linear_packed(input, packed, 32)
    with (
        pytest.raises(RuntimeError, match="CPUGraph: expected a new graph, got one with a capture that is complete"),
        graph.capture(),
    ):
        pass
    graph.replay()
    assert_same_bits(out, ops.linear_packed(input, packed, 32))


def test_a_capture_within_its_own_capture() -> None:
    """Is refused, and the one under way goes on."""
    packed, input = make_layer()
    graph = CPUGraph()
    message = "CPUGraph: expected a new graph, got one with a capture that is under way"
    context = graph.capture()
    assert graph.capture() is context
    with context:
        out = ops.linear_packed(input, packed, 32)
        with pytest.raises(RuntimeError, match=message):
            graph.capture()
        with pytest.raises(RuntimeError, match=message), context:
            pass
        doubled = ops.linear_packed(input * 2, packed, 32)
    graph.replay()
    assert_same_bits(out, ops.linear_packed(input, packed, 32))
    assert_same_bits(doubled, ops.linear_packed(input * 2, packed, 32))


def test_a_replay_within_a_capture() -> None:
    """Of this graph or of another one: the capture would not see it."""
    packed, input = make_layer()
    first, second = CPUGraph(), CPUGraph()
    with first.capture():
        out = ops.linear_packed(input, packed, 32)
    message = "CPUGraph: expected a replay outside of captures, got one within a capture"
    for graph in (first, second):
        with pytest.raises(RuntimeError, match=message), second.capture():
            graph.replay()
    first.replay()
    assert_same_bits(out, ops.linear_packed(input, packed, 32))


def test_reset() -> None:
    """Of a graph, and of a capture of which the context was entered and never left."""
    packed, input = make_layer()
    expected = ops.linear_packed(input, packed, 32)
    graph = CPUGraph()
    graph.reset()
    with graph.capture():
        out = ops.linear_packed(input, packed, 32)
    graph.reset()
    with pytest.raises(RuntimeError, match="CPUGraph: expected a complete capture, got none"):
        graph.replay()
    graph.capture().__enter__()
    graph.reset()
    assert_same_bits(ops.linear_packed(input, packed, 32), expected)
    with graph.capture():
        out = ops.linear_packed(input, packed, 32)
    graph.replay()
    assert_same_bits(out, expected)


def test_other_threads_go_on() -> None:
    packed, input = make_layer()
    expected = ops.linear_packed(input, packed, 32)
    results: list[Tensor] = []
    graph = CPUGraph()
    with graph.capture():
        out = ops.linear_packed(input, packed, 32)
        thread = threading.Thread(target=lambda: results.append(ops.linear_packed(input, packed, 32)))
        thread.start()
        thread.join()
    assert_same_bits(results[0], expected)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    assert_same_bits(out, expected)


def test_a_graph_keeps_what_it_needs() -> None:
    packed, input = make_layer()
    expected = ops.linear_packed(input * 1, packed, 32)
    graph = CPUGraph()
    with graph.capture():
        out = ops.linear_packed(input * 1, packed, 32)
    del packed
    others = [torch.full((3, 16), torch.nan) for _ in range(50)]
    graph.replay()
    assert_same_bits(out, expected)
    assert all(other.isnan().all() for other in others)


# ---- values and shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_scales_of_a_cache_are_read_at_replay(kv_cache_dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value, query = torch.randn(3, 4, 2, 32, generator=generator)
    caches = torch.zeros(1, 2, 2, 8, 16, dtype=torch.uint8), torch.zeros(1, 2, 32, 8, dtype=torch.uint8)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor([2.0])
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    paged = *caches, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)

    def step() -> tuple[Tensor, Tensor]:
        ops.reshape_and_cache(key, value, *caches, torch.arange(4), **options)
        return ops.paged_attention(query[:1], *paged, **options)

    graph = CPUGraph()
    with graph.capture():
        results = step()
    k_scale.fill_(0.125), v_scale.fill_(0.25)
    graph.replay()
    replayed = [tensor.clone() for tensor in (*results, *caches)]
    for mine, eager in zip(replayed, (*step(), *caches), strict=True):
        assert_same_bits(mine, eager)


INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Of the arguments of op_calls whose values ops check, by the place in the argument: values that are wrong there.
WRONG_VALUES: dict[str, dict[int, list[float]]] = {
    "seq_lens": {1: [-1, 33, INT32_MIN, INT32_MAX]},
    "block_tables": {0: [-1, 6, INT32_MIN, INT32_MAX], 5: [6]},
    "query_start_loc": {0: [-1, 1], 1: [-1, 2, INT32_MIN, INT32_MAX], 3: [0, 2, 4, INT32_MAX]},
    "key_start_loc": {0: [-1, 1], 1: [-1, 5, INT32_MIN, INT32_MAX], 3: [0, 5, 7, INT32_MAX]},
    "slot_mapping": {0: [96, INT32_MAX]},
    "block_mapping": {0: [-1, 6, INT32_MIN, INT32_MAX], 3: [-1, 6, INT32_MIN, INT32_MAX], 5: [3]},
    "positions": {1: [-1, 8, INT32_MIN, INT32_MAX]},
    "indices": {1: [-1, 4, INT32_MIN, INT32_MAX]},
    "draft_token_ids": {1: [-1, 70, INT32_MIN, INT32_MAX]},
    "top_k": {0: [0, -1, INT32_MIN]},
    "top_p": {0: [-0.1, 1.1, float("nan")]},
    "min_p": {0: [-0.1, 1.1, float("nan")]},
    "temperature": {0: [-1.0, float("inf"), float("nan")]},
    "k_scale": {0: [0.0, -1.0, float("inf"), float("nan")]},
    "v_scale": {0: [0.0, -1.0, float("inf"), float("nan")]},
    "start_loc": {0: [-1, 1], 1: [-1, 2, INT32_MIN, INT32_MAX], 3: [0, 5, INT32_MAX]},
    "cached_lens": {1: [-1, 33, INT32_MIN, INT32_MAX]},
    "rotary_lens": {0: [-1, 40, INT32_MIN, INT32_MAX], 2: [39]},
    "first_positions": {2: [-1, INT32_MIN, INT32_MAX]},
    "batch_indices": {1: [3, INT32_MAX]},
    "block_tables of compute_slot_mapping": {0: [-1, 12, INT32_MIN, INT32_MAX], 5: [12]},
    "positions of compute_slot_mapping": {1: [-1, 32, INT32_MIN, INT32_MAX]},
    "block_start_loc": {0: [-1, 1], 1: [-1, 5, INT32_MIN, INT32_MAX], 3: [3, 7, INT32_MAX]},
    "last_block_lens": {1: [-1, 0, 17, INT32_MIN, INT32_MAX]},
    "first_blocks": {0: [-1, 5, INT32_MIN, INT32_MAX]},
    "end_blocks": {1: [-1, 5, 41, INT32_MIN, INT32_MAX]},
    "seq_lens of consecutive_block_tables": {1: [-1, 5, INT32_MIN, INT32_MAX]},
    "left_padding": {0: [-1, 5, INT32_MIN, INT32_MAX]},
    "offsets": {0: [-1, 1], 1: [-1, 2, INT32_MIN, INT32_MAX], 3: [0, 2, 4, INT32_MAX]},
    "state_indices": {0: [-2, 6, INT32_MIN, INT32_MAX], 1: [3]},
}
MAY_BE_INT64 = (
    "seq_lens",
    "block_tables",
    "query_start_loc",
    "key_start_loc",
    "slot_mapping",
    "start_loc",
    "first_positions",
)
MAY_BE_INT64 += ("batch_indices", "block_start_loc", "last_block_lens", "first_blocks", "end_blocks", "left_padding")
MAY_BE_INT64 += ("state_indices", "offsets", "cached_lens", "rotary_lens")
HOLDS_ANY_BITS = ("bitmask", "seed", "offset", "subsequence", "out", "num_accepted", "num_emitted")


def wrong_values() -> Iterator[tuple[str, str, torch.dtype, int, float]]:
    """A call, an argument and its dtype, a place in the argument, and a value that is wrong there."""
    for call in CALLS:
        for argument, tensor in make_arguments(call).items():
            if argument not in WRONG_VALUES or tensor is None:
                continue
            dtypes = [torch.int32, torch.int64] if argument in MAY_BE_INT64 else [tensor.dtype]
            for dtype in dtypes:
                of_op = WRONG_VALUES.get(f"{argument} of {op_of(call)}", WRONG_VALUES[argument])
                for place, values in of_op.items():
                    # In the first one, what int32 would hold of the value is right.
                    wide = [int(tensor.view(-1)[place]) + 2**32, INT64_MIN, INT64_MAX] if dtype == torch.int64 else []
                    if argument in ("slot_mapping", "batch_indices"):
                        wide = [value for value in wide if value >= 0]  # a negative one is skipped
                    if argument == "top_k":
                        wide = [value for value in wide if value < 1]  # more than all tokens is all of them
                    yield from ((call, argument, dtype, place, value) for value in values + wide)


def assert_replay_checks(call: str, arguments: dict[str, Any], argument: str, place: int, value: float) -> None:
    """A replay with this value raises what the op raises, writes nothing, and leaves the graph as it was."""
    graph = CPUGraph()
    with graph.capture():
        result = raw_op(call)(**arguments)
    graph.replay()
    right = arguments[argument].clone()
    arguments[argument].view(-1)[place] = value
    before = [tensor.clone() for tensor in tensors_of(arguments, result)]
    with pytest.raises(RuntimeError) as of_the_op:
        raw_op(call)(**copy.deepcopy(arguments))
    with pytest.raises(ValueError) as of_the_replay:
        graph.replay()
    assert f"{of_the_replay.value} (ValueError)" == str(of_the_op.value)
    assert str(of_the_op.value).startswith(f"{op_of(call)}: ")
    for tensor, untouched in zip(tensors_of(arguments, result), before, strict=True):
        assert_same_bits(tensor, untouched)

    arguments[argument].copy_(right)
    expected = copy.deepcopy(arguments)
    expected_result = raw_op(call)(**expected)
    graph.replay()
    for mine, eager in zip(tensors_of(arguments, result), tensors_of(expected, expected_result), strict=True):
        assert_same_bits(mine, eager)


@pytest.mark.parametrize(("call", "argument", "dtype", "place", "value"), [*wrong_values()])
def test_values_are_checked_at_replay(call: str, argument: str, dtype: torch.dtype, place: int, value: float) -> None:
    """As they were at the capture: a length, a block, a slot, a position, an offset, a row, a scale."""
    arguments = make_arguments(call)
    arguments[argument] = arguments[argument].to(dtype)
    assert_replay_checks(call, arguments, argument, place, value)


def test_wrong_values_of_all_index_arguments() -> None:
    """Are in WRONG_VALUES, so that an op cannot come without them."""
    for call in CALLS:
        for argument, tensor in make_arguments(call).items():
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.int32, torch.int64):
                assert argument in (*WRONG_VALUES, *HOLDS_ANY_BITS), (call, argument)


@pytest.mark.parametrize("call", ["paged_attention_v1", "paged_attention_v2", "paged_attention"])
def test_a_length_beyond_max_seq_len_at_replay(call: str) -> None:
    arguments = make_arguments(call) | {"max_seq_len": 17, "seq_lens": torch.tensor([5, 17, 16], dtype=torch.int32)}
    assert_replay_checks(call, arguments, "seq_lens", 2, 18)


def test_a_row_with_two_masks_at_replay() -> None:
    assert_replay_checks("apply_token_bitmask", make_arguments("apply_token_bitmask"), "indices", 1, 1)


def test_keys_beyond_max_seq_len_at_replay() -> None:
    """And within the rows of key."""
    assert_replay_checks(
        "varlen_attention", make_arguments("varlen_attention") | {"max_seq_len": 2}, "key_start_loc", 1, 3
    )


def test_a_source_that_is_a_target_at_replay() -> None:
    """Pairs are copied side by side."""
    assert_replay_checks("copy_blocks", make_arguments("copy_blocks"), "block_mapping", 0, 3)


def test_values_of_a_call_without_rows_are_checked_at_replay() -> None:
    """As the op does, though its kernel has nothing to do."""
    arguments = make_arguments("paged_attention")
    nothing = {"query": torch.zeros(0, 4, 16), "query_start_loc": torch.zeros(4, dtype=torch.int32)}
    assert_replay_checks("paged_attention", arguments | nothing, "seq_lens", 0, -1)
    one_sided = {name: arguments["key_cache"].new_zeros(6, 2, 0) for name in ("src", "dst")}
    mapping = torch.tensor([[0, 1]])
    assert_replay_checks("swap_blocks", {**one_sided, "block_mapping": mapping}, "block_mapping", 1, 6)


def test_what_has_run_before_a_wrong_value() -> None:
    """The ops before it in the graph, of this package and of torch; and positions that the graph itself computes."""
    rotary = make_arguments("rotary_embedding")
    cos_sin_cache, first, query = rotary["cos_sin_cache"], rotary["positions"], rotary["query"]
    input, step = torch.ones(3, 16), torch.zeros((), dtype=torch.int64)

    def function() -> list[Tensor]:
        before = ops.gelu_new(input)
        doubled = before * 2
        rotated = query.clone()
        ops.rotary_embedding(first + step, rotated, None, 16, cos_sin_cache)
        return [before, doubled, rotated, ops.gelu_new(input + 1)]

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        results = function()
    graph.replay()
    after = results[3].clone()
    input.neg_(), step.add_(1)
    message = r"^rotary_embedding: positions: expected 0 to 7 \(the rows of cos_sin_cache\), got 8 at token 1$"
    with pytest.raises(ValueError, match=message):
        graph.replay()
    assert_same_bits(results[0], ops.gelu_new(input))
    assert_same_bits(results[1], ops.gelu_new(input) * 2)
    assert_same_bits(results[2], query)
    assert_same_bits(results[3], after)
    step.zero_()
    graph.replay()
    for mine, eager in zip(results, function(), strict=True):
        assert_same_bits(mine, eager)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],
        lambda x: x[:, x[0] > 0],
        torch.nonzero,
        lambda x: torch.masked_select(x, x > 0),
        torch.unique,
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2]), dim=0),
    ],
)
def test_a_shape_that_depends_on_values_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    _, input = make_layer()
    message = "CPUGraph: expected shapes that do not depend on values, got aten"
    graph = CPUGraph()
    with graph.capture(), pytest.raises(RuntimeError, match=message):
        function(input)
    with pytest.raises(RuntimeError, match="expected a complete capture, got "):  # though the error was caught within
        graph.replay()


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_mkldnn])
def test_other_layouts_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    other = make(torch.eye(3))
    message = r"^CPUGraph: expected strided tensors, got one of layout "
    with pytest.raises(CaptureError, match=message), CPUGraph().capture():
        _ = other + other


class QuantizedWeight(Tensor):
    """As in torchao: a tensor without memory of its own, which says what a product with it is."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: torch.Size) -> "QuantizedWeight":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            return cls(args[0].codes, args[0].scales, args[0].shape)
        assert op in (torch.ops.aten.linear.default, torch.ops.aten.mm.default), op
        input, weight = args
        return ops.linear_int8(input * 1.0, weight.codes, weight.scales)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_that_say_what_ops_do(mode: Callable[[], Any]) -> None:
    weight, input = torch.randn(32, 32), torch.randn(4, 32)
    codes, scales = ops.quantize_weight_int8(weight)
    quantized = QuantizedWeight(ops.pack_linear_weight_int8(codes), scales, weight.shape)
    graph = CPUGraph()
    with mode():
        with graph.capture():
            out = functional.linear(input, quantized) + 1
        input.normal_()
        graph.replay()
        assert_same_bits(out, functional.linear(input, quantized) + 1)


def test_indices_and_masks_that_leave_the_shape_alone() -> None:
    _, input = make_layer()
    rows = torch.tensor([2, 0])

    def function() -> Tensor:
        out = input[rows] * 2
        out[out > 0] = 1
        return torch.where(out < -1, 0, out)

    graph = CPUGraph()
    with graph.capture():
        out = function()
    rows.copy_(torch.tensor([1, 2]))
    input.neg_()
    graph.replay()
    assert_same_bits(out, function())


def test_a_shape_that_changes_at_replay() -> None:
    """Of an op that does not say that it may."""
    library = torch.library.Library("cpu_graph_test", "FRAGMENT")
    library.define("positive(Tensor x) -> Tensor")
    library.impl("positive", lambda x: x[x > 0], "CPU")
    x = torch.tensor([1.0, -1.0, 2.0])
    graph = CPUGraph()
    with graph.capture():
        out = torch.ops.cpu_graph_test.positive(x)
    graph.replay()
    x.copy_(torch.tensor([-1.0, -1.0, 3.0]))
    message = r"expected a result of shape \[2\] from cpu_graph_test.positive.default, as at the capture, got \[1\]"
    with pytest.raises(RuntimeError, match=message):
        graph.replay()
    assert out.tolist() == [1, 2]


def test_views_in_place() -> None:
    """What changes the shape of a tensor and not its values is done once."""
    _, input = make_layer()

    def function() -> Tensor:
        out = input + 1
        out.unsqueeze_(0).transpose_(1, 2).squeeze_(0).t_().mul_(2)
        return out

    graph = CPUGraph()
    with graph.capture():
        out = function()
    graph.replay()
    with Recorder() as recorder:
        graph.replay()
    assert_same_bits(out, function())
    assert recorder.names == ["add", "copy_", "mul_"]
    message = r"CPUGraph: expected tensors that stay in their memory, got aten.resize_.default, which moves one"
    with pytest.raises(RuntimeError, match=message), CPUGraph().capture():
        (input + 1).resize_(100_000)


# ---- ops that call ops ---------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Of a framework: it goes with the test."""
    with torch.library._scoped_library("framework", "FRAGMENT") as library:
        yield library


def define(library: torch.library.Library, schema: str, function: Callable[..., Any]) -> Any:
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, function, "CPU")
    return getattr(torch.ops.framework, name)


def test_an_op_of_others_that_calls_ops_of_this_package(library: torch.library.Library) -> None:
    """One replay does what one call does, to results, to what the op writes, and to no memory of its temporaries."""

    def function(x: Tensor, states: Tensor, weight: Tensor) -> Tensor:
        return ops.silu_and_mul(ops.gelu_new(ops.causal_conv1d(x, states, weight)))

    op = define(library, "layer(Tensor x, Tensor(a!) states, Tensor weight) -> Tensor", function)
    generator = torch.Generator().manual_seed(0)
    x, states, weight = (torch.randn(*shape, generator=generator) for shape in ((64, 32), (64, 32, 3), (32, 4)))
    before = states.clone()

    def step() -> Tensor:
        return ops.gelu_new(op(ops.gelu_new(x), states, weight))

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        out = step()
    others = [torch.full((64, size), torch.nan) for size in (16, 32) for _ in range(50)]  # where temporaries were
    for _ in range(2):
        states.copy_(before)
        graph.replay()
        after = states.clone()
        states.copy_(before)
        assert_same_bits(out, step())
        assert_same_bits(after, states)
        x.neg_()
    assert all(other.isnan().all() for other in others)


def test_an_op_of_others_that_is_called_like_an_allocation(library: torch.library.Library) -> None:
    op = define(library, "new_empty(Tensor x) -> Tensor", lambda x: x * 2)
    x, graph = torch.ones(2, 16), CPUGraph()
    with torch.inference_mode(), graph.capture():
        out = op(x)
    x.neg_()
    graph.replay()
    assert_same_bits(out, x * 2)


def test_an_op_of_others_that_raises(library: torch.library.Library) -> None:
    """If the error is caught within the capture, the ops behind are captured."""

    def function(x: Tensor) -> Tensor:
        return ops.rms_norm(x, torch.ones(3))

    op = define(library, "raises(Tensor x) -> Tensor", function)
    x, graph = torch.ones(2, 16), CPUGraph()
    with torch.inference_mode(), graph.capture():
        with pytest.raises(ValueError, match="rms_norm: weight: expected shape"):
            op(x)
        out = ops.gelu_new(x)
    assert out.count_nonzero() == 0
    x.neg_()
    graph.replay()
    assert_same_bits(out, ops.gelu_new(x))


def test_an_op_of_others_with_a_graph_of_its_own(library: torch.library.Library) -> None:
    """It captures, replays, and calls ops on another thread, at a capture as ever."""
    hidden: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        graph = CPUGraph()
        with graph.capture():
            out = ops.gelu_new(x)
        graph.replay()
        thread = threading.Thread(target=lambda: hidden.append(ops.gelu_new(out)))
        thread.start()
        thread.join()
        return hidden.pop()

    op = define(library, "with_graph(Tensor x) -> Tensor", function)
    x, graph = torch.ones(2, 16), CPUGraph()
    replayed: list[float] = []
    with torch.inference_mode(), graph.capture():
        out = op(x)
        run_at_replays(lambda: replayed.append(out[0, 0].item()))
        twice = ops.gelu_new(out)
    assert_same_bits(out, function(x))
    assert twice.count_nonzero() == 0
    x.neg_()
    graph.replay()
    assert_same_bits(out, function(x))
    assert_same_bits(twice, ops.gelu_new(function(x)))
    assert replayed == [function(x)[0, 0].item()]


# ---- autocast ------------------------------------------------------------------------------------------------------


def test_replay_where_autocast_is_on() -> None:
    """Nothing is cast that was not at the capture."""
    _, input = make_layer()
    layer, graph = torch.nn.Linear(16, 16), CPUGraph()

    def step() -> Tensor:
        return ops.gelu_new(layer(input) @ input.T)

    with torch.inference_mode(), graph.capture():
        out = step()
    input.neg_()
    with torch.autocast("cpu", torch.bfloat16):
        graph.replay()
        assert torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        assert_same_bits(out, step())


@pytest.mark.parametrize("replays_with", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_capture_where_autocast_is_on(mode: Callable[[], Any], replays_with: bool) -> None:
    """Casts are part of it, also of weights that autocast has cast before: replays read what the weights hold."""
    _, input = make_layer()
    first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    graph = CPUGraph()

    def step() -> Tensor:
        return second(first(input)) + first(input)

    with mode():
        with torch.autocast("cpu", torch.bfloat16):
            step()
            with graph.capture():
                out = step()
        with torch.no_grad():
            for parameter in (*first.parameters(), *second.parameters()):
                parameter.copy_(torch.randn_like(parameter))
            input.neg_()
        with torch.autocast("cpu", torch.bfloat16, enabled=replays_with):
            graph.replay()
        with torch.autocast("cpu", torch.bfloat16):
            expected = step()
    assert out.dtype == torch.bfloat16
    assert_same_bits(out.detach(), expected.detach())


# ---- memory --------------------------------------------------------------------------------------------------------


def test_tensors_that_are_given_other_memory() -> None:
    """A replay has what they held before, for ops of this package and of torch, and writes nowhere else."""
    size = 1 << 14
    layer, norm, cache = torch.nn.Linear(size, 4), torch.nn.Parameter(torch.ones(size)), torch.ones(2, size)
    values, mapping = torch.zeros(2, 4), torch.tensor([[0, 1]])
    input = torch.randn(3, size, generator=torch.Generator().manual_seed(0))

    def function() -> Tensor:
        ops.copy_blocks([cache], [values], mapping)
        return layer(ops.rms_norm(input, norm)) + cache[1, :4]

    graph = CPUGraph()
    with torch.inference_mode():
        expected = function()
        with graph.capture():
            out = function()
    layer.half()
    norm.data = torch.empty(1)
    cache.data = torch.empty(1)
    others = [torch.full((n * size,), torch.nan) for n in (1, 2, 4) for _ in range(50)]  # where freed memory would be
    graph.replay()
    assert_same_bits(out, expected)
    assert all(other.isnan().all() for other in others)


@pytest.mark.parametrize("whose", ["input", "weight", "intermediate", "result"])
@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.share_memory_(),
        lambda tensor: ForkingPickler.dumps(tensor),  # type: ignore[no-untyped-call]  # as a queue does
        lambda tensor: tensor.untyped_storage().resize_(2 * tensor.nbytes),
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: tensor.data.resize_(1 << 16),
    ],
    ids=["share_memory_", "queue", "resize", "resize to nothing", "resize_ of a tensor"],
)
def test_memory_that_moves(move: Callable[[Tensor], object], whose: str) -> None:
    """The replay raises, writes nothing and reads nothing: what was there may be others' by now."""
    tensors = {"input": torch.ones(4, 16), "weight": torch.ones(16)}
    graph = CPUGraph()
    with torch.no_grad(), graph.capture():
        tensors["intermediate"] = ops.rms_norm(tensors["input"], tensors["weight"])
        tensors["result"] = ops.gelu_new(tensors["intermediate"] + 1)
    graph.replay()
    move(tensors[whose])
    others = [torch.full((4, 16), torch.nan) for _ in range(50)]
    others += [torch.full((16,), torch.nan) for _ in range(50)]
    message = "CPUGraph: expected memory that stays where it was at the capture, got a tensor whose memory has moved"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            graph.replay()
    assert all(other.isnan().all() for other in others)
    graph.reset()
    tensors = {name: tensors[name].clone() for name in ("input", "weight") if whose not in ("input", "weight")}
    if tensors:  # else what was moved may have no memory
        with torch.no_grad(), graph.capture():
            out = ops.rms_norm(tensors["input"], tensors["weight"])
        graph.replay()
        assert_same_bits(out, ops.rms_norm(tensors["input"], tensors["weight"]))


def test_memory_that_moves_within_the_capture() -> None:
    """Past torch's dispatcher, so that the capture does not see it."""
    weight, graph = torch.ones(16), CPUGraph()
    with graph.capture():
        ops.rms_norm(torch.ones(4, 16), weight)
        weight.share_memory_()
        ops.rms_norm(torch.ones(4, 16), weight)
    with pytest.raises(RuntimeError, match="got a tensor whose memory has moved"):
        graph.replay()


def test_two_storages_of_the_same_memory() -> None:
    """If one of them moves, what was captured of it is elsewhere."""
    values = numpy.ones((4, 16), dtype=numpy.float32)
    first, second = torch.from_numpy(values), torch.from_numpy(values)
    graph = CPUGraph()
    with graph.capture():
        _ = first + 1, second + 2
    second.share_memory_()
    with pytest.raises(RuntimeError, match="got a tensor whose memory has moved"):
        graph.replay()


def test_memory_that_comes_late() -> None:
    """To a tensor without elements: at the capture, where the op is one of the graph, or after the capture."""
    _, input = make_layer()
    nothing, graph = torch.empty(0, 16), CPUGraph()
    with torch.inference_mode(), graph.capture():
        out = torch.add(input, 1, out=torch.empty(0))
        ops.gelu_new(nothing)
    nothing.resize_(4, 16)
    input.neg_()
    graph.replay()
    assert_same_bits(out, input + 1)


def test_a_clone_for_a_queue() -> None:
    _, input = make_layer()
    graph, queue = CPUGraph(), torch.multiprocessing.get_context("spawn").Queue()
    with torch.inference_mode(), graph.capture():
        out = ops.gelu_new(input)
    for _ in range(2):
        graph.replay()
        queue.put(out.clone())
        assert_same_bits(queue.get(), ops.gelu_new(input))
        input.neg_()


KEPT_BY_VALUE = """
#include "cpu_graph.h"

template <typename Check, typename Function, typename Params>
constexpr bool IS_TAKEN = requires(Check check, Function function, Params params) {
  pagedattn::CpuGraph::run_or_capture(check, function, params);
};
struct Values { const float* x; int n; };
struct Reference { const int& n; };
template <typename T> struct Struct { T member; };
struct Given { bool are_given; };
template <typename T> struct Check { Given values; T member; void operator()() const {} };
struct CheckWithoutValues { void operator()() const {} };
using pagedattn::AnyValues;

void op(int n) {
  auto function = [](const auto&) {};
  auto function_that_captures = [&](const Values&) { ++n; };
  auto closure = [&] { ++n; };
  static_assert(IS_TAKEN<AnyValues, decltype(function), Values>);
  static_assert(!IS_TAKEN<AnyValues, decltype(function_that_captures), Values>);
  static_assert(!IS_TAKEN<AnyValues, decltype(function), Reference>);
  static_assert(!IS_TAKEN<AnyValues, decltype(function), Struct<Reference>>);
  static_assert(!IS_TAKEN<AnyValues, decltype(function), decltype(closure)>);
  static_assert(IS_TAKEN<Check<Values>, decltype(function), Values>);
  static_assert(!IS_TAKEN<Check<Reference>, decltype(function), Values>);
  static_assert(!IS_TAKEN<CheckWithoutValues, decltype(function), Values>);
  static_assert(!IS_TAKEN<decltype(closure), decltype(function), Values>);
  static_assert(!IS_TAKEN<Values, decltype(function), Values>);
}
"""


def test_an_op_leaves_nothing_of_its_own_to_a_graph() -> None:
    """What is gone when the op has returned does not compile, neither as parameters nor as a check of values. A call
    without a check does not compile, nor does one whose check does not say whether there are values."""
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-x", "c++", "-I", str(CSRC), "-"]
    result = subprocess.run(command, input=KEPT_BY_VALUE, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_reset_within_the_context():
    """The capture is over there: leaving the context is no error, and the graph is as a new one."""
    graph, input = CPUGraph(), torch.ones(2, 16)
    with torch.inference_mode():
        with graph.capture():
            ops.gelu_new(input)
            graph.reset()
            assert ops.gelu_new(input).sum() > 0  # it runs
        assert graph.num_bytes == 0
        with graph.capture():
            out = ops.gelu_new(input)
    graph.replay()
    assert out.sum() > 0

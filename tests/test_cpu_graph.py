"""CPUGraph: replays give what the ops give, on what the inputs hold then; what cannot be replayed is refused."""

import threading
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from op_calls import CALLS, make_arguments, raw_op, tensors_in
from torch import Tensor
from torch.nn import functional

from pagedattn_ext import CPUGraph, ops


def make_layer() -> tuple[Tensor, Tensor]:
    """A packed weight of [32, 16], and its input."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 16, generator=generator)
    return ops.pack_linear_weight(weight), torch.randn(3, 16, generator=generator)


def tensors_of(arguments: dict[str, Any], result: Any) -> list[Tensor]:
    return [*tensors_in(arguments), *tensors_in({"result": result})]


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


def test_what_a_replay_would_miss() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    message = r"CPUGraph: expected ops that return tensors, got aten\._local_scalar_dense"
    with pytest.raises(RuntimeError, match=message), graph.capture():
        ops.linear_packed(input, packed, 32)[0, 0].item()
    graph.replay()  # of nothing
    with pytest.raises(RuntimeError, match="CPUGraph: expected tensors on the CPU, got one on meta"), graph.capture():
        torch.empty(3, device="meta") + 1
    assert ops.linear_packed(input, packed, 32).isfinite().all()


def test_one_capture_at_a_time() -> None:
    packed, input = make_layer()
    graph = CPUGraph()
    message = "CPUGraph: expected no other capture under way on this thread"
    with pytest.raises(RuntimeError, match=message), graph.capture(), CPUGraph().capture():
        pass
    with graph.capture():
        out = ops.linear_packed(input, packed, 32)
    with pytest.raises(RuntimeError, match="CPUGraph: expected a new graph, got one with a capture"), graph.capture():
        pass
    graph.replay()
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
    out.fill_(1)
    graph.replay()
    assert (out == 1).all()
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

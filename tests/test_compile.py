"""Every op under torch.compile: the bits of eager mode, in what is returned and in what is written."""

import pytest
import torch
from checks import assert_same_bits
from op_calls import CALLS, INFERRED, make_arguments, raw_op, results, wrapper
from torch._dynamo.testing import CompileCounterWithBackend

from pagedattn_ext import ops


def assert_same_results(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, wanted in zip(actual, expected, strict=True):
        assert_same_bits(tensor, wanted)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("door", [raw_op, wrapper])
def test_captured(door, call):
    """Without code of Inductor's."""
    torch.compiler.reset()
    compiled = torch.compile(door(call), fullgraph=True, backend="aot_eager")
    assert_same_results(results(compiled, make_arguments(call)), results(door(call), make_arguments(call)))


def test_two_ops_in_a_row():
    """Inductor reuses buffers; one of the two works in place."""

    def block(input, residual, weight):
        normed, residual = ops.fused_add_rms_norm(input, residual, weight)
        return ops.silu_and_mul(normed), residual

    arguments, same = make_arguments("fused_add_rms_norm"), make_arguments("fused_add_rms_norm")
    del arguments["epsilon"], same["epsilon"]
    torch.compiler.reset()
    compiled = results(torch.compile(block, fullgraph=True), arguments)
    assert_same_results(compiled, results(block, same))


def test_max_seq_len_does_not_recompile():
    """The int that changes at every step of a decode loop: once a constant, then a symbol, then never again."""

    def decode(arguments, max_seq_len):
        return ops.paged_attention_v1(**arguments, max_seq_len=max_seq_len)

    v1 = make_arguments("paged_attention_v1")
    arguments = {k: v for k, v in v1.items() if k not in INFERRED | {"max_seq_len"}}
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    for max_seq_len in range(32, 40):
        compiled(arguments, max_seq_len)
    assert counter.frame_count <= 2

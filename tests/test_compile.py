"""Every op under torch.compile, at sizes that change, and one in AOTInductor: the bits of eager mode, in what is
returned and in what is written."""

from collections.abc import Iterator

import pytest
import torch
from checks import assert_same_bits, tensors_in
from op_calls import CALLS, INFERRED, PACKING, SCHEMA_OF, make_arguments, raw_op, results, wrapper
from torch._dynamo.testing import CompileCounterWithBackend

from pagedattn_ext import allocate_kv_cache, ops

SIZES = [5, 7, 9]  # what comes from them (one more, three more) meets no size that stays


def assert_same_results(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, wanted in zip(actual, expected, strict=True):
        assert_same_bits(tensor, wanted)


# How the compiler learns that sizes change: after how many calls a new size does not compile again.
SETTLED_AFTER = {"found": 2, "marked": 1, "symbols": 1}


def inductor_cases() -> Iterator[object]:
    """Each op once through its wrapper, as most call it, which calls the raw op; and every eighth raw op, in one of the
    three ways in turn. All other cases are long: opcheck has tried each call of a raw op at sizes that are symbols. The
    wrappers of PACKING map memory, which nothing can capture: a weight is packed once, before anything is compiled."""
    for number, call in enumerate(CALLS):
        first = {(wrapper, "found")} if call in SCHEMA_OF else set()
        if call in PACKING or number % 8 == 0:
            first.add((raw_op, list(SETTLED_AFTER)[number % len(SETTLED_AFTER)]))
        for door in (raw_op,) if call in PACKING else (wrapper, raw_op):
            for way in SETTLED_AFTER:
                marks = [] if (door, way) in first else [pytest.mark.long]
                yield pytest.param(door, call, way, id=f"{door.__name__}-{call}-{way}", marks=marks)


@pytest.mark.parametrize(("door", "call", "sizes_are"), [*inductor_cases()])
def test_inductor(door, call, sizes_are):
    """The default backend, which reuses buffers. Sizes are found to change at the second call, or marked in dimension
    0, or all symbols from the start; then a new size does not compile again."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    dynamic = True if sizes_are == "symbols" else None
    compiled = torch.compile(door(call), fullgraph=True, dynamic=dynamic, backend=counter)
    num_compilations = []
    for size in SIZES:
        arguments = make_arguments(call, size)
        if sizes_are == "marked":
            for tensor, other in zip(tensors_in(arguments), tensors_in(make_arguments(call, size + 2)), strict=True):
                if tensor.shape[:1] != other.shape[:1]:
                    torch._dynamo.mark_dynamic(tensor, 0)
        assert_same_results(results(compiled, arguments), results(door(call), make_arguments(call, size)))
        num_compilations.append(counter.frame_count)
    settled_after = SETTLED_AFTER[sizes_are]
    numbers = [numbers_of(make_arguments(call, size)) for size in SIZES]
    if sizes_are == "marked" and numbers[0] != numbers[1]:
        settled_after = SETTLED_AFTER["found"]  # a number cannot be marked
    assert num_compilations[-1] == num_compilations[settled_after - 1]


def numbers_of(arguments: dict[str, object]) -> list[int]:
    return [value for value in arguments.values() if type(value) is int]


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


@pytest.mark.parametrize("name", ["paged_attention_v1", "paged_attention"])
def test_max_seq_len_does_not_recompile(name):
    """The int that changes at every step of a decode loop: once a constant, then a symbol, then never again."""

    def decode(arguments, max_seq_len):
        return getattr(ops, name)(**arguments, max_seq_len=max_seq_len)

    arguments = {k: v for k, v in make_arguments(name).items() if k not in INFERRED | {"max_seq_len"}}
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    for max_seq_len in range(32, 40):
        compiled(arguments, max_seq_len)
    assert counter.frame_count <= 2


def test_aot_inductor(tmp_path):
    """C++ of Inductor's around the op; a cache from allocate_kv_cache, which begins somewhere in its memory."""

    class Gather(torch.nn.Module):
        def forward(self, key_cache, value_cache, slot_mapping):
            return ops.gather_cached_kv(key_cache, value_cache, slot_mapping)

    def arguments(num_blocks: int) -> tuple[torch.Tensor, ...]:
        key_cache, value_cache = allocate_kv_cache(num_blocks, 2, 16)[0]
        slots = torch.arange(num_blocks - 2) * 3 - 1
        return key_cache.normal_(), value_cache.normal_(), slots

    sizes = ({0: torch.export.Dim.DYNAMIC},) * 3
    with torch.no_grad():
        program = torch.export.export(Gather(), arguments(8), dynamic_shapes=sizes)
        # It compiles for long enough. Headers are compiled beforehand for later compilations, and there are none.
        options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "gather.pt2"), inductor_configs=options
        )
        gather = torch._inductor.aoti_load_package(path)
        for num_blocks in 8, 9, 20:
            same = arguments(num_blocks)
            assert_same_results(list(gather(*same)), list(ops.gather_cached_kv(*same)))


# ---- views: what docs/ops.md says is right -------------------------------------------------------------------------


def rotate_parts(qkv: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    query, key, _ = qkv.split([64, 32, 32], -1)
    ops.rotary_embedding(positions, query, key, 16, cos_sin_cache)


def gelu_of_the_last_half(rows: torch.Tensor) -> None:
    half = rows[rows.shape[0] // 2 :]
    ops.gelu_new(half, out=half)


def write_interleaved_cache(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    key_cache, value_cache = cache[:, 0].view(-1, 2, 4, 16, 4), cache[:, 1].view(-1, 2, 16, 16)
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots)


def view_arguments(function, size: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    if function is gelu_of_the_last_half:
        return {"rows": torch.randn(2 * size, 16, generator=generator)}
    if function is rotate_parts:
        rotary = make_arguments("rotary_embedding", size)
        qkv = torch.randn(size, 128, generator=generator)
        return {"qkv": qkv, "positions": rotary["positions"], "cos_sin_cache": rotary["cos_sin_cache"]}
    new = make_arguments("reshape_and_cache", size)
    cache = torch.zeros(size + 3, 2, 512)
    return {"cache": cache, "key": new["key"], "value": new["value"], "slots": new["slot_mapping"]}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [rotate_parts, gelu_of_the_last_half, write_interleaved_cache])
def test_writing_to_views(function, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for size in SIZES:
        expected = results(function, view_arguments(function, size))
        assert_same_results(results(compiled, view_arguments(function, size)), expected)

"""Every argument of every op in turn: of a wrong type, without dimensions, on another device, a negated view."""

import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import numpy
import pytest
import torch
from checks import assert_raises_and_writes_nothing, assert_same_bits, for_wrapper
from op_calls import (
    ATTENTION,
    CALLS,
    LINEAR,
    OPS,
    PACKING,
    QUANTIZING,
    SAMPLING,
    SCHEMA_OF,
    call_wrapper,
    make_arguments,
    op_of,
    optional_tensors,
    raw_op,
    results,
    wrapper,
)

from pagedattn_ext import allocate_kv_cache, ops
from pagedattn_ext.ops._call import call as call_op


def call_wrapper_with_out(name: str, arguments: dict):
    """With all arguments that it knows, `out` among them."""
    return getattr(ops, name)(**for_wrapper(name, arguments))


def wrong_values(parameter: inspect.Parameter, valid: object) -> list:
    """What a parameter of a wrapper does not take: wrong types, and tensors without dimensions."""
    wrong = ["x", [1.0, 2.0], object()]
    optional = type(None) in getattr(parameter.annotation, "__args__", ())
    if "float" not in str(parameter.annotation):
        wrong.append(1.5)
    if parameter.name in ("scale", "softcap"):
        wrong.append(True)
    if "Tensor" in str(parameter.annotation) and parameter.name not in ("k_scale", "v_scale"):
        scalar = torch.zeros((), dtype=valid.dtype if isinstance(valid, torch.Tensor) else torch.float32)
        wrong.append([scalar] if isinstance(valid, list) else scalar)
    return wrong if optional else [*wrong, None]


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_wrapper_of_a_wrong_type_or_rank(name):
    """Each argument in turn, among all others and among those that must be given."""
    parameters = inspect.signature(getattr(ops, name)).parameters
    valid = for_wrapper(name, make_arguments(name) | optional_tensors(name))
    required = {k: v for k, v in valid.items() if parameters[k].default is inspect.Parameter.empty}
    for argument, parameter in parameters.items():
        for wrong in wrong_values(parameter, valid.get(argument)):
            for arguments in (valid, required):
                with pytest.raises((TypeError, ValueError)) as error:
                    getattr(ops, name)(**arguments | {argument: wrong})
                assert name in str(error.value) and argument in str(error.value), (argument, wrong)


def wrong_tensors(valid: torch.Tensor) -> Iterator[tuple[str, type[Exception], torch.Tensor]]:
    """What an op may refuse in the place of a tensor: the kind of the error, its type, a tensor."""
    for dtype in (torch.complex64, torch.float64):
        yield "dtype", TypeError, valid.to(dtype)
    for shape in ([], [3] * (valid.dim() + 4), [size + 1 for size in valid.shape]):
        yield "shape", ValueError, torch.zeros(shape, dtype=valid.dtype)
    yield "strides", ValueError, valid.as_strided(valid.shape, [0] * valid.dim())
    if not valid.is_floating_point() and valid.dtype != torch.bool:
        yield "value", ValueError, torch.full_like(valid, torch.iinfo(valid.dtype).max)


def wrong_arguments(valid: object) -> Iterator[tuple[str, type[Exception], object]]:
    """The same in the place of any argument."""
    yield "type", TypeError, object()
    if isinstance(valid, torch.Tensor):
        yield from wrong_tensors(valid)
    elif isinstance(valid, list):
        yield from ((kind, error, [wrong, *valid[1:]]) for kind, error, wrong in wrong_tensors(valid[0]))
    elif isinstance(valid, (int, float, str)) and not isinstance(valid, bool):
        yield "value", ValueError, {int: -1, float: math.inf, str: "x"}[type(valid)]


@pytest.mark.parametrize("call", CALLS)
def test_the_type_of_an_error_is_marked(call):
    """Each argument in turn, in every way: the raw op's error ends with its type, and what wrappers call raises this
    type without the mark. For an argument of another type the raw op's error is torch's own, and the wrapper's is one
    line in the words of the ops."""
    name, kinds, arguments = op_of(call), set(), make_arguments(call)
    for argument, valid in arguments.items():
        for kind, error, wrong in wrong_arguments(valid):
            try:
                raw_op(name)(**make_arguments(call) | {argument: wrong})
            except RuntimeError as raised:
                of_the_op = str(raised)
            else:
                continue  # this op takes it: rows of any number of dimensions, a scale without dimensions
            kinds.add(kind)
            with pytest.raises((TypeError, ValueError)) as of_the_wrapper:
                call_op(name, **make_arguments(call) | {argument: wrong})
            assert type(of_the_wrapper.value) is error, (argument, wrong)
            if kind == "type":
                assert re.match(rf"{name}: {argument}: expected [^\n]*, got [^\n]*$", str(of_the_wrapper.value))
            else:
                assert f"{of_the_wrapper.value} ({error.__name__})" == of_the_op
            assert "(TypeError)" not in str(of_the_wrapper.value) and "(ValueError)" not in str(of_the_wrapper.value)
    has_values = any(isinstance(valid, (int, float, str)) for valid in arguments.values())
    assert kinds >= {"type", "dtype", "shape", "strides"} | ({"value"} if has_values else set())


# Sizes that an op takes, one smaller ("-") or larger ("+") than in CALLS, in these dimensions: numbers of rows, blocks,
# slots and columns that no other argument says, and widths within what a packed weight is padded to. And whether there
# may be a dimension less or more.
FREE_SIZES = {
    **{(op, "block_tables"): "+1" for op in (*ATTENTION, "append_and_attend", "mla_attention")},
    **{(op, "query"): "+dim" for op in ("paged_attention", "append_and_attend")},
    ("reshape_and_cache_flash", "slot_mapping"): "-0",
    ("concat_and_cache_mla", "kv_c"): "+0",
    ("concat_and_cache_mla", "k_pe"): "+0",
    ("concat_and_cache_mla", "kv_cache"): "-0 +0 -1 +1",
    ("concat_and_cache_mla", "slot_mapping"): "-0",
    ("copy_blocks", "key_caches"): "-1 +1 -2 +2 -3 +3 -4 +4",
    ("copy_blocks", "value_caches"): "-1 +1 -2 +2 -3 +3",
    ("copy_blocks", "block_mapping"): "-0",
    ("swap_blocks", "src"): "-0 +0",
    ("swap_blocks", "dst"): "+0",
    ("swap_blocks", "block_mapping"): "-0",
    ("compute_slot_mapping", "block_tables"): "+0 +1",
    ("rotary_embedding", "key"): "-2 +2",
    ("rotary_embedding", "cos_sin_cache"): "+0",
    ("rotary_embedding_neox", "cos_sin_cache"): "+0",
    ("linear_packed", "input"): "-0 +0 -dim +dim",
    ("linear_int4", "input"): "-0 +0 -dim +dim",
    ("linear_int8", "input"): "-0 +0 -1 +1 -dim +dim",
    ("grouped_linear_int8", "input"): "-1 +1",
    ("pack_linear_weight", "weight"): "-0 +0",
    ("pack_linear_weight_int8", "weight"): "-0 +0 -1 +1",
    ("apply_token_bitmask", "logits"): "+0 -1 +1",
    ("apply_token_bitmask", "bitmask"): "+1",
    ("sample_from_probs", "probs"): "-1 +1",
    ("causal_conv1d", "conv_states"): "-0 +0 +2",
    ("causal_conv1d", "weight"): "-1",
    ("gated_delta_rule", "states"): "-0 +0",
    ("selective_scan", "states"): "-0 +0",
    ("all_reduce_shared", "input"): "-0 +0 -1 +1 -dim +dim",
}


def resized(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Without the last index of a dimension, and with the last one twice; without the first dimension, and with one
    before it."""
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield f"-{dim}", tensor.narrow(dim, 0, size - 1).contiguous()
        if size > 0:
            yield f"+{dim}", torch.cat([tensor, tensor.narrow(dim, size - 1, 1)], dim)
    if tensor.dim() > 1:
        yield "-dim", tensor[0].clone()
    if tensor.dim() > 0:
        yield "+dim", tensor[None]


@pytest.mark.parametrize("call", CALLS)
def test_every_size_is_checked(call):
    """Each size of each tensor by itself: the op refuses the call, and names an argument."""
    op, taken = op_of(call), {}
    for argument, value in (make_arguments(call, 6) | optional_tensors(op_of(call))).items():
        tensor, *others = value if isinstance(value, list) else [value]
        if not isinstance(tensor, torch.Tensor):
            continue
        for change, wrong in resized(tensor):
            changed = {argument: [wrong, *others] if isinstance(value, list) else wrong}
            try:
                raw_op(call)(**make_arguments(call, 6) | changed)
            except RuntimeError as error:
                assert re.match(rf"{op}: \w+: expected ", str(error)), (argument, change, str(error))
            else:
                taken.setdefault(argument, set()).add(change)
    for argument, changes in taken.items():
        assert changes <= {*FREE_SIZES.get((op, argument), "").split()}, argument


# Integers of one dtype; all others may be int32 or int64.
ONE_INT_DTYPE = {
    *((op, "block_mapping") for op in ("copy_blocks", "swap_blocks")),
    *((op, "positions") for op in ("rotary_embedding", "rotary_embedding_neox")),
    *(("apply_token_bitmask", argument) for argument in ("bitmask", "indices")),
    *(("sample_from_probs", argument) for argument in ("seed", "offset", "subsequence")),
    *(
        ("chain_speculative_sampling", argument)
        for argument in ("seed", "offset", "out", "num_accepted", "num_emitted")
    ),
}
# Tensors that may be the only ones of their floating-point dtype.
ANY_FLOAT_DTYPE = {
    *((op, "input") for name in LINEAR for op in (name, f"grouped_{name}")),
    *((op, "packed_weight") for op in ("linear_packed", "grouped_linear_packed")),
    *((op, "weight") for op in QUANTIZING),
    *((op, "query") for op in ("paged_attention", "append_and_attend", "rotary_embedding")),
    *((op, "logits") for op in ("apply_token_bitmask", "softmax")),
    ("sample_from_probs", "probs"),
    ("all_reduce_shared", "input"),
}


def may_take(op: str, argument: str, *dtypes: torch.dtype) -> bool:
    """Whether an op takes this argument in either of two dtypes."""
    if {*dtypes} == {torch.int32, torch.int64}:
        return (op, argument) not in ONE_INT_DTYPE
    if op == "copy_blocks" and argument != "block_mapping":
        return True  # blocks are bytes
    return {*dtypes} == {torch.float32, torch.float16} and (op, argument) in ANY_FLOAT_DTYPE


@pytest.mark.parametrize("call", CALLS)
def test_every_dtype_is_checked(call):
    """Each tensor by itself in each other dtype: the op refuses the call, and names an argument."""
    op = op_of(call)
    for argument, value in (make_arguments(call) | optional_tensors(op)).items():
        tensor, *others = value if isinstance(value, list) else [value]
        if not isinstance(tensor, torch.Tensor):
            continue
        for dtype in {torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8} - {tensor.dtype}:
            wrong = tensor.to(dtype)
            changed = {argument: [wrong, *others] if isinstance(value, list) else wrong}
            try:
                raw_op(call)(**make_arguments(call) | changed)
            except RuntimeError as error:
                assert re.match(rf"{op}: \w+: expected ", str(error)), (argument, dtype, str(error))
            else:
                assert may_take(op, argument, tensor.dtype, dtype), (argument, dtype)


def test_the_mark_is_last_where_torch_shows_stacks():
    program = (
        "import torch; from pagedattn_ext import ops\n"
        "for weight in (torch.ones(3), torch.ones(5).half(), 'x'):\n"
        "    try: ops.rms_norm(torch.ones(2, 5), weight)\n"
        "    except (TypeError, ValueError) as error: print(repr(error))\n"
    )
    environment = os.environ | {"TORCH_SHOW_CPP_STACKTRACES": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    shape, dtype, no_tensor = done.stdout.splitlines()
    assert shape == "ValueError('rms_norm: weight: expected shape [5], got [3]')"
    assert dtype == "TypeError('rms_norm: weight: expected dtype float32, got float16')"
    assert no_tensor == "TypeError('rms_norm: weight: expected a torch.Tensor, got str')"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: ops.copy_blocks([a], ["x"], a),
            "copy_blocks: value_caches: expected a list of tensors, got a list of",
        ),
        (
            lambda a: ops.rotary_embedding(a, a, 5, 8, a),
            "rotary_embedding: key: expected a torch.Tensor or None, got int",
        ),
        (lambda a: ops.rms_norm(a, a, "x"), "rms_norm: epsilon: expected a number, got str"),
        (lambda a: ops.rms_norm(a, a[0], 10**400), "rms_norm: epsilon: expected a finite number of float32, got 1000"),
        (
            lambda a: ops.linear_packed(a, a, 2**70),
            "linear_packed: out_features: expected an int of 64 bits, got a larger",
        ),
        (
            lambda a: ops.linear_int4(a, a, 32, 8, None, 3),
            "linear_int4: scale_dtype: expected a torch.dtype or None, got",
        ),
        (lambda a: ops.rms_norm(a.to_sparse(), a[0]), "rms_norm: input: expected a strided tensor, got one of layout"),
        (lambda a: ops.softmax(a.to_sparse()), "softmax: logits: expected a strided tensor, got one of layout"),
        (lambda a: ops.rms_norm(a, a[0].to_sparse()), "rms_norm: weight: expected a strided tensor, got one of layout"),
    ],
)
def test_what_torch_refuses_is_said_in_our_words(call, message):
    """Torch's own words are a dozen lines, with the whole value."""
    with pytest.raises((TypeError, ValueError), match=f"^{message}[^\n]*$"):
        call(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda a, odd: ops.rms_norm(odd, a[0]), "rms_norm: input"),
        (lambda a, odd: ops.gelu_new(odd), "gelu_new: input"),
        (lambda a, odd: ops.copy_blocks([odd], [odd], torch.tensor([[0, 1]])), "copy_blocks: key_caches"),
        (lambda a, odd: ops.linear_packed(odd, a, 16), "linear_packed: input"),
        (lambda a, odd: ops.linear_packed(a, odd, 16), "linear_packed: packed_weight"),
        (lambda a, odd: ops.linear_packed(a, a, 16, odd), "linear_packed: bias"),
        (lambda a, odd: ops.linear_int8(odd, a, a[0]), "linear_int8: input"),
        (lambda a, odd: ops.linear_int4(odd, a, 32, 8), "linear_int4: input"),
        (lambda a, odd: ops.grouped_linear_packed(odd, a, a, 16), "grouped_linear_packed: input"),
        (lambda a, odd: ops.linear_packed(a, ops.pack_linear_weight(a), 2, odd), "linear_packed: bias"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of both kinds of tensors
def test_quantized_and_nested_tensors(call, argument):
    """Torch has no place for them in its schemas, and says so in a dozen lines."""
    plain = torch.ones(2, 8)
    quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=rf"^{argument}: expected plain numbers, got quantized ones \(qint8\)$"):
        call(plain, quantized)
    nested = torch.nested.nested_tensor([plain, plain[:1]])
    with pytest.raises(ValueError, match=f"^{argument}: expected a strided tensor, got a nested one$"):
        call(plain, nested)


def test_a_tensor_without_a_kernel_of_its_own():
    """Of a class of others that does not know the op: its error is left as it is."""

    class Weight(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
            raise NotImplementedError(f"Weight has no {op}")

    weight = torch.Tensor._make_wrapper_subclass(Weight, (1, 8, 16))
    for call in (lambda: ops.linear_packed(torch.ones(2, 8), weight, 16), lambda: ops.rms_norm(torch.ones(8), weight)):
        with pytest.raises(NotImplementedError, match="Weight has no pagedattn_ext"):
            call()


def numbers() -> list[tuple[str, str, str]]:
    """Each argument of a wrapper that is a number, and whether an int."""
    return [
        (name, argument.name, str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
        for name in SCHEMA_OF
        for argument in getattr(OPS, name).default._schema.arguments
        if str(argument.real_type).removeprefix("Optional[").removesuffix("]") in ("int", "float")
        and argument.name in inspect.signature(getattr(ops, name)).parameters
        and argument.name != "group"
    ]


@pytest.mark.parametrize(("name", "argument", "kind"), numbers())
def test_no_number_becomes_another(name, argument, kind):
    """Torch takes a bool as 1, and in place of an int cuts off the fraction of numpy's numbers and of tensors."""
    valid = for_wrapper(name, make_arguments(name))
    wrong = [True, torch.tensor(True)] + ([numpy.float32(1.5), torch.tensor(1.5)] if kind == "int" else [])
    for value in wrong:
        with pytest.raises(TypeError, match=f"^{name}: {argument}: expected "):
            getattr(ops, name)(**valid | {argument: value})


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("max_seq_len", [2**62, 2**70, torch.tensor(32), torch.tensor([33])], ids=str)
def test_wrapper_takes_any_int_as_max_seq_len(name, max_seq_len):
    arguments = make_arguments(name)
    expected, got = (call_wrapper(name, arguments | bound) for bound in ({}, {"max_seq_len": max_seq_len}))
    for one, same in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        assert_same_bits(one, same)


@pytest.mark.parametrize("name", ATTENTION)
def test_wrapper_of_heads_without_elements(name):
    arguments = make_arguments(name) | {"query": torch.zeros(3, 4, 0)}
    del arguments["scale"]
    with pytest.raises(ValueError, match=f"^{name}: query: expected"):
        call_wrapper(name, arguments)


def written_pairs() -> list[tuple[str, str, str]]:
    """Any two tensors that an op writes. The scratch of paged_attention_v2 is not written, whatever the schema says."""
    pairs = []
    for name in SCHEMA_OF:
        alias_of = {arg.name: arg.alias_info for arg in getattr(OPS, name).default._schema.arguments}
        written = [arg for arg, alias in alias_of.items() if alias is not None and name != "paged_attention_v2"]
        pairs += [(name, *pair) for pair in combinations(written, 2)]
    return pairs


@pytest.mark.parametrize(("name", "first", "second"), written_pairs())
def test_two_written_tensors_that_begin_at_one_place(name, first, second):
    arguments = make_arguments(name)
    if isinstance(arguments[first], list):
        arguments[second] = arguments[first]
    else:
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        for argument in (first, second):
            tensor = arguments[argument]
            arguments[argument] = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    with pytest.raises(RuntimeError, match=rf"^{name}: ({first}|{second}): expected (other memory|caches that do not)"):
        raw_op(name)(**arguments)


# ---- several devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_on_another_device(call):
    """Each in turn: the wrapper names it, or what is not where it is; the raw op raises, too."""
    name = op_of(call)
    for argument, value in (make_arguments(call) | optional_tensors(name)).items():
        arguments = make_arguments(call) | optional_tensors(name)
        if isinstance(value, list):
            arguments[argument] = [tensor.to("meta") for tensor in value]
        elif isinstance(value, torch.Tensor):
            arguments[argument] = value.to("meta")
        else:
            continue
        with pytest.raises(RuntimeError, match=r"several devices|Meta tensors|expected a tensor on"):
            raw_op(call)(**arguments)
        if argument in inspect.signature(getattr(ops, name)).parameters:
            with pytest.raises(
                ValueError, match=f"^{name}: .*: expected a tensor on (cpu|meta), got one on (cpu|meta)$"
            ):
                call_wrapper_with_out(name, arguments)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_all_tensors_on_meta(name):
    """What docs/ops.md says under "Devices"."""
    on_meta = {
        argument: [tensor.to("meta") for tensor in value] if isinstance(value, list) else value.to("meta")
        for argument, value in make_arguments(name).items()
        if isinstance(value, (list, torch.Tensor))
    }
    arguments = make_arguments(name) | on_meta
    if getattr(OPS, name).default._schema.returns:
        for function in (raw_op(name), wrapper(name)):
            expected, actual = results(function, make_arguments(name)), results(function, arguments)
            assert all(tensor.is_meta for tensor in actual)
            assert [tensor.shape for tensor in actual] == [tensor.shape for tensor in expected]
    else:
        with pytest.raises(NotImplementedError, match="Meta tensors"):
            raw_op(name)(**arguments)
        with pytest.raises((NotImplementedError, ValueError), match=r"Meta tensors|expected a tensor on"):
            wrapper(name)(**arguments)


def test_the_door_knows_another_device():
    """Torch chooses a kernel by the device of one tensor. With tensors on CPU and meta it is not that for the CPU; here
    the test chooses. There are no rows, so that a door that knows nothing does no harm."""
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    tensors = {"out": torch.zeros(0, 16), "input": torch.zeros(0, 16), "weight": torch.zeros(16)}
    for argument, tensor in tensors.items():
        with pytest.raises(RuntimeError, match=r"^rms_norm: \w+: expected a tensor on .*, got one on "):
            OPS.rms_norm.default.redispatch(on_cpu, **tensors | {argument: tensor.to("meta")}, epsilon=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: ops.rms_norm(a, b[0]), "rms_norm: weight"),
        (lambda a, b: ops.rms_norm(a, a[0], out=b), "rms_norm: out"),  # the first input says where
        (lambda a, b: ops.merge_attn_states(a[None], b, a[None], a), "merge_attn_states: prefix_lse"),
        (lambda a, b: ops.copy_blocks([a], [b], torch.zeros(0, 2, dtype=torch.int64)), "copy_blocks: value_caches"),
        (lambda a, b: ops.copy_blocks([a], [a], b.long()), "copy_blocks: block_mapping"),
        (lambda a, b: ops.swap_blocks(a, b, torch.zeros(0, 2, dtype=torch.int64)), "swap_blocks: dst"),
    ],
)
def test_a_tensor_on_another_device_is_named(call, message):
    with pytest.raises(ValueError, match=f"{message}: expected a tensor on (cpu|meta), got one on (cpu|meta)"):
        call(torch.ones(2, 8), torch.ones(2, 8, device="meta"))


@pytest.mark.parametrize(
    "name", ["key_cache", "value_cache", "block_tables", "seq_lens", "sinks", "k_scale", "v_scale"]
)
def test_paged_attention_on_several_devices(name):
    key_cache, value_cache = allocate_kv_cache(2, 2, 8, 8)[0]
    arguments = {"query": torch.ones(1, 2, 8), "key_cache": key_cache, "value_cache": value_cache}
    arguments |= {"block_tables": torch.zeros(1, 1, dtype=torch.int32), "seq_lens": torch.ones(1, dtype=torch.int32)}
    arguments |= {"sinks": torch.ones(2), "k_scale": torch.ones(1), "v_scale": torch.ones(())}
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"paged_attention: {name}: expected a tensor on cpu, got one on meta"):
        ops.paged_attention(**arguments)
    with pytest.raises(RuntimeError, match="several devices"):
        torch.ops.pagedattn_ext.paged_attention(**arguments, scale=1.0)


# ---- negated views: what torch negates when it reads --------------------------------------------------------------


def negated_in_turn(call: str) -> Iterator[tuple[torch.Argument, dict]]:
    """Each floating-point argument as a negated view of the same values: its entry in the schema, the arguments."""
    for argument in getattr(OPS, op_of(call)).default._schema.arguments:
        arguments = make_arguments(call)
        value = arguments.get(argument.name)
        values = value if isinstance(value, list) else [value]
        if torch.is_tensor(values[0]) and values[0].is_floating_point():
            negated = [torch._neg_view(-tensor) for tensor in values]
            yield argument, arguments | {argument.name: negated if isinstance(value, list) else negated[0]}


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_negated_input(name):
    """As its values."""
    expected = results(raw_op(name), make_arguments(name))
    for argument, arguments in negated_in_turn(name):
        if not argument.is_write:
            for actual, wanted in zip(results(raw_op(name), arguments), expected, strict=True):
                assert_same_bits(actual, wanted)


@pytest.mark.parametrize(
    "name", [name for name, schema in SCHEMA_OF.items() if "!)" in schema and name not in [*PACKING[1:], *SAMPLING]]
)
def test_negated_output_is_an_error(name):
    """Each written argument in turn: named, and nothing is written before."""
    refused = 0
    for argument, arguments in negated_in_turn(name):
        if argument.is_write:
            message = f"^{name}: {argument.name}: expected memory to write to, got a negated view"
            assert_raises_and_writes_nothing(getattr(OPS, name), arguments, RuntimeError, message)
            if argument.name in inspect.signature(getattr(ops, name)).parameters:
                with pytest.raises(ValueError, match=rf"{message}: call resolve_neg\(\) on it$"):
                    call_wrapper_with_out(name, arguments)
            refused += 1
    assert refused > 0

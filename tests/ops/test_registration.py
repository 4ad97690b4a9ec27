"""The ops as torch sees them: schemas, opcheck, torch.compile, autograd, what importing needs, threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest
import torch
from checks import assert_same_bits, tensors_in
from torch._dynamo.testing import CompileCounterWithBackend

import pagedattn_ext
from pagedattn_ext import ops

OPS = torch.ops.pagedattn_ext

SCHEMAS = """
paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, Tensor? query_start_loc=None, float scale, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)
merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse) -> ()
reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
gather_cached_kv(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) -> ()
copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()
swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()
rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()
fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()
rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()
rotary_embedding_neox(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, Tensor cos_sin_cache) -> ()
silu_and_mul(Tensor(a!) out, Tensor input) -> ()
mul_and_silu(Tensor(a!) out, Tensor input) -> ()
gelu_and_mul(Tensor(a!) out, Tensor input) -> ()
gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()
gelu_new(Tensor(a!) out, Tensor input) -> ()
gelu_fast(Tensor(a!) out, Tensor input) -> ()
gelu_quick(Tensor(a!) out, Tensor input) -> ()
"""  # noqa: E501
SCHEMA_OF = {line.partition("(")[0]: line for line in SCHEMAS.strip().splitlines()}
ATTENTION = ["paged_attention_v1", "paged_attention_v2", "paged_attention"]
FP8_CALLS = [f"{name} fp8" for name in [*ATTENTION, "reshape_and_cache"]]
CALLS = [*SCHEMA_OF, *FP8_CALLS, "rotary_embedding without key", "rotary_embedding of a batch"]


def op_of(call: str) -> str:
    return call.partition(" ")[0]


def make_arguments(call: str) -> dict:
    """Small valid arguments of the raw op of one of CALLS: 3 sequences of 5, 17 and 32 tokens in 6 blocks of 16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    paged = {
        "query": normal(3, 4, 16),
        "key_cache": normal(6, 2, 4, 16, 4),
        "value_cache": normal(6, 2, 16, 16),
        "block_tables": torch.tensor([[3, 0], [1, 5], [0, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 17, 32], dtype=torch.int32),
        "scale": 0.25,
    }
    v1 = paged | {"out": torch.zeros(3, 4, 16), "num_kv_heads": 2, "block_size": 16, "max_seq_len": 32}
    partitions = {"exp_sums": torch.zeros(3, 4, 1), "max_logits": torch.zeros(3, 4, 1)}
    fp8 = {
        "key_cache": normal(6, 2, 1, 16, 16).to(torch.float8_e4m3fn).view(torch.uint8),
        "value_cache": normal(6, 2, 16, 16).to(torch.float8_e4m3fn).view(torch.uint8),
        "kv_cache_dtype": "fp8",
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
    }
    caches = {"key_caches": [normal(6, 2, 4, 16, 4)], "value_caches": [normal(6, 2, 16, 16)]}
    cache, mapping = normal(6, 2, 16, 16), torch.tensor([[0, 4], [2, 1]])
    key_value = {"key": normal(3, 2, 16), "value": normal(3, 2, 16)}
    rotary = {
        "positions": torch.tensor([0, 7, 7]),
        "query": normal(3, 64),
        "key": normal(3, 32),
        "head_size": 16,
        "cos_sin_cache": normal(8, 16),
    }
    one_cache = {name: paged[name] for name in ("key_cache", "value_cache")}
    one_cache["slot_mapping"] = torch.tensor([7, -1, 90])
    gated = {"out": torch.zeros(3, 8), "input": normal(3, 16)}
    plain = {"out": torch.zeros(3, 16), "input": normal(3, 16)}
    arguments = {
        "paged_attention_v1": v1,
        "paged_attention_v2": v1 | partitions | {"tmp_out": torch.zeros(3, 4, 1, 16)},
        "paged_attention": paged | {"query_start_loc": torch.tensor([0, 1, 1, 3], dtype=torch.int32)},
        "merge_attn_states": {
            "output": torch.zeros(3, 4, 16),
            "output_lse": torch.zeros(3, 4),
            "prefix_output": normal(3, 4, 16),
            "prefix_lse": normal(3, 4),
            "suffix_output": normal(3, 4, 16),
            "suffix_lse": normal(3, 4),
        },
        "reshape_and_cache": key_value | one_cache,
        "gather_cached_kv": key_value | one_cache,
        "copy_blocks": caches | {"block_mapping": mapping},
        "swap_blocks": {"src": cache, "dst": normal(6, 2, 16, 16), "block_mapping": mapping},
        "rms_norm": {"out": torch.zeros(3, 16), "input": normal(3, 16), "weight": normal(16), "epsilon": 1e-6},
        "fused_add_rms_norm": {
            "input": normal(3, 16),
            "residual": normal(3, 16),
            "weight": normal(16),
            "epsilon": 1e-6,
        },
        "rotary_embedding": rotary | {"is_neox": False},
        "rotary_embedding_neox": rotary,
        **{name: gated for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul")},
        **{name: plain for name in ("gelu_new", "gelu_fast", "gelu_quick")},
    }[op_of(call)]
    batch = {"positions": torch.tensor([[0], [7], [7]]), "query": normal(3, 1, 64), "key": normal(3, 1, 2, 16)}
    changes = {"fp8": fp8, "without key": {"key": None}, "of a batch": batch}
    return arguments | changes.get(call.partition(" ")[2], {})


def positional(name: str, arguments: dict) -> tuple[tuple, dict]:
    """The same arguments, those before the `*` of the schema by position: what opcheck wants to see."""
    by_position = [arg.name for arg in getattr(OPS, name).default._schema.arguments if not arg.kwarg_only]
    names = list(takewhile(lambda name: name in arguments, by_position))
    return tuple(arguments[name] for name in names), {k: v for k, v in arguments.items() if k not in names}


# What each wrapper is called with, of the raw op's arguments; it allocates `out` and infers the rest.
INFERRED = {"out", "num_kv_heads", "block_size", "exp_sums", "max_logits", "tmp_out", "output", "output_lse"}


def inferred_by_wrapper(name: str) -> set[str]:
    return INFERRED | {"key", "value"} if name == "gather_cached_kv" else INFERRED


def call_wrapper(name: str, arguments: dict):
    return getattr(ops, name)(**{k: v for k, v in arguments.items() if k not in inferred_by_wrapper(name)})


def results(function, arguments: dict) -> list[torch.Tensor]:
    """Everything the call returns and everything it may have written."""
    returned = function(**arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [*(tensor for tensor in returned if tensor is not None), *tensors_in(arguments)]


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_schema(name):
    expected = torch._C.parse_schema(f"pagedattn_ext::{SCHEMA_OF[name]}")
    assert str(getattr(OPS, name).default._schema) == str(expected)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_every_op_runs_and_has_a_wrapper(name):
    results(getattr(OPS, name), make_arguments(name))
    assert getattr(ops, name).__doc__


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call):
    args, kwargs = positional(op_of(call), make_arguments(call))
    torch.library.opcheck(getattr(OPS, op_of(call)).default, args, kwargs)


def raw_op(call: str):
    return lambda **arguments: getattr(OPS, op_of(call))(**arguments)


def wrapper(call: str):
    return lambda **arguments: call_wrapper(op_of(call), arguments)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("door", [raw_op, wrapper])
def test_compile(door, call):
    torch.compiler.reset()
    expected = results(door(call), make_arguments(call))
    compiled = results(torch.compile(door(call), fullgraph=True, backend="aot_eager"), make_arguments(call))
    for actual, wanted in zip(compiled, expected, strict=True):
        assert_same_bits(actual, wanted)


def test_compile_with_inductor():
    """The default backend, which reuses buffers: two ops in a row, one of them in place. No C++ of its own to build."""

    def block(input, residual, weight):
        normed, residual = ops.fused_add_rms_norm(input, residual, weight)
        return ops.silu_and_mul(normed), residual

    arguments, same = make_arguments("fused_add_rms_norm"), make_arguments("fused_add_rms_norm")
    del arguments["epsilon"], same["epsilon"]
    torch.compiler.reset()
    compiled = results(torch.compile(block, fullgraph=True), arguments)
    for actual, wanted in zip(compiled, results(block, same), strict=True):
        assert_same_bits(actual, wanted)


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


# ---- autograd: no op has a backward --------------------------------------------------------------------------------


def require_grad(arguments: dict) -> dict:
    for tensor in tensors_in(arguments):
        tensor.requires_grad_(tensor.is_floating_point())
    return arguments


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("door", [raw_op, wrapper])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_autograd(mode, door, call):
    """Parameters, which require grad, may come in."""
    expected = results(door(call), make_arguments(call))
    arguments = require_grad(make_arguments(call))
    with mode():
        actual = results(door(call), arguments)
        inside = results(door(call), make_arguments(call))  # made in that mode
    for tensor, same, wanted in zip(actual, inside, expected, strict=True):
        assert_same_bits(tensor, wanted)
        assert_same_bits(same, wanted)


def optional_tensors(name: str) -> dict:
    alibi_slopes, sinks = {"alibi_slopes": torch.ones(4)}, {"sinks": torch.ones(4)}
    return alibi_slopes | (sinks if name == "paged_attention" else {}) if name in ATTENTION else {}


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_wrapper_of_a_tensor_that_requires_grad_is_an_error(name):
    """Each argument in turn: else its gradient would be missing, and nothing would say so."""
    for argument in make_arguments(name) | optional_tensors(name):
        arguments = make_arguments(name) | optional_tensors(name)
        tensors = [tensor for tensor in tensors_in({argument: arguments[argument]}) if tensor.is_floating_point()]
        if not tensors or argument in inferred_by_wrapper(name):
            continue
        tensors[0].requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{name}: {argument}: requires grad"):
            call_wrapper(name, arguments)


@pytest.mark.parametrize("call", CALLS)
def test_raw_op_of_tensors_that_require_grad(call):
    """Computes as ever."""
    arguments, expected = require_grad(make_arguments(call)), results(raw_op(call), make_arguments(call))
    for actual, wanted in zip(results(raw_op(call), arguments), expected, strict=True):
        assert_same_bits(actual.detach(), wanted)


def test_backward_of_what_a_raw_op_wrote_is_an_error():
    arguments = make_arguments("rms_norm")
    arguments["input"].requires_grad_()
    OPS.rms_norm(**arguments)
    with pytest.raises(RuntimeError, match="does not require grad"):
        arguments["out"].sum().backward()


def test_backward_of_what_a_raw_op_returned_warns():
    """torch marks new tensors as requiring grad, and their backward warns and gives nothing."""
    arguments = make_arguments("paged_attention")
    arguments["query"].requires_grad_()
    out, _ = OPS.paged_attention(**arguments)
    with pytest.warns(UserWarning, match="paged_attention: an autograd kernel was not registered"):
        out.sum().backward()
    assert arguments["query"].grad is None


def test_autograd_does_not_see_what_a_raw_op_writes_in_place():
    """As if it had not been called: why the wrappers raise."""
    arguments = make_arguments("fused_add_rms_norm")
    leaf = arguments["input"].clone().requires_grad_()
    arguments["input"] = leaf * 2
    OPS.fused_add_rms_norm(**arguments)
    arguments["input"].sum().backward()
    assert (leaf.grad == 2).all()


# ---- what importing needs, threads ---------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_torch_alone():
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch
from pagedattn_ext import ops
print(ops.rms_norm(torch.full((1, 3), 2.0), torch.ones(3), 0.0).sum().item())
"""
    assert float(run_python(code)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("version", "taken"),
    [("2.9.1+cpu", False), ("1.13.1", False), ("2.10.0", True), ("2.10.0a0+git1a2b3c", True), ("2.13.0+cpu", True)],
)
def test_import_with_another_torch(version, taken):
    code = f"""
import torch
torch.__version__ = {version!r}
try:
    import pagedattn_ext
    print("imported", pagedattn_ext.build_info()["torch_target"])
except ImportError as error:
    print(error)
"""
    error = f"pagedattn_ext: expected torch 2.10 or later, got {version}: pip install 'torch>=2.10'"
    assert run_python(code).strip() == ("imported 2.10" if taken else error)


def test_names_of_the_package():
    assert dir(pagedattn_ext) == sorted(pagedattn_ext.__all__)
    assert {"ops", "allocate_kv_cache", "__version__"} < set(dir(pagedattn_ext))
    assert pagedattn_ext.__version__ == pagedattn_ext.build_info()["version"]


def test_python_threads():
    """Calls from several Python threads at once give what they give one after the other."""
    expected = {call: results(getattr(OPS, op_of(call)), make_arguments(call)) for call in CALLS}

    def work(first: int) -> None:
        for call in (CALLS[first:] + CALLS[:first]) * 10:
            actual = results(getattr(OPS, op_of(call)), make_arguments(call))
            for tensor, wanted in zip(actual, expected[call], strict=True):
                assert_same_bits(tensor, wanted)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 24, 6)))


def test_python_threads_of_parallel_calls(several_threads):
    """Calls that split their work among threads of their own."""
    generator = torch.Generator().manual_seed(0)
    input, weight = torch.randn(512, 1024, generator=generator), torch.randn(1024, generator=generator)
    paged = make_arguments("paged_attention")
    del paged["query_start_loc"]
    paged["query"] = torch.randn(4, 32, 16, generator=generator)
    paged["block_tables"] = torch.randint(0, 6, (4, 128), generator=generator).int()
    paged["seq_lens"] = torch.tensor([2048, 17, 1500, 2000], dtype=torch.int32)

    def compute() -> list[torch.Tensor]:
        return [ops.rms_norm(input, weight), ops.silu_and_mul(input), *ops.paged_attention(**paged)]

    expected = compute()
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: compute(), range(24)):
            for tensor, wanted in zip(actual, expected, strict=True):
                assert_same_bits(tensor, wanted)

"""The ops as torch sees them: schemas, opcheck, torch.compile, what importing needs, threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import assert_same_bits, tensors_in
from torch._dynamo.testing import CompileCounterWithBackend

import pagedattn_ext
from pagedattn_ext import ops

OPS = torch.ops.pagedattn_ext

SCHEMAS = """
paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, Tensor? query_start_loc=None, float scale, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)
reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()
swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()
rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()
fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()
rotary_embedding_neox(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, Tensor cos_sin_cache) -> ()
silu_and_mul(Tensor(a!) out, Tensor input) -> ()
gelu_new(Tensor(a!) out, Tensor input) -> ()
"""  # noqa: E501
SCHEMA_OF = {line.partition("(")[0]: line for line in SCHEMAS.strip().splitlines()}


def make_arguments(name: str) -> dict:
    """Small valid arguments of the raw op: 3 sequences of 5, 17 and 32 tokens in 6 blocks of 16."""
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
    caches = {"key_caches": [normal(6, 2, 4, 16, 4)], "value_caches": [normal(6, 2, 16, 16)]}
    cache, mapping = normal(6, 2, 16, 16), torch.tensor([[0, 4], [2, 1]])
    return {
        "paged_attention_v1": paged
        | {"out": torch.zeros(3, 4, 16), "num_kv_heads": 2, "block_size": 16, "max_seq_len": 32},
        "paged_attention": paged | {"query_start_loc": torch.tensor([0, 1, 1, 3], dtype=torch.int32)},
        "reshape_and_cache": {"key": normal(3, 2, 16), "value": normal(3, 2, 16)}
        | {name: paged[name] for name in ("key_cache", "value_cache")}
        | {"slot_mapping": torch.tensor([7, -1, 90])},
        "copy_blocks": caches | {"block_mapping": mapping},
        "swap_blocks": {"src": cache, "dst": normal(6, 2, 16, 16), "block_mapping": mapping},
        "rms_norm": {"out": torch.zeros(3, 16), "input": normal(3, 16), "weight": normal(16), "epsilon": 1e-6},
        "fused_add_rms_norm": {
            "input": normal(3, 16),
            "residual": normal(3, 16),
            "weight": normal(16),
            "epsilon": 1e-6,
        },
        "rotary_embedding_neox": {
            "positions": torch.tensor([0, 7, 7]),
            "query": normal(3, 64),
            "key": normal(3, 32),
            "head_size": 16,
            "cos_sin_cache": normal(8, 16),
        },
        "silu_and_mul": {"out": torch.zeros(3, 8), "input": normal(3, 16)},
        "gelu_new": {"out": torch.zeros(3, 16), "input": normal(3, 16)},
    }[name]


def positional(name: str, arguments: dict) -> tuple[tuple, dict]:
    """The same arguments, those before the `*` of the schema by position: what opcheck wants to see."""
    schema = getattr(OPS, name).default._schema
    args = [arg.name for arg in schema.arguments if not arg.kwarg_only and arg.name in arguments]
    return tuple(arguments[arg] for arg in args), {k: v for k, v in arguments.items() if k not in args}


# What each wrapper is called with, of the raw op's arguments; it allocates `out` and infers the rest.
INFERRED = {"out", "num_kv_heads", "block_size"}


def call_wrapper(name: str, arguments: dict):
    return getattr(ops, name)(**{k: v for k, v in arguments.items() if k not in INFERRED})


def results(function, arguments: dict) -> list[torch.Tensor]:
    """Everything the call returns and everything it may have written."""
    returned = function(**arguments)
    returned = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return [*returned, *tensors_in(arguments)]


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_schema(name):
    expected = torch._C.parse_schema(f"pagedattn_ext::{SCHEMA_OF[name]}")
    assert str(getattr(OPS, name).default._schema) == str(expected)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_every_op_runs_and_has_a_wrapper(name):
    results(getattr(OPS, name), make_arguments(name))
    assert getattr(ops, name).__doc__


@pytest.mark.parametrize("name", SCHEMA_OF)
@pytest.mark.parametrize("wrong", [[1.0, 2.0], None], ids=str)
def test_wrapper_of_a_non_tensor(name, wrong):
    """Each tensor argument in turn."""
    arguments = make_arguments(name)
    optional = {arg.name for arg in getattr(OPS, name).default._schema.arguments if arg.has_default_value()}
    for argument, value in arguments.items():
        if (
            isinstance(value, torch.Tensor)
            and argument not in INFERRED
            and not (argument in optional and wrong is None)
        ):
            with pytest.raises(TypeError, match=argument):
                call_wrapper(name, arguments | {argument: wrong})


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_opcheck(name):
    args, kwargs = positional(name, make_arguments(name))
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_compile_raw_op(name):
    def call(**arguments):
        return getattr(OPS, name)(**arguments)

    torch.compiler.reset()
    expected = results(call, make_arguments(name))
    compiled = results(torch.compile(call, fullgraph=True, backend="aot_eager"), make_arguments(name))
    for actual, wanted in zip(compiled, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_compile_wrapper(name):
    def call(**arguments):
        return call_wrapper(name, arguments)

    torch.compiler.reset()
    expected = results(call, make_arguments(name))
    compiled = results(torch.compile(call, fullgraph=True, backend="aot_eager"), make_arguments(name))
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


LEVELS = ["default", "avx2", "avx512", "avx512_bf16"]


def test_cpu_capability_follows_the_environment():
    """Under `make test` this process runs with the variable set, so this says which ISA all the op tests ran on."""
    assert pagedattn_ext.cpu_capability() in LEVELS
    wanted = os.environ.get("PAGEDATTN_CPU_CAPABILITY")
    if wanted:
        assert LEVELS.index(pagedattn_ext.cpu_capability()) <= LEVELS.index(wanted)


def test_cpu_capability_can_be_lowered():
    code = "import pagedattn_ext; print(pagedattn_ext.cpu_capability())"
    assert run_python(code, PAGEDATTN_CPU_CAPABILITY="default").strip() == "default"


def test_two_threads():
    """Calls from two Python threads at once give what they give one after the other."""
    names = ["paged_attention", "fused_add_rms_norm", "rotary_embedding_neox", "reshape_and_cache"]
    expected = {name: results(getattr(OPS, name), make_arguments(name)) for name in names}

    def work(_):
        for name in names * 25:
            for actual, wanted in zip(results(getattr(OPS, name), make_arguments(name)), expected[name], strict=True):
                assert_same_bits(actual, wanted)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))

"""The ops as torch sees them: schemas, opcheck, autograd, what importing needs."""

import os
import subprocess
import sys

import pytest
import torch
from checks import assert_same_bits, tensors_in
from op_calls import (
    CALLS,
    OPS,
    SCHEMA_OF,
    call_wrapper,
    inferred_by_wrapper,
    make_arguments,
    op_of,
    optional_tensors,
    positional,
    raw_op,
    require_grad,
    results,
    wrapper,
)

import pagedattn_ext
from pagedattn_ext import ops


def test_every_op_is_in_the_table():
    """Tests of every op take them from there."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("pagedattn_ext::")}
    assert registered == {f"pagedattn_ext::{name}" for name in SCHEMA_OF}


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


# ---- autograd: no op has a backward --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [name for name in SCHEMA_OF if name != "pack_linear_weight"])  # it takes parameters
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


def test_a_compiled_wrapper_of_a_tensor_that_requires_grad():
    """Dynamo repeats the error. Catches code on the way to the error that Dynamo cannot trace."""
    torch.compiler.reset()
    compiled = torch.compile(call_wrapper, fullgraph=True, backend="eager")
    arguments = make_arguments("rms_norm")
    arguments["input"].requires_grad_()
    with pytest.raises(RuntimeError, match="rms_norm: input: requires grad, but the ops have no backward"):
        compiled("rms_norm", arguments)


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


# ---- what importing needs --------------------------------------------------------------------------------------------


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


VERSIONS = {"2.9.1+cpu": False, "1.13.1": False, "2.10.0": True, "2.10.0a0+git1a2b3c": True, "2.13.0+cpu": True}


def test_import_with_another_torch():
    """One import of torch for all versions: the package is imported in a child for each."""
    code = f"""
import os, torch
for version in {list(VERSIONS)}:
    if os.fork() == 0:
        torch.__version__ = version
        try:
            import pagedattn_ext
            print("imported", pagedattn_ext.build_info()["torch_target"], flush=True)
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""
    refused = "pagedattn_ext: expected torch 2.10 or later, got {}: pip install 'torch>=2.10'"
    expected = ["imported 2.10" if taken else refused.format(version) for version, taken in VERSIONS.items()]
    assert run_python(code).splitlines() == expected


def test_names_of_the_package():
    assert dir(pagedattn_ext) == sorted(pagedattn_ext.__all__)
    assert {"ops", "allocate_kv_cache", "__version__"} < set(dir(pagedattn_ext))
    assert pagedattn_ext.__version__ == pagedattn_ext.build_info()["version"]

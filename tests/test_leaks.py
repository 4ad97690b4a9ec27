"""No call of an op keeps memory, with or without an error, and no request: what the process grows by after many."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from op_calls import OPS, SCHEMA_OF, make_arguments, positional, raw_op, wrapper

from pagedattn_ext import CPUGraph

WARM_UP_CALLS = 1_000  # what torch, Python and malloc take once
MAX_BYTES_PER_CALL = 24  # the smallest piece that malloc gives away takes 32; a heap may grow a little on its own

STR_ARGUMENTS = [
    (name, argument.name)
    for name in SCHEMA_OF
    for argument in getattr(OPS, name).default._schema.arguments
    if isinstance(argument.type, torch.StringType)
]


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not kept
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_keeps_nothing(call: Callable[[], object], num_calls: int) -> None:
    for _ in range(WARM_UP_CALLS):
        call()
    before = resident_bytes()
    for _ in range(num_calls):
        call()
    assert resident_bytes() - before < MAX_BYTES_PER_CALL * num_calls


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_op(name):
    args, kwargs = positional(name, make_arguments(name))
    op = getattr(OPS, name)
    assert_keeps_nothing(lambda: op(*args, **kwargs), 100_000)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_wrapper(name):
    """Fewer: what it has of its own is Python's."""
    arguments, function = make_arguments(name), wrapper(name)
    assert_keeps_nothing(lambda: function(**arguments), 20_000)


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_replay(name):
    arguments, graph = make_arguments(name), CPUGraph()
    with graph.capture():
        raw_op(name)(**arguments)
    assert_keeps_nothing(graph.replay, 100_000)


def test_capture():
    arguments = make_arguments("linear_packed")

    def capture() -> None:
        with CPUGraph().capture():
            raw_op("linear_packed")(**arguments)

    assert_keeps_nothing(capture, 20_000)


@pytest.mark.parametrize(("name", "argument"), STR_ARGUMENTS)
def test_error_of_an_op_with_a_str_argument(name, argument):
    """A text that is too long to lie within a std::string."""
    arguments = make_arguments(name) | {argument: "a text of more than fifteen bytes"}
    op = raw_op(name)

    def refused() -> None:
        try:
            op(**arguments)
        except RuntimeError as error:
            assert f"{name}: {argument}: expected" in str(error)
        else:
            pytest.fail("no error")

    assert_keeps_nothing(refused, 100_000)


REQUESTS = """
import ctypes
import gc
from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of struct mallinfo2

class Usage(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Usage
llm = LLM(DEMO_MODEL, dtype="float32", num_blocks=300)
params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)

def serve():
    llm.generate(prompt_token_ids=[[3, 4, 5]] * 1_000, sampling_params=params, use_tqdm=False)
    gc.collect()
    usage = mallinfo2()
    return usage.uordblks + usage.hblkhd

before = serve()
print([serve() for _ in range(10)][-1] - before)
"""


def test_ten_thousand_requests():
    """In a process whose Python takes all memory from malloc, in steps of equal sizes, by malloc's own count: resident
    memory comes and goes by megabytes."""
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONMALLOC": "malloc"},
    )
    assert int(done.stdout) < MAX_BYTES_PER_CALL * 10_000  # one request takes 3,000 bytes

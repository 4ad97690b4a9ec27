"""No call of an op keeps memory, with or without an error, and no request: what malloc and Python have given away is
counted before and after many calls."""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from op_calls import OPS, SCHEMA_OF, make_arguments, positional, raw_op, wrapper

from pagedattn_ext import CPUGraph

WARM_UP_CALLS = 300  # what torch, Python and malloc take once
CALLS = 2_000
MAX_BYTES_PER_CALL = 24  # the smallest piece that malloc gives away takes 32
MAX_BLOCKS_PER_CALL = 0.5  # a Python object takes one

STR_ARGUMENTS = [
    (name, argument.name)
    for name in SCHEMA_OF
    for argument in getattr(OPS, name).default._schema.arguments
    if isinstance(argument.type, torch.StringType)
]


class MallocUsage(ctypes.Structure):
    """struct mallinfo2, ten sizes: bytes in pages of their own, and bytes in the heaps."""

    _fields_ = [
        ("_first", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("_middle", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("_last", ctypes.c_size_t * 2),
    ]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallocUsage


def malloc_bytes() -> int:
    """What malloc has given away and not got back. Resident memory would say less: it comes and goes by pages."""
    gc.collect()
    usage = mallinfo2()
    return usage.uordblks + usage.hblkhd


def assert_keeps_nothing(call: Callable[[], object], num_calls: int = CALLS) -> None:
    for _ in range(WARM_UP_CALLS):
        call()
    bytes_before, blocks_before = malloc_bytes(), sys.getallocatedblocks()
    for _ in range(num_calls):
        call()
    assert malloc_bytes() - bytes_before < MAX_BYTES_PER_CALL * num_calls
    assert sys.getallocatedblocks() - blocks_before < MAX_BLOCKS_PER_CALL * num_calls


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_op(name):
    args, kwargs = positional(name, make_arguments(name))
    op = getattr(OPS, name)
    assert_keeps_nothing(lambda: op(*args, **kwargs))


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_wrapper(name):
    arguments, function = make_arguments(name), wrapper(name)
    assert_keeps_nothing(lambda: function(**arguments))


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_replay(name):
    arguments, graph = make_arguments(name), CPUGraph()
    with graph.capture():
        raw_op(name)(**arguments)
    assert_keeps_nothing(graph.replay)


def test_capture():
    arguments = make_arguments("linear_packed")

    def capture() -> None:
        with CPUGraph().capture():
            raw_op("linear_packed")(**arguments)

    assert_keeps_nothing(capture)


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

    assert_keeps_nothing(refused)


REQUESTS = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from test_leaks import malloc_bytes

torch.set_num_threads(1)
llm = LLM(DEMO_MODEL, dtype="float32", num_blocks=300)
# One seed: the outputs meet no new tokens, whose texts the engine keeps, up to all of the vocabulary.
params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1, seed=0)

def serve():
    llm.generate(prompt_token_ids=[[3, 4, 5]] * 200, sampling_params=params, use_tqdm=False)
    return malloc_bytes()

before = [serve() for _ in range(5)][-1]  # block tables and free lists grow to their sizes
print([serve() for _ in range(5)][-1] - before)
"""


def test_a_thousand_requests():
    """In a process whose Python takes all memory from malloc, in steps of equal sizes, by malloc's own count."""
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONMALLOC": "malloc"},
    )
    assert int(done.stdout) < 64 * 1_000  # 12 KB as it is; one request takes 3,000 bytes

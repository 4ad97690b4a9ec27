"""The options of the engine: device, tokenizer, and how large its cache is."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SPEECH, Checkpoint, make_model
from engine_runs import completions, run, token_ids

import pagedattn_ext
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution import cache_engine
from pagedattn_serve.execution.engine_setup import choose_device
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


# --- device, tokenizer, memory ---

NO_CUDA = not (torch.cuda.is_available() and pagedattn_ext.build_info()["cuda_arches"])


@pytest.mark.parametrize("choice", ["auto", "cpu"])
def test_device_cpu(llama: Checkpoint, choice: str) -> None:
    if choice == "auto" and not NO_CUDA:
        pytest.skip("auto is CUDA here")
    engine = LLMEngine(llama.path, device=choice)
    assert token_ids(run(engine, llama.prompts[:2], GREEDY)) == llama.expected[:2]
    assert engine.model_runner.device == "cpu"


@pytest.mark.parametrize(
    "choice", ["tpu", "", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cuda 0", "0", "5", 5, None]
)
def test_a_device_that_is_none(llama: Checkpoint, choice: Any) -> None:
    with pytest.raises(ValueError) as error:
        LLMEngine(llama.path, device=choice)
    assert str(error.value) == f"device: expected auto, cpu, cuda or cuda:N, got {choice!r}"


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
@pytest.mark.parametrize("choice", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_where_there_is_none(llama: Checkpoint, choice: str) -> None:
    with pytest.raises(ValueError, match=rf"device: expected cpu \(.*CUDA.*\), got {choice}$"):
        LLMEngine(llama.path, device=choice)


@pytest.mark.parametrize(
    ("arches", "cuda_of_torch", "reason"),
    [
        ([], None, "this build of pagedattn_ext has no CUDA kernels"),
        ([], "13.0", "this build of pagedattn_ext has no CUDA kernels"),
        (["90"], None, "this torch is built without CUDA"),
        (["90"], "13.0", "torch finds no CUDA device"),
    ],
)
def test_why_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch, arches: list[str], cuda_of_torch: str | None, reason: str
) -> None:
    monkeypatch.setattr(pagedattn_ext, "build_info", lambda: {"cuda_arches": arches})
    monkeypatch.setattr(torch.version, "cuda", cuda_of_torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError) as error:
        choose_device("cuda")
    assert str(error.value) == f"device: expected cpu ({reason}), got cuda"


def test_device_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedattn_ext, "build_info", lambda: {"cuda_arches": ["90"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]


def test_a_model_without_a_tokenizer_and_one_from_elsewhere(text_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(text_model) / name, tmp_path)
    assert LLMEngine(str(tmp_path)).tokenizer is None
    engine = LLMEngine(str(tmp_path), tokenizer=text_model)
    params = SamplingParams(temperature=0, max_tokens=24, stop="never", logprobs=1)
    prompts = ["the cat", "🙂"]
    assert completions(run(engine, prompts, params)) == completions(run(LLMEngine(text_model), prompts, params))


def test_another_tokenizer_than_the_model_s(speaker_path: str, tmp_path: Path) -> None:
    """With tokens in each other's place: the model says the same ones, the texts of prompt and output are others."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(speaker_path) / name, tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    for first, second in [("n", "m"), ("Ġmat", "Ġhat")]:
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    params = SamplingParams(temperature=0, max_tokens=None, logprobs=0)
    [own] = run(LLMEngine(speaker_path), ["nn"], params)
    [other] = run(LLMEngine(speaker_path, tokenizer=str(tmp_path)), ["mm"], params)
    assert (own.prompt_token_ids, token_ids([own])) == (other.prompt_token_ids, token_ids([other]))
    assert own.outputs[0].text == SPEECH
    exchanged = SPEECH.replace(" mat", " ?").replace(" hat", " mat").replace(" ?", " hat")
    assert other.outputs[0].text == exchanged
    assert other.outputs[0].logprobs is not None
    decoded = [entry.decoded_token for entries in other.outputs[0].logprobs for entry in entries.values()]
    assert decoded.index(" hat") < decoded.index(" mat")


def test_a_directory_without_the_tokenizer(llama: Checkpoint, text_model: str, tmp_path: Path) -> None:
    """It is asked for, so the model's own is no answer."""
    for directory in (llama.path, str(tmp_path), str(tmp_path / "nowhere"), "gpt2"):
        with pytest.raises(FileNotFoundError, match=f"tokenizer: expected a directory with .*, got {directory}$"):
            LLMEngine(text_model, tokenizer=directory)


def test_swap_space_and_gpu_memory_utilization_change_nothing_on_the_cpu(llama: Checkpoint) -> None:
    for swap_space, share in [(0, 1), (4, 0.01), (0.5, 1.0), (10**6, 0.9), (1e300, 0.9)]:
        engine = LLMEngine(llama.path, swap_space=swap_space, gpu_memory_utilization=share)
        assert engine.stats().num_blocks == 2069  # 256 * 8, and 1% of all beside them


# --- size of the cache ---

# llama-gqa in fp32: keys and values of 2 layers, 2 KV heads, 20 numbers a head, 16 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 20 * 16 * 4


def num_blocks(path: str, **options: Any) -> int:
    return LLMEngine(path, **options).stats().num_blocks


def test_cache_size(llama: Checkpoint) -> None:
    assert num_blocks(llama.path, num_blocks=33) == 33
    assert num_blocks(llama.path, kv_cache_memory=10 * BLOCK_BYTES) == 10
    assert num_blocks(llama.path, kv_cache_memory=11 * BLOCK_BYTES - 1) == 10
    assert num_blocks(llama.path, kv_cache_memory=10 * BLOCK_BYTES, block_size=32) == 5
    # 128 positions are 8 blocks a sequence, and the watermark's 1% of all: no more than can be used, by default too.
    assert num_blocks(llama.path) == 2069
    assert num_blocks(llama.path, max_num_seqs=3) == 25
    assert num_blocks(llama.path, max_num_seqs=3, max_model_len=17) == 7
    assert num_blocks(llama.path, max_num_seqs=3, kv_cache_memory=10 * BLOCK_BYTES) == 10


def test_a_small_cache_limits_the_length(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=2)
    assert engine.max_model_len == 32
    [output] = run(engine, [llama.prompts[3]], SamplingParams(temperature=0, max_tokens=None))  # 16 tokens
    assert output.outputs[0].token_ids == llama.expected[3][:16]
    assert output.outputs[0].finish_reason == "length"
    assert LLMEngine(llama.path, num_blocks=2, max_model_len=20).max_model_len == 20


def test_a_max_model_len_that_the_cache_cuts(llama: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for or the model's own: one warning that says so; none where nothing is cut."""
    cases: list[tuple[dict[str, Any], str | None]] = [
        (dict(num_blocks=2, max_model_len=40), "max_model_len: cut from 40 to 32 tokens, all that the cache holds"),
        (dict(num_blocks=3), "max_model_len: cut from 128 to 48 tokens, all that the cache holds"),
        (
            dict(kv_cache_memory=BLOCK_BYTES, max_model_len=17),
            "max_model_len: cut from 17 to 16 tokens, all that the cache holds",
        ),
        (dict(num_blocks=2, max_model_len=32), None),
        (dict(num_blocks=8), None),
        (dict(), None),
    ]
    for options, warning in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="pagedattn_serve"):
            engine = LLMEngine(llama.path, **options)
        assert [record.getMessage() for record in caplog.records] == ([] if warning is None else [warning])
        assert warning is None or f"to {engine.max_model_len} tokens" in warning
    engine = LLMEngine(llama.path, num_blocks=2, max_model_len=40)
    with pytest.raises(ValueError, match="expected 1 to 31 tokens"):
        engine.add_request("x", prompt_token_ids=[7] * 32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_blocks=4, kv_cache_memory=10**6), ValueError, "kv_cache_memory: expected None beside num_blocks"),
        (dict(kv_cache_memory=BLOCK_BYTES - 1), ValueError, f"kv_cache_memory: .*one block, {BLOCK_BYTES} bytes"),
        (dict(kv_cache_memory=0), ValueError, "kv_cache_memory"),
        (dict(kv_cache_memory=1e9), TypeError, "kv_cache_memory"),
        (dict(num_blocks=0), ValueError, "num_blocks"),
        (dict(num_blocks="4"), TypeError, "num_blocks"),
        (dict(block_size=0), ValueError, "block_size"),
        (dict(block_size=-16), ValueError, "block_size"),
        (dict(block_size=24), ValueError, "block_size"),
        (dict(block_size="16"), TypeError, "block_size"),
        (dict(max_num_seqs=0), ValueError, "max_num_seqs"),
        (dict(max_num_seqs="4"), TypeError, "max_num_seqs"),
        (dict(max_beam_width=0), ValueError, "max_beam_width: expected an int >= 1, got 0"),
        (dict(max_beam_width="4"), TypeError, "max_beam_width: expected an int, got '4'"),
        (dict(max_num_batched_tokens=0), ValueError, "max_num_batched_tokens"),
        (dict(max_model_len=129), ValueError, "max_model_len: expected an int in .2, 128., got 129"),
        (dict(max_model_len=1), ValueError, "max_model_len"),
        (dict(max_model_len=20.0), TypeError, "max_model_len"),
        (dict(dtype="float64"), ValueError, "dtype"),
        (dict(seed="x"), TypeError, "seed"),
        (dict(block_size=512), ValueError, r"block_size: expected an int in \[1, 256\], got 512"),
        (dict(tensor_parallel_size=0), ValueError, r"tensor_parallel_size: expected an int in \[1, 64\], got 0"),
        (dict(pipeline_parallel_size=0), ValueError, r"pipeline_parallel_size: expected an int in \[1, 64\], got 0"),
        (dict(distributed_executor_backend="mpi"), ValueError, "distributed_executor_backend: expected one of mp, ray"),
        (dict(tensor_parallel_size="1"), TypeError, "tensor_parallel_size: expected an int"),
        (dict(pipeline_parallel_size="1"), TypeError, "pipeline_parallel_size: expected an int"),
        (dict(trust_remote_code=True), ValueError, "trust_remote_code: expected False, .*not supported"),
        (dict(trust_remote_code="no"), TypeError, "trust_remote_code: expected a bool, got 'no'"),
        (dict(enforce_eager=None), TypeError, "enforce_eager: expected a bool, got None"),
        (dict(quantization="awq"), ValueError, "quantization: expected None, int8 or int4 .*, got 'awq'"),
        (dict(quantization=8), ValueError, "quantization: expected None, int8 or int4 .*, got 8"),
        (dict(tokenizer=5), TypeError, "tokenizer: expected a directory as a string or a path, got int"),
        (
            dict(num_blocks=10**13),
            MemoryError,
            f"10,000,000,000,000 blocks of 16 tokens, {BLOCK_BYTES * 10**13:,} bytes",
        ),
        (dict(num_blocks=10**9), MemoryError, f"1,000,000,000 blocks of 16 tokens, {BLOCK_BYTES * 10**9:,} bytes"),
        (dict(seed=-1), ValueError, "seed"),
        (dict(swap_space=-1), ValueError, "swap_space: expected a number >= 0, got -1"),
        (dict(swap_space=-0.5), ValueError, "swap_space: expected a number >= 0, got -0.5"),
        (dict(swap_space=math.nan), ValueError, "swap_space: expected a finite number, got nan"),
        (dict(swap_space=math.inf), ValueError, "swap_space: expected a finite number, got inf"),
        (dict(swap_space="4"), TypeError, "swap_space: expected a number, got '4'"),
        (dict(swap_space=None), TypeError, "swap_space: expected a number, got None"),
        (dict(gpu_memory_utilization=0), ValueError, r"gpu_memory_utilization: expected a number in \(0, 1\], got 0"),
        (dict(gpu_memory_utilization=1.01), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got 1.01"),
        (dict(gpu_memory_utilization=90), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got 90"),
        (dict(gpu_memory_utilization=-0.9), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got -0.9"),
        (dict(gpu_memory_utilization=math.nan), ValueError, "gpu_memory_utilization: expected a finite number"),
        (dict(gpu_memory_utilization="90%"), TypeError, "gpu_memory_utilization: expected a number, got '90%'"),
        (dict(gpu_memory_utilization=True), TypeError, "gpu_memory_utilization: expected a number, got True"),
    ],
)
def test_wrong_options(llama: Checkpoint, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMEngine(llama.path, **options)


def test_a_pool_on_the_host_that_does_not_fit(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is about the pool, not about the cache."""
    allocate = cache_engine.allocate_caches

    def allocate_on_device(*args: Any, **options: Any) -> Any:
        if "pin_memory" in options:
            raise RuntimeError("no memory for the pool")
        return allocate(*args, **options)

    monkeypatch.setattr(cache_engine, "allocate_caches", allocate_on_device)
    with pytest.raises(MemoryError, match=r"^swap_space: expected a pool that fits .*no memory for the pool"):
        LLMEngine(llama.path)


@pytest.mark.parametrize("max_num_seqs", [1 << 50, 1 << 63])
def test_more_sequences_than_tables_have_room_for(llama: Checkpoint, max_num_seqs: int) -> None:
    """The error is about the sequences, not about the cache."""
    with pytest.raises(MemoryError, match=rf"^max_num_seqs: expected .* tables fit in memory, got {max_num_seqs:,} of"):
        LLMEngine(llama.path, max_num_seqs=max_num_seqs)


def test_a_head_size_without_a_kernel(tmp_path: Path) -> None:
    """An error of the model, when it is loaded, not of the first request."""
    make_model("llama-gqa", head_dim=520).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head_size: expected at most 512, got 520"):
        LLMEngine(str(tmp_path))


def test_seed_of_the_engine(llama: Checkpoint) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return token_ids(run(LLMEngine(llama.path, seed=seed), llama.prompts, SamplingParams(max_tokens=8)))

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(3, 18), (4, 32), (7, 17)])
def test_the_default_size_lets_all_run_at_once(llama: Checkpoint, max_num_seqs: int, max_model_len: int) -> None:
    engine = LLMEngine(llama.path, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    for i in range(max_num_seqs):
        prompt = [i] * (max_model_len - 1)
        engine.add_request(str(i), sampling_params=SamplingParams(max_tokens=None), prompt_token_ids=prompt)
    engine.scheduler.schedule()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (max_num_seqs, 0)


@pytest.mark.parametrize("model", [None, 123, b"x", ["x"]])
def test_a_model_that_is_no_path(model: Any) -> None:
    with pytest.raises(TypeError, match=f"^model: expected a directory .*, got {type(model).__name__}$"):
        LLMEngine(model)


def test_paths(llama: Checkpoint, text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pathlib, and in the home directory."""
    expected = llama.expected[:1]
    assert token_ids(run(LLMEngine(Path(llama.path)), llama.prompts[:1], GREEDY)) == expected
    monkeypatch.setenv("HOME", str(Path(llama.path).parent))
    engine = LLMEngine(f"~/{Path(llama.path).name}", tokenizer=Path(text_model))
    assert engine.tokenizer is not None
    assert token_ids(run(engine, llama.prompts[:1], GREEDY)) == expected


def test_options_that_change_nothing(llama: Checkpoint) -> None:
    for enforce_eager in (True, False):
        engine = LLMEngine(llama.path, tensor_parallel_size=1, enforce_eager=enforce_eager, trust_remote_code=False)
        assert token_ids(run(engine, llama.prompts[:2], GREEDY)) == llama.expected[:2]


@pytest.mark.parametrize("block_size", [2, 8, 64, 128, 256])
def test_every_block_size(llama: Checkpoint, block_size: int) -> None:
    """Two sequences' worth of blocks, so that others are preempted where a block is small."""
    engine = LLMEngine(llama.path, block_size=block_size, num_blocks=2 * max(64 // block_size, 1))
    assert token_ids(run(engine, llama.prompts, GREEDY)) == llama.expected


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", torch.float16), ("float", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_names_of_dtypes(llama: Checkpoint, name: str, dtype: torch.dtype) -> None:
    assert LLMEngine(llama.path, dtype=name).model_runner.model.dtype == dtype


def test_an_arbitrary_seed(llama: Checkpoint) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=20)
    first, second = (token_ids(run(LLMEngine(llama.path, seed=None), llama.prompts[:1], params)) for _ in range(2))
    assert first != second

"""An interrupt may come at any point of a call: it ends all requests, and the next call is as good as any.

`sys.settrace` raises KeyboardInterrupt at one chosen place after the other: where each function begins, and at lines of
which each run takes others. A timer's signal tries what lies between lines.
"""

import dis
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import pytest
import torch
import tqdm.std
from checkpoints import Checkpoint
from engine_runs import finish_all, token_ids
from test_progress import on_terminal
from torch.autograd import grad_mode
from torch.utils import _python_dispatch

import pagedattn_serve
from pagedattn_ext import cpu_graph
from pagedattn_serve import LLM, LLMEngine, RequestOutput, SamplingParams, StructuredOutput, progress
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.scheduling.scheduler import Scheduler

ROOT = Path(pagedattn_serve.__file__).parent
# What holds state from call to call.
FILES = {
    str(ROOT / name)
    for name in (
        "llm.py",
        "engine.py",
        "progress.py",
        "requests/request.py",
        "sampling/grammar.py",
        "scheduling/beam_search.py",
        "scheduling/sequence.py",
        "scheduling/scheduler.py",
        "scheduling/block_manager.py",
        "scheduling/block_allocator.py",
        "scheduling/prompt_lookup.py",
        "scheduling/prompt_pace.py",
        "execution/cache_engine.py",
        "execution/model_runner.py",
        "execution/logits_processors.py",
        "text/detokenizer.py",
    )
}
# What sets modes of torch, and takes them back.
MODES = {str(ROOT / "execution/decode_graphs.py")} | {
    module.__file__ for module in (cpu_graph, grad_mode, _python_dispatch)
}
# What may show progress: the file here, and tqdm's, whose lock between processes an interrupt would leave taken.
OF_PROGRESS = {str(progress.__file__), str(tqdm.std.__file__)}
# Chunks of prompts, one that does not fit in a step, a preemption, and an end at a time of its own for each.
SMALL: dict[str, Any] = dict(num_blocks=6, block_size=8, max_num_seqs=3, max_num_batched_tokens=14)
PROMPTS = [[*range(5, 19)], [*range(30, 45)], [7] * 8]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, logprobs=n % 2, ignore_eos=True) for n in (7, 3, 3)]
# With speculation: the few tokens of a repeater.
REPETITIONS = [[0, 1] * 7, [1, 2, 3] * 5, [3] * 8]
# Groups, of which one is swapped out.
GROUPS = [
    SamplingParams(n=2, best_of=3, seed=1, max_tokens=5, logprobs=1, ignore_eos=True),
    SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=4, logprobs=1, ignore_eos=True),
    SamplingParams(n=2, seed=2, max_tokens=3, ignore_eos=True),
]
OF_GROUPS: dict[str, Any] = SMALL | dict(num_blocks=8, max_num_seqs=7, preemption_mode="swap")

# With structured output: one that repeats itself in its form, one of several sequences, one whose form ends.
FORMS = [
    SamplingParams(temperature=0, max_tokens=14, structured_output=StructuredOutput(regex="(the){5}a(the){2}")),
    SamplingParams(n=2, seed=1, max_tokens=4, structured_output=StructuredOutput(regex="[a-z ]+")),
    SamplingParams(seed=2, max_tokens=9, structured_output=StructuredOutput(json={"enum": [1, 22, "a"]})),
]
NUM_LINES = 40  # that a test tries beside the beginnings of functions
HANG_SECONDS = 60  # after which a thread counts as one that hangs

T = TypeVar("T")


class Places:
    """The calls and lines of some files as they are run, counted; at number `at` an interrupt comes, or this error."""

    def __init__(
        self, at: int | None = None, files: set[str] = FILES, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.at, self.files, self.error, self.count = at, files, error, 0
        self.seen: list[tuple[str, int]] = []

    def __enter__(self) -> "Places":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self._place(frame, event, arg) if frame.f_code.co_filename in self.files else None

    def _place(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event in ("call", "line") and frame.f_lasti not in _without_signals(frame.f_code):
            self.count += 1
            self.seen.append((frame.f_code.co_qualname, frame.f_lineno))
            if self.count == self.at:
                raise self.error
        return self._place


@cache
def _without_signals(code: CodeType) -> set[int]:
    """The instructions, by offset, between the body of a `with` and the call of `__exit__`, and what the line of a
    `try:` is, which no handler may cover. No signal comes there, as Python handles signals where a function begins,
    after a call, and where a loop goes back."""
    instructions = list(dis.get_instructions(code))
    offsets = {each.offset for each in instructions if each.opname == "NOP"}
    for i, ahead in enumerate(zip(instructions, instructions[1:], instructions[2:], strict=False)):
        if [(each.opname, each.argval) for each in ahead] == [("LOAD_CONST", None)] * 3:
            first = i - 1 if instructions[i - 1].opname == "SWAP" else i  # with what the body returns
            offsets |= {each.offset for each in instructions[first : i + 3]}
    return offsets


def chosen(seen: list[tuple[str, int]]) -> list[int]:
    """Some places, by their numbers: the first of each function, and lines at random."""
    firsts: dict[str, int] = {}
    for number, (name, _) in enumerate(seen, 1):
        firsts.setdefault(name, number)
    return sorted({*firsts.values(), *random.sample(range(1, len(seen) + 1), min(NUM_LINES, len(seen)))})


def shortest(run: Callable[[], object], files: set[str]) -> list[tuple[str, int]]:
    """The places of the shortest of three runs, for what looks for messages more often the longer it waits: a later run
    has hardly fewer places."""
    runs = []
    for _ in range(3):
        with Places(files=files) as places:
            run()
        runs.append(places.seen)
    return min(runs, key=len)


@pytest.fixture
def llm(text_model: str) -> LLM:
    return LLM(text_model, **SMALL)


def generate(
    llm: LLM, prompts: list[list[int]] = PROMPTS, params: list[SamplingParams] = PARAMS
) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.prompt_token_ids, each.text, each.token_ids, each.finish_reason)
        for output in outputs
        for each in output.outputs
    ]


def in_another_thread(f: Callable[[], T]) -> T:
    """What it returns there. A thread that waits for ever fails the test soon."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(f()), daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive(), f"it hangs at {sys._current_frames()[thread.ident or 0]}"
    [result] = results
    return result


def expect_nothing_left(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_used_blocks, stats.num_used_slots) == (0, 0, 0, 0)
    assert (stats.num_swapped, stats.num_used_host_blocks) == (0, 0)
    engine.scheduler.block_manager.check_integrity()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("case", ["single", "speculation", "groups", "forms"])
def test_an_interrupt_of_generate(
    text_model: str, ending_model: str, repeater: Checkpoint, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The chunks of a long prompt follow the time of steps; each run is to go through the same places.
    mark_computed = Scheduler.mark_computed
    monkeypatch.setattr(Scheduler, "mark_computed", lambda self, batch, seconds: mark_computed(self, batch, 0.01))
    prompts, params = PROMPTS, PARAMS
    if case == "speculation":
        llm, prompts = LLM(repeater.path, speculation="ngram", **SMALL), REPETITIONS
    elif case == "groups":
        llm, params = LLM(text_model, **OF_GROUPS), GROUPS
    elif case == "forms":
        llm, params = LLM(ending_model, speculation="ngram", preemption_mode="recompute", **SMALL), FORMS
    else:
        llm = LLM(text_model, **SMALL)
    expected = results(generate(llm, prompts, params))
    llm.llm_engine._is_broken = True  # as after an interrupt: without cached prefixes, which would change the places
    with Places() as places:
        assert results(generate(llm, prompts, params)) == expected
    stats = llm.llm_engine.stats()
    assert (stats.num_swaps > 0) == (case == "groups") and (stats.num_recomputes > 0) == (case != "groups")
    assert (0 < stats.num_accepted_tokens < stats.num_proposed_tokens) == (case in ("speculation", "forms"))
    for i, at in enumerate(chosen(places.seen)):
        llm.llm_engine._is_broken = True
        with Places(at), pytest.raises(KeyboardInterrupt) as interrupt:
            generate(llm, prompts, params)
        place = places.seen[at - 1]
        expect_nothing_left(llm.llm_engine)
        in_clean_up = any(entry.name == "_abort_all" for entry in interrupt.traceback)
        if in_clean_up or i % 5 == 0:
            assert results(generate(llm, prompts, params)) == expected, place
    assert results(generate(llm, prompts, params)) == expected


@pytest.mark.parametrize("case", ["single", "groups"])
def test_a_limit_of_the_caller(text_model: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler of SIGALRM raises comes to the caller, or ends the request whose text it meets. The next call
    finds no block that was not computed."""
    mark_computed = Scheduler.mark_computed
    monkeypatch.setattr(Scheduler, "mark_computed", lambda self, batch, seconds: mark_computed(self, batch, 0.01))
    options, params = {"single": (SMALL, PARAMS), "groups": (OF_GROUPS, GROUPS)}[case]
    llm = LLM(text_model, **options)
    expected = results(generate(llm, PROMPTS, params))
    llm.llm_engine._is_broken = True
    with Places() as places:
        generate(llm, PROMPTS, params)
    for at in chosen(places.seen):
        llm.llm_engine._is_broken = True
        place = places.seen[at - 1]
        try:
            with Places(at, error=TimeoutError):
                outputs = generate(llm, PROMPTS, params)
        except TimeoutError:
            pass
        else:
            assert [output.error for output in outputs if output.error] == ["TimeoutError: "], place
        expect_nothing_left(llm.llm_engine)
        assert results(generate(llm, PROMPTS, params)) == expected, place


def test_an_interrupt_of_the_clean_up_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays behind then, the next call clears away."""
    expected = results(generate(llm))
    clean_up = LLM._abort_all
    interrupts: list[Places] = []

    def interrupted(self: LLM) -> None:
        if not interrupts or self._request_ids == []:
            return clean_up(self)
        with interrupts.pop():
            clean_up(self)

    monkeypatch.setattr(LLM, "_abort_all", interrupted)
    with Places() as places:
        generate(llm)
    # In queueing, in scheduling, and in the middle of the appending of tokens.
    for name in ("LLMEngine.queue_request", "Scheduler._add_to_batch", "Completion.add_token"):
        lines = [number for number, (place, _) in enumerate(places.seen, 1) if place == name]
        at = random.choice(lines)
        second, num_in_clean_up = 1, 10**9
        while second <= num_in_clean_up:
            interrupts.append(Places(second))
            [in_clean_up] = interrupts
            with Places(at), pytest.raises(KeyboardInterrupt):
                generate(llm)
            num_in_clean_up = 10**9 if in_clean_up.count == second else in_clean_up.count
            second += 3
            assert results(generate(llm)) == expected, (places.seen[at - 1], in_clean_up.seen[-1])
            expect_nothing_left(llm.llm_engine)


def test_an_interrupt_of_progress(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line that shows the progress of a call: the next call shows its own, in whichever thread."""
    terminal = on_terminal(monkeypatch)

    def generate_one() -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        return results(llm.generate(prompt_token_ids=[PROMPTS[2]], sampling_params=params))

    expected = generate_one()
    assert "Requests: 1/1 (100%)" in terminal.getvalue()
    with Places(files=OF_PROGRESS) as places:
        generate_one()
    for at in sorted({place: number for number, place in enumerate(places.seen, 1)}.values()):
        with Places(at, OF_PROGRESS), pytest.raises(KeyboardInterrupt):
            generate_one()
        expect_nothing_left(llm.llm_engine)
        terminal.truncate(0)
        assert in_another_thread(generate_one) == expected, places.seen[at - 1]
        assert "Requests: 1/1 (100%)" in terminal.getvalue(), places.seen[at - 1]
    assert generate_one() == expected
    assert {"Progress.update", "Progress.close", "write"} <= {name for name, _ in places.seen}


def test_an_interrupt_of_the_progress_of_loading(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last line of each function of it: the next model is loaded, in whichever thread."""
    terminal = on_terminal(monkeypatch)
    with Places(files=OF_PROGRESS) as places:
        load_model(llama.path)
    assert "Loading weights: " in terminal.getvalue()
    for at in sorted({name: number for number, (name, _) in enumerate(places.seen, 1)}.values()):
        with Places(at, OF_PROGRESS), pytest.raises(KeyboardInterrupt):
            load_model(llama.path)
        in_another_thread(lambda: load_model(llama.path))


@pytest.mark.parametrize("call", ["add_request", "step", "abort_request", "register_prefix", "fail_batch"])
def test_an_interrupt_of_the_engine(text_model: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It ends all requests, whose ids may be taken again; or it came before anything was done, and they go on."""
    engine = LLMEngine(text_model, max_model_len=40, **SMALL)

    def add_all() -> None:
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(i), None, params, prompt)

    def finish() -> dict[str, Any]:
        outputs = {}
        for _ in range(100):  # more than enough
            outputs.update((output.request_id, results([output])) for output in engine.step())
            if not engine.has_unfinished_requests():
                break
        return outputs

    def no_memory(batch: object) -> None:
        raise MemoryError

    def run(places: Places) -> bool:
        add_all()
        engine.step()
        engine.step()
        if call in ("abort_request", "fail_batch"):  # while a batch waits to run again
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(engine.model_runner, "execute", no_memory)
                engine.step()
        try:
            with places:
                match call:
                    case "add_request":
                        engine.add_request("3", "the mat", PARAMS[0])
                    case "step":
                        engine.step()
                    case "abort_request":
                        engine.abort_request(["0", "1"])
                    case "register_prefix":
                        engine.register_prefix(PROMPTS[0])
                    case "fail_batch":
                        engine.fail_batch("no memory")
        except KeyboardInterrupt:
            return True
        return False

    add_all()
    expected = finish()
    places = Places()
    assert not run(places)
    finish()
    num_ended = 0
    for at in chosen(places.seen):
        assert run(Places(at)), places.seen[at - 1]
        num_ended += not engine.has_unfinished_requests()
        assert finish().items() <= expected.items(), places.seen[at - 1]
        expect_nothing_left(engine)
        add_all()
        assert finish() == expected, places.seen[at - 1]
    assert num_ended > 5


def test_an_interrupt_amid_modes_of_torch(llama: Checkpoint) -> None:
    """Of a step that captures a graph: no mode outlives it, though its traceback does, and the next one captures."""
    engine, prompt = LLM(llama.path, enable_prefix_caching=False).llm_engine, llama.prompts[5]
    graphs = engine.model_runner._graphs
    assert graphs is not None

    def run(places: Places) -> bool:
        graphs._graphs.clear()
        engine.add_request("a", None, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), prompt)
        engine.step()
        interrupts = []
        with places:
            try:
                engine.step()
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        assert _python_dispatch._get_current_dispatch_mode() is None
        if interrupts:
            assert not engine.has_unfinished_requests()
            engine.add_request("a", None, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), prompt)
        assert token_ids([finish_all(engine)["a"][-1]]) == [llama.expected[5][:3]]
        return interrupts != []

    run(Places())  # torch does some things once
    places = Places(files=MODES)
    run(places)
    for name in ("_Capture.__enter__", "_Capture.__exit__", "TorchDispatchMode.__exit__", "CPUGraph.replay"):
        assert any(seen.endswith(name) for seen, _ in places.seen), name
    numbers = sorted(set(map(places.seen.index, places.seen)))  # all of these lines: they are few
    # After one within `TorchDispatchMode.__enter__` that takes a line or two less.
    assert sum(run(Places(at + 1, MODES)) for at in numbers) > 0.9 * len(numbers) > 50


@pytest.mark.timeout(method="thread")  # the signal of the other method is the one that the test sends
def test_real_signals(llm: LLM) -> None:
    """Between lines and within calls, at times spread over the whole of a call. A call may take less time than the one
    that was measured: then there are more of them."""
    expected = results(generate(llm))
    started = time.perf_counter()
    generate(llm)
    seconds = time.perf_counter() - started
    hits = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in count():
            if i >= 60 and hits > 10:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 60 * seconds / 60)
                generate(llm)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            assert results(generate(llm)) == expected
            expect_nothing_left(llm.llm_engine)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_request_of_somebody_else(llm: LLM) -> None:
    """Its id, chosen as badly as can be, is not aborted for it; an interrupt ends it."""
    engine = llm.llm_engine
    engine.add_request("llm-1", "the mat", SamplingParams(temperature=0, max_tokens=9))
    with pytest.raises(ValueError, match=r"^prompt 2 of 3: request_id: 'llm-1' is taken"):
        generate(llm)
    assert engine.get_num_unfinished_requests() == 1
    with Places() as places:
        generate(llm)  # and it is finished on the way
    engine.add_request("x", "the mat", SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    in_schedule = next(i for i, (name, _) in enumerate(places.seen, 1) if name.endswith("Scheduler._add_to_batch"))
    with Places(in_schedule + 2), pytest.raises(KeyboardInterrupt):
        generate(llm)
    expect_nothing_left(engine)

"""An interrupt may come at any point of `LLM.generate`: nothing stays behind, and the next call is as good as any.

`sys.settrace` raises KeyboardInterrupt at one chosen place after the other, so that every line of the engine is tried,
and the door of every function; a timer's signal tries what lies between lines.
"""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, finish_all, token_ids
from torch.autograd import grad_mode
from torch.utils import _python_dispatch

import pagedattn_serve
from pagedattn_ext import cpu_graph, inference_mode
from pagedattn_serve import LLM, RequestOutput, SamplingParams, StructuredOutput
from pagedattn_serve.scheduling.scheduler import Scheduler

ROOT = Path(pagedattn_serve.__file__).parent
# What holds state from call to call.
FILES = {
    str(ROOT / name)
    for name in (
        "llm.py",
        "engine.py",
        "requests/request.py",
        "requests/beam_request.py",
        "requests/completion.py",
        "grammar.py",
        "scheduling/beam_search.py",
        "scheduling/sequence.py",
        "scheduling/scheduler.py",
        "scheduling/block_manager.py",
        "scheduling/block_allocator.py",
        "scheduling/prompt_lookup.py",
        "scheduling/prompt_pace.py",
        "execution/block_tables.py",
        "execution/cache_engine.py",
        "execution/model_runner.py",
        "execution/token_masks.py",
        "text/detokenizer.py",
    )
}
# What sets modes of torch, and takes them back.
MODES = {str(ROOT / "execution/decode_graphs.py")} | {
    module.__file__ for module in (cpu_graph, inference_mode, grad_mode, _python_dispatch)
}
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


class Places:
    """The calls and lines of some files as they are run, counted; at number `at` an interrupt comes."""

    def __init__(self, at: int | None = None, files: set[str] = FILES) -> None:
        self.at, self.files, self.count = at, files, 0
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
        if event in ("call", "line"):
            self.count += 1
            self.seen.append((frame.f_code.co_qualname, frame.f_lineno))
            if self.count == self.at:
                raise KeyboardInterrupt
        return self._place


def chosen(seen: list[tuple[str, int]]) -> list[int]:
    """Of each line the first visit and the last, by their numbers."""
    visits: dict[tuple[str, int], list[int]] = {}
    for number, place in enumerate(seen, 1):
        visits.setdefault(place, []).append(number)
    return sorted({numbers[i] for numbers in visits.values() for i in (0, -1)})


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


def expect_nothing_left(llm: LLM) -> None:
    engine = llm.llm_engine
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_used_blocks, stats.num_used_slots) == (0, 0, 0, 0)
    assert (stats.num_swapped, stats.num_used_host_blocks) == (0, 0)
    assert not engine.has_unfinished_requests()
    engine.scheduler.block_manager.check_integrity()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("case", ["single", "speculation", "groups", "forms"])
def test_an_interrupt_at_any_line(
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
    llm.llm_engine._settled = False  # as after an interrupt: without cached prefixes, which would change the places
    with Places() as places:
        assert results(generate(llm, prompts, params)) == expected
    stats = llm.llm_engine.stats()
    assert (stats.num_swaps > 0) == (case == "groups") and (stats.num_recomputes > 0) == (case != "groups")
    assert (0 < stats.num_accepted_tokens < stats.num_proposed_tokens) == (case in ("speculation", "forms"))
    numbers = chosen(places.seen)
    assert len(numbers) > 300
    for at in numbers:
        with Places(at), pytest.raises(KeyboardInterrupt) as interrupt:
            llm.llm_engine._settled = False
            generate(llm, prompts, params)
        in_clean_up = any(entry.name == "_abort_all" for entry in interrupt.traceback)
        if in_clean_up or at % 5 == 0:
            assert results(generate(llm, prompts, params)) == expected, places.seen[at - 1]
        expect_nothing_left(llm)
    assert results(generate(llm, prompts, params)) == expected


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
    names = {"LLMEngine.queue_request", "Scheduler.add", "Scheduler.schedule", "LLMEngine._append_tokens"}
    names |= {"Request.add_tokens", "Completion.add_token"}
    assert names <= {name for name, _ in places.seen}
    firsts = [places.seen.index(place) + 1 for place in set(places.seen) if place[0] in names]
    assert len(firsts) > 40
    for at in sorted(firsts)[::4]:
        second, num_in_clean_up = 1, 10**9
        while second <= num_in_clean_up:
            interrupts.append(Places(second))
            [places] = interrupts
            with Places(at), pytest.raises(KeyboardInterrupt):
                generate(llm)
            num_in_clean_up = 10**9 if places.count == second else places.count
            second += 3
            if second % 2:
                assert results(generate(llm)) == expected
                expect_nothing_left(llm)
    assert results(generate(llm)) == expected


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_an_interrupted_engine_goes_on(
    llama: Checkpoint, get_repeater: Callable[[str], Checkpoint], speculation: str | None
) -> None:
    """Without an abort: at whatever place a step or a call was interrupted, every output is as if it had not been."""
    checkpoint = get_repeater("qwen3") if speculation else llama
    llm = LLM(checkpoint.path, speculation=speculation, **SMALL)
    engine = llm.llm_engine
    prompts, lengths = checkpoint.prompts[:4], (9, 6, 8, 7) if speculation else (7, 3, 5, 4)

    def run(places: Places) -> dict[str, list[int]]:
        finished: dict[str, list[int]] = {}
        added = 0
        with places:
            for _ in range(60):
                if len(finished) == 4:
                    break
                try:
                    if added < 4:
                        params = SamplingParams(temperature=0, max_tokens=lengths[added], ignore_eos=True)
                        engine.add_request(str(added), sampling_params=params, prompt_token_ids=prompts[added])
                        added += 1
                    for output in engine.step():
                        if output.finished:
                            finished[output.request_id] = output.outputs[0].token_ids
                except KeyboardInterrupt:
                    engine.has_unfinished_requests()  # settles
                    unfinished = engine._requests.keys()
                    if str(added) in unfinished:  # it came in before the interrupt
                        added += 1
                    # The outputs of a step are lost if the interrupt comes when it is all over but for their return.
                    for i in range(added):
                        if str(i) not in unfinished and str(i) not in finished:
                            finished[str(i)] = checkpoint.expected[i][: lengths[i]]
        assert not engine.has_unfinished_requests()
        expect_nothing_left(llm)
        return finished

    places = Places()
    expected = {str(i): checkpoint.expected[i][:length] for i, length in enumerate(lengths)}
    assert run(places) == expected
    assert (engine.stats().num_accepted_tokens > 0) == (speculation is not None)
    for at in chosen(places.seen):
        assert run(Places(at)) == expected


def test_an_interrupt_amid_modes_of_torch(llama: Checkpoint) -> None:
    """Of a step that captures a graph: no mode outlives it, though its traceback does, and it comes again."""
    engine, prompt = LLM(llama.path, enable_prefix_caching=False).llm_engine, llama.prompts[5]
    graphs = engine.model_runner._graphs
    assert graphs is not None

    def run(places: Places) -> bool:
        graphs._graphs.clear()
        engine.add_request("a", None, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), prompt)
        engine.step()
        interrupts = []
        with places:
            try:
                engine.step()
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        assert _python_dispatch._get_current_dispatch_mode() is None
        assert token_ids([finish_all(engine)["a"][-1]]) == [llama.expected[5][:4]]
        return interrupts != []

    run(Places())  # torch does some things once
    places = Places(files=MODES)
    run(places)
    for name in ("_Capture.__enter__", "_Capture.__exit__", "TorchDispatchMode.__exit__", "CPUGraph.replay"):
        assert any(seen.endswith(name) for seen, _ in places.seen), name
    numbers = chosen(places.seen)
    # After one within `TorchDispatchMode.__enter__` that takes a line or two less.
    assert sum(run(Places(at, MODES)) for at in numbers) > 0.9 * len(numbers) > 50


@pytest.mark.timeout(method="thread")  # the signal of the other method is the one that the test sends
def test_real_signals(llm: LLM) -> None:
    """Between lines and within calls, at times spread over the whole of a call."""
    expected = results(generate(llm))
    started = time.perf_counter()
    generate(llm)
    seconds = time.perf_counter() - started
    hits = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i * seconds / 60)
                generate(llm)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            assert results(generate(llm)) == expected
            expect_nothing_left(llm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits > 10


def test_a_request_of_somebody_else_survives(llm: LLM, llama: Checkpoint) -> None:
    """It is computed anew where that was interrupted; its id, chosen as badly as can be, is not aborted for it."""
    engine = llm.llm_engine
    engine.add_request("llm-1", "the mat", SamplingParams(temperature=0, max_tokens=9))
    alone = finish_all(engine)["llm-1"][-1]
    engine.add_request("llm-1", "the mat", SamplingParams(temperature=0, max_tokens=9))
    with pytest.raises(ValueError, match=r"^prompt 1 of 3: request_id: 'llm-1' is taken"):
        generate(llm)
    assert engine.has_unfinished_requests()
    with Places() as places:
        generate(llm)  # and it is finished on the way
    engine.add_request("x", "the mat", SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    in_schedule = next(i for i, (name, _) in enumerate(places.seen, 1) if name.endswith("Scheduler._add_to_batch"))
    with Places(in_schedule + 2), pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert results([finish_all(engine)["x"][-1]]) == results([alone])

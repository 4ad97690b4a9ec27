"""Conversations on simulated replicas: real routers, engines, schedulers and block managers, on a clock of our own.

`python tests/serving/chat_simulation.py` prints what share of the prompts the caches had, and the seconds to the first
token, with one replica that is as large and as fast as four, and with four whose requests are routed.
"""

import heapq
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple, Protocol

from async_runs import FAKE_TOKEN, fake_execute

from pagedattn_serve.async_engine.router import Router
from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.loading.generation_config import GenerationDefaults
from pagedattn_serve.requests.inputs import InputProcessor
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.scheduler import Scheduler

sys.path.append(str(Path(__file__).parent / "scheduling"))

from fake_engine import EngineWithoutModel

NUM_REPLICAS = 4
NUM_BLOCKS = 1200  # of a replica, for 38 of the conversations below with all that is said in them
STEP_SECONDS = 0.005
TOKEN_SECONDS = 0.0005
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 4096


class Routing(Protocol):
    """What `Router` does."""

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int: ...
    def begin(self, key: int) -> None: ...
    def end(self, key: int) -> None: ...


class RandomRouting:
    def __init__(self) -> None:
        self._random = Random(0)

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int:
        return self._random.randrange(NUM_REPLICAS)

    def begin(self, key: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass


def make_router(num_replicas: int = NUM_REPLICAS) -> Router:
    router = Router(Random(0))
    for replica in range(num_replicas):
        router.start(replica, NUM_BLOCKS * 16 * NUM_REPLICAS // num_replicas)
    return router


class NoModel:
    """In the place of a ModelRunner: the same token for all. num_tokens: of the last step."""

    can_run_again = True

    def execute(self, batch: ScheduledBatch) -> Any:
        self.num_tokens = batch.num_tokens
        return fake_execute(batch)


class Replica:
    """speed: how many ordinary replicas it is worth."""

    def __init__(self, speed: int) -> None:
        scheduler_config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64 * speed,
            max_num_batched_tokens=MAX_MODEL_LEN,  # no prompt is long: the pace of long ones follows a real clock
            preemption_mode="recompute",
        )
        inputs = InputProcessor(None, VOCAB_SIZE, MAX_MODEL_LEN, frozenset(), GenerationDefaults(SamplingParams()))
        scheduler = Scheduler(scheduler_config, CacheConfig(num_blocks=NUM_BLOCKS * speed))
        self.runner = NoModel()
        self.engine = EngineWithoutModel(self.runner, scheduler, inputs)
        self.speed = speed
        self.is_stepping = False


@dataclass
class Conversation:
    """tokens: so far. turns: the lengths of the questions and answers to come, and the seconds before each question."""

    tokens: list[int]
    turns: list[tuple[int, int, float]]


class Result(NamedTuple):
    """hit_share: of the tokens of all prompts, those that were found in a cache. waits: seconds to the first token of
    each request, in rising order."""

    hit_share: float
    waits: list[float]


def make_conversations(random: Random) -> list[Conversation]:
    """150 conversations of 2 to 8 turns, which begin within 40 seconds, with one of six system prompts each."""
    systems = [[random.randrange(VOCAB_SIZE) for _ in range(random.randrange(100, 800))] for _ in range(6)]
    conversations = []
    for _ in range(150):
        lengths = [(random.randrange(20, 200), random.randrange(20, 150)) for _ in range(random.randrange(2, 9))]
        turns = [(question, answer, random.expovariate(1 / 4)) for question, answer in lengths]
        turns[0] = (*lengths[0], random.uniform(0, 40))
        conversations.append(Conversation(list(systems[min(int(random.expovariate(0.7)), 5)]), turns))
    return conversations


class Simulation:
    """Discrete events: a turn of a conversation begins, or a step of a replica ends."""

    def __init__(self, routing: Routing, num_replicas: int, seed: int) -> None:
        self._random = Random(seed)
        self._routing = routing
        self._replicas = [Replica(NUM_REPLICAS // num_replicas) for _ in range(num_replicas)]
        self._keys, self._order = count(), count()
        self._events: list[tuple[float, int, Any]] = []
        self._asked: dict[str, tuple[Conversation, int, float]] = {}  # by request id; length of the answer, and when
        self._waits: dict[str, float] = {}

    def run(self) -> Result:
        for conversation in make_conversations(self._random):
            self._plan(0.0, conversation)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Conversation):
                self._ask(now, event)
            else:
                self._take(now, *event)
        stats = [replica.engine.stats() for replica in self._replicas]
        num_found = sum(each.num_found_tokens for each in stats)
        return Result(num_found / sum(each.num_looked_up_tokens for each in stats), sorted(self._waits.values()))

    def _plan(self, now: float, conversation: Conversation) -> None:
        if conversation.turns:
            heapq.heappush(self._events, (now + conversation.turns[0][2], next(self._order), conversation))

    def _ask(self, now: float, conversation: Conversation) -> None:
        num_question, num_answer, _ = conversation.turns.pop(0)
        conversation.tokens += [self._random.randrange(VOCAB_SIZE) for _ in range(num_question)]
        key = next(self._keys)
        replica = self._replicas[self._routing.add(key, conversation.tokens, "")]
        params = SamplingParams(
            temperature=0, max_tokens=num_answer, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        replica.engine.add_request(str(key), None, params, list(conversation.tokens))
        self._asked[str(key)] = conversation, num_answer, now
        self._step(now, replica)

    def _step(self, now: float, replica: Replica) -> None:
        if not replica.is_stepping and replica.engine.has_unfinished_requests():
            replica.is_stepping = True
            outputs = replica.engine.step()
            seconds = STEP_SECONDS + TOKEN_SECONDS * replica.runner.num_tokens / replica.speed
            heapq.heappush(self._events, (now + seconds, next(self._order), (replica, outputs)))

    def _take(self, now: float, replica: Replica, outputs: list[Any]) -> None:
        for output in outputs:
            conversation, num_answer, asked = self._asked[output.request_id]
            self._waits.setdefault(output.request_id, now - asked)
            self._routing.begin(int(output.request_id))
            if output.finished:
                self._routing.end(int(output.request_id))
                conversation.tokens += [FAKE_TOKEN] * num_answer
                self._plan(now, conversation)
        replica.is_stepping = False
        self._step(now, replica)


def simulate(seed: int = 0) -> dict[str, Result]:
    """The same conversations with one large replica, with four and a `Router`, and with four by chance."""
    return {
        "one as large as four": Simulation(make_router(1), 1, seed).run(),
        "by prefix": Simulation(make_router(), NUM_REPLICAS, seed).run(),
        "by chance": Simulation(RandomRouting(), NUM_REPLICAS, seed).run(),
    }


if __name__ == "__main__":
    runs = [simulate(seed) for seed in range(8)]
    for name in runs[0]:
        shares = [run[name].hit_share for run in runs]
        waits = sorted(wait for run in runs for wait in run[name].waits)
        late = waits[int(0.95 * len(waits))]
        print(
            f"{name:20} found {mean(shares):.1%}; to the first token {mean(waits):.3f} s, 95th percentile {late:.3f} s"
        )
    ratios = [run["by prefix"].hit_share / run["one as large as four"].hit_share for run in runs]
    print(f"by prefix, of one as large as four: {min(ratios):.1%} to {max(ratios):.1%}")

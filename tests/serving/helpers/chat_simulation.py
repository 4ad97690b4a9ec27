"""Conversations on simulated replicas: real routers, schedulers and block managers, on the clock of `simulation`.

`python tests/serving/helpers/chat_simulation.py` prints what share of the prompts the caches had, and the seconds to
the first token, with one replica that is as large and as fast as four, and with four whose requests are routed.
"""

from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import NamedTuple

from pagedattn_serve.async_engine.router import Router
from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.simulator import Routing, Simulator
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.workload import SimulatedRequest

NUM_REPLICAS = 4
NUM_BLOCKS = 1200  # of a replica, for 38 of the conversations below with all that is said in them
STEP_SECONDS = 0.005
TOKEN_SECONDS = 0.0005
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 4096


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


def make_replica(speed: int) -> PagedSystem:
    """speed: how many ordinary replicas it is worth."""
    scheduler_config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64 * speed,
        max_num_batched_tokens=MAX_MODEL_LEN,
        preemption_mode="recompute",
    )
    return PagedSystem(scheduler_config, CacheConfig(num_blocks=NUM_BLOCKS * speed))


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


class Chats:
    """The turns of all conversations, each as soon as its question is written."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._conversations: dict[SimulatedRequest, Conversation] = {}  # by their running turn
        self.waits: list[float] = []

    def begin(self) -> list[SimulatedRequest]:
        """The first turns, in order of arrival."""
        first = [self._ask(0.0, conversation) for conversation in make_conversations(self._random)]
        return sorted(first, key=lambda request: request.arrival)

    def follow_up(self, request: SimulatedRequest) -> SimulatedRequest | None:
        """The next turn after an answer, if there is one."""
        assert request.first_token is not None and request.finished is not None
        self.waits.append(request.first_token - request.arrival)
        conversation = self._conversations.pop(request)
        conversation.tokens += request.output_token_ids
        return self._ask(request.finished, conversation) if conversation.turns else None

    def _ask(self, now: float, conversation: Conversation) -> SimulatedRequest:
        num_question, num_answer, seconds = conversation.turns.pop(0)
        conversation.tokens += [self._random.randrange(VOCAB_SIZE) for _ in range(num_question)]
        request = SimulatedRequest(now + seconds, list(conversation.tokens), num_answer)
        self._conversations[request] = conversation
        return request


def run(routing: Routing, num_replicas: int, seed: int) -> Result:
    speed = NUM_REPLICAS // num_replicas
    replicas = [make_replica(speed) for _ in range(num_replicas)]

    def seconds_of(work: StepWork) -> float:
        return STEP_SECONDS + TOKEN_SECONDS * work.num_tokens / speed

    chats = Chats(seed)
    summary = Simulator(replicas, routing, seconds_of).run(chats.begin(), chats.follow_up)
    return Result(summary.found, sorted(chats.waits))


def simulate(seed: int = 0) -> dict[str, Result]:
    """The same conversations with one large replica, with four and a `Router`, and with four by chance."""
    return {
        "one as large as four": run(make_router(1), 1, seed),
        "by prefix": run(make_router(), NUM_REPLICAS, seed),
        "by chance": run(RandomRouting(), NUM_REPLICAS, seed),
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

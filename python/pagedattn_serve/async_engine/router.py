"""Which of several replicas gets a request: one that has the beginning of the prompt in its cache, if it has time."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from pagedattn_serve.requests.inputs import Prompt, without_array

PIECE_TOKENS = 64  # a prompt is compared with earlier prompts in pieces of so many tokens
CHARACTERS_A_TOKEN = 4  # of a text, about
# Of 1, 2, 3, 5 and of 0 to 128, these serve the conversations of tests/serving/helpers/chat_simulation.py best.
COMPUTE_WEIGHT = 3
RUNNING_TOKENS = 64


class Pieces(NamedTuple):
    """A prompt as the router sees it. hashes: of each whole piece and of all that stands before the piece."""

    hashes: list[int]
    num_tokens: int


class Router:
    """Chooses replicas, and keeps account of what each replica has to do and has probably cached.

    A request goes to the replica where it costs the fewest tokens:

        COMPUTE_WEIGHT * tokens of the prompt that the replica would have to compute
        + tokens that the replica has to compute already, of requests without a first output
        + RUNNING_TOKENS for each request that is there

    The terms without the weight are the time to the first token as Mooncake estimates it (Qin et al., 2024, algorithm
    1), in tokens, and the batch that a newcomer shares its steps with. The weight is there because a token that is
    computed again delays not this request alone, but also all that come after it. Where no replica knows the prompt,
    the replica is the cheaper one of two that are drawn at random (Mitzenmacher, 2001), so that idle replicas take
    turns.

    What a replica has cached is what was sent there, least recently used pieces forgotten once all pieces together
    are larger than the replica's cache. Outputs do not count, so the next turn of a conversation goes where the turn
    before went, but seems to cost the last answer again. Prompts with different salts have no piece in common, nor
    have a text and its token ids.

    Args:
        random: draws the replicas to choose from. Not secret.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._replicas: dict[int, _Replica] = {}
        self._replica_of: dict[int, _Replica] = {}  # by key of unfinished requests

    def start(self, replica: int, num_cache_tokens: int) -> None:
        """A replica starts, with nothing in its cache, and no request."""
        self._replicas[replica] = _Replica(replica, num_cache_tokens // PIECE_TOKENS)

    def suspend(self, replica: int) -> None:
        """Until `resume`, the replica gets no request that another one can have."""
        self._replicas[replica].is_suspended = True

    def resume(self, replica: int) -> None:
        self._replicas[replica].is_suspended = False

    def forget(self, replica: int) -> None:
        """A replica has ended, and its requests with it."""
        del self._replicas[replica]
        for key in self.keys_of(replica):
            del self._replica_of[key]

    def add(self, key: int, prompt: Prompt, cache_salt: str) -> int:
        """Choose the replica of a request, and count the request there until `end`. There has to be a replica."""
        pieces = split(prompt, cache_salt)
        replicas = [each for each in self._replicas.values() if not each.is_suspended] or [*self._replicas.values()]
        first = pieces.hashes[0] if pieces.hashes else None
        cached = {each.index: each.num_cached_tokens(pieces) for each in replicas if first in each.pieces}
        if not cached:
            replicas = self._random.sample(replicas, min(2, len(replicas)))
        else:
            self._random.shuffle(replicas)  # so that equal ones take turns
        num_to_compute = {each.index: pieces.num_tokens - cached.get(each.index, 0) for each in replicas}
        chosen = min(replicas, key=lambda each: each.load + COMPUTE_WEIGHT * num_to_compute[each.index])
        chosen.add(key, pieces, num_to_compute[chosen.index])
        self._replica_of[key] = chosen
        return chosen.index

    def replica_of(self, key: int) -> int:
        """The replica of an unfinished request. KeyError if the request is not known."""
        return self._replica_of[key].index

    def keys_of(self, replica: int) -> list[int]:
        """The unfinished requests of a replica."""
        return [key for key, each in self._replica_of.items() if each.index == replica]

    def begin(self, key: int) -> None:
        """The request has its first output, or another one."""
        if (replica := self._replica_of.get(key)) is not None:
            replica.begin(key)

    def end(self, key: int) -> None:
        """The request is over."""
        if (replica := self._replica_of.pop(key, None)) is not None:
            replica.end(key)


@dataclass(slots=True)
class _Replica:
    """max_pieces: in its cache. pieces: in the cache, the least recently used one first. to_compute: tokens of each
    request without an output, by key. load: what it has to do, in tokens. is_suspended: whether others go before it."""

    index: int
    max_pieces: int
    pieces: OrderedDict[int, None] = field(default_factory=OrderedDict)
    to_compute: dict[int, int] = field(default_factory=dict)
    load: int = 0
    is_suspended: bool = False

    def num_cached_tokens(self, pieces: Pieces) -> int:
        count = 0
        for piece in pieces.hashes:
            if piece not in self.pieces:
                break
            count += 1
        return count * PIECE_TOKENS

    def add(self, key: int, pieces: Pieces, num_to_compute: int) -> None:
        self.to_compute[key] = num_to_compute
        self.load += num_to_compute + RUNNING_TOKENS
        for piece in reversed(pieces.hashes):  # the end of a prompt is forgotten before its beginning
            self.pieces[piece] = None
            self.pieces.move_to_end(piece)
        while len(self.pieces) > self.max_pieces:
            self.pieces.popitem(last=False)

    def begin(self, key: int) -> None:
        self.load -= self.to_compute.pop(key, 0)

    def end(self, key: int) -> None:
        self.begin(key)
        self.load -= RUNNING_TOKENS


def split(prompt: Prompt, cache_salt: str) -> Pieces:
    """The pieces of a prompt. A prompt that is no prompt has none, nor has one whose salt is no text: the engine will
    say what is wrong with it."""
    if isinstance(prompt, dict):
        cache_salt = cache_salt or prompt.get("cache_salt", "")
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    content: Sequence[Any] = ()
    size = PIECE_TOKENS
    if isinstance(prompt, str):
        content, size = prompt, PIECE_TOKENS * CHARACTERS_A_TOKEN
    elif isinstance(token_ids := without_array(prompt), list | tuple):
        content = tuple(token_ids)
    hashes: list[int] = []
    try:
        last = hash(cache_salt)
        for begin in range(0, len(content) - size + 1, size):
            last = hash((last, content[begin : begin + size]))
            hashes.append(last)
    except TypeError:  # token ids that are no numbers, or a salt that is no text
        hashes.clear()
    return Pieces(hashes, len(content) * PIECE_TOKENS // size)

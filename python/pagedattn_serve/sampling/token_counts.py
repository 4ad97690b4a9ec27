"""How often a list that only grows has each of its tokens, without looking at a token twice."""

from array import array
from typing import Self


class TokenCounts:
    """token_ids, counts: each token id once, and how often it is in the list; int64, in one order."""

    __slots__ = ("_num_counted", "_places", "counts", "token_ids")

    def __init__(self) -> None:
        self.token_ids, self.counts = array("q"), array("q")
        self._places: dict[int, int] = {}  # of token ids in the two
        self._num_counted = 0

    def extend(self, token_ids: list[int]) -> None:
        """Count what is new in the list since the last call. After an interrupt amid this, the counts are wrong."""
        for token_id in token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
        self._num_counted = len(token_ids)

    def copy(self) -> Self:
        other = type(self)()
        other.token_ids, other.counts = self.token_ids[:], self.counts[:]
        other._places, other._num_counted = self._places.copy(), self._num_counted
        return other

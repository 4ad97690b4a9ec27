"""Guesses at how a sequence goes on: as it went on the last time that it said the same. No second model.

This is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; "ngram" in vLLM). It looks
for the last tokens earlier in prompt and output. LLMA (Yang et al. 2023, "Inference with Reference: Lossless
Acceleration of Large Language Models") looks in given texts. The model verifies the guesses (Leviathan et al., ICML
2023).
"""

from pagedattn_serve.scheduling.sequence import Sequence

# How many tokens have to recur. With 2, there is a guess at every tenth step of the demo model's ordinary output, and
# most guesses are wrong. With 4, the beginnings of what is quoted are missed.
NGRAM_SIZE = 3


class PromptLookup:
    """Where each n-gram of a sequence was seen last, for the sequences that were asked about, keyed by identity.

    An index is made when its sequence is first asked about, and extended by the tokens that came since. So tokens may
    be added to a sequence, but none taken back.
    """

    def __init__(self) -> None:
        self._positions: dict[Sequence, dict[tuple[int, ...], int]] = {}  # of the token that followed the n-gram
        self._num_indexed: dict[Sequence, int] = {}

    def propose(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        """Up to so many tokens that may come next; none if the last NGRAM_SIZE tokens are new."""
        num_tokens = sequence.num_tokens
        positions = self._positions.setdefault(sequence, {})
        start = max(self._num_indexed.get(sequence, 0), NGRAM_SIZE)
        tokens = sequence.tokens(min(start, num_tokens) - min(NGRAM_SIZE, num_tokens), num_tokens)
        ngrams = zip(*(tokens[i:] for i in range(NGRAM_SIZE)), strict=False)
        positions.update(zip(ngrams, range(start, num_tokens), strict=False))  # all but the last, which nothing follows
        self._num_indexed[sequence] = num_tokens
        position = positions.get(tuple(tokens[-NGRAM_SIZE:]))
        if position is None:
            return []
        found = sequence.tokens(position, min(position + max_num_tokens, num_tokens))
        # A guess that reaches the sequence's end goes on with its own beginning, like a copy in LZ77: a period recurs.
        return (found * -(-max_num_tokens // len(found)))[:max_num_tokens]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence, if anything is."""
        self._positions.pop(sequence, None)
        self._num_indexed.pop(sequence, None)

    def clear(self) -> None:
        """Drop what is known of all sequences."""
        self._positions = {}
        self._num_indexed = {}

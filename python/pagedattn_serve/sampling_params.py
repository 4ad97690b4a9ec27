"""How one request wants its tokens chosen, and when to stop."""

from dataclasses import dataclass

from pagedattn_serve.config import check_float, check_int

MAX_LOGPROBS = 20  # of a token; what OpenAI's API and vLLM's default allow


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. A wrong type raises TypeError, a wrong value ValueError.

    What restricts the choice is applied in this order: temperature, min_p, top_k, top_p.

    temperature: divides the logits; 0 is greedy.
    top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this; in (0, 1].
    top_k: keep the k most likely tokens; -1 or 0 keeps all.
    seed: of this request's own random generator; None draws from the engine's.
    max_tokens: most tokens to generate; None is up to the model's length.
    stop: a text or several that end the output; kept as a tuple of non-empty strings.
    ignore_eos: go on past the end-of-sequence token.
    min_p: keep the tokens whose probability is at least this share of the most likely one's; in [0, 1].
    stop_token_ids: token ids that end the output, whatever ignore_eos says; kept as a tuple.
    logprobs: how many of the most likely tokens to report at each position, beside the sampled one, with their log
        probabilities; at most MAX_LOGPROBS. 0 reports the sampled one alone, None nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | list[str] | tuple[str, ...] | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature}")
        check_float("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        check_int("top_k", self.top_k, -1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)  # what torch.Generator.manual_seed takes
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        object.__setattr__(self, "stop", _stop_strings(self.stop))  # frozen: written here and never again
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        check_float("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a number in [0, 1], got {self.min_p}")
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no randomness."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` with the type it has after construction; empty if there is none."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` with the type it has after construction; empty if there is none."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple):
        raise TypeError(f"stop: expected a string or a list of strings, got {stop!r} of type {type(stop).__name__}")
    for text in stop:
        if not isinstance(text, str):
            raise TypeError(f"stop: expected strings, got {text!r} of type {type(text).__name__}")
        if not text:
            raise ValueError(f"stop: expected non-empty strings, got {list(stop)}")
    return tuple(stop)


def _stop_ids(stop_token_ids: object) -> tuple[int, ...]:
    if stop_token_ids is None:
        return ()
    if not isinstance(stop_token_ids, list | tuple):
        kind = type(stop_token_ids).__name__
        raise TypeError(f"stop_token_ids: expected a list of token ids, got {stop_token_ids!r} of type {kind}")
    for token_id in stop_token_ids:
        check_int("stop_token_ids", token_id, 0)
    return tuple(stop_token_ids)

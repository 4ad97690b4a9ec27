"""How one request wants its tokens chosen, and when to stop."""

from dataclasses import dataclass

from pagedattn_serve.config import check_float, check_int


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. A wrong type raises TypeError, a wrong value ValueError.

    temperature: divides the logits; 0 is greedy.
    top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this; in (0, 1].
    top_k: keep the k most likely tokens; -1 or 0 keeps all.
    seed: of this request's own random generator; None draws from the engine's.
    max_tokens: most tokens to generate; None is up to the model's length.
    stop: a text or several that end the output; kept as a tuple of non-empty strings.
    ignore_eos: go on past the end-of-sequence token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | list[str] | tuple[str, ...] | None = None
    ignore_eos: bool = False

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
        object.__setattr__(self, "stop", _as_tuple(self.stop))  # frozen: the one write after construction
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no randomness."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` with the type it has after construction; empty if there is none."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _as_tuple(stop: object) -> tuple[str, ...]:
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

"""How one request wants its tokens chosen, and when to stop."""

import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, Self

from pagedattn_serve.config import check_bool, check_float, check_int, check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, shown
from pagedattn_serve.structured_output import StructuredOutput
from pagedattn_serve.vllm_arguments import sampling_arguments, takes_arguments_of_vllm

MAX_LOGPROBS = 20  # of a token; the limit of OpenAI's API and vLLM's default
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's limit
_MAX_PENALTY = 2  # of presence and frequency penalty, either sign; OpenAI's limit
_MAX_BIAS = 100  # of logit_bias, either sign; OpenAI's limit
# Beyond these limits, logits in fp32 could overflow, or become zeros.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
_MAX_TEMPERATURE = 1e9


class RequestOutputKind(Enum):
    """What the outputs of a request hold. Names and meanings are vLLM's.

    CUMULATIVE: each output has all that there is so far.
    DELTA: each output has the text, token_ids and logprobs that are new since the output before. The first output alone
        has prompt_logprobs.
    FINAL_ONLY: there is one output, when the request is finished.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@takes_arguments_of_vllm(sampling_arguments)
@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. A wrong type raises TypeError, a wrong value ValueError.

    Names and meanings are vLLM's. Arguments go by name, because the order of vLLM's has changed. Parameters change the
    logits in this order: logits_processors; the masks allowed_token_ids, bad_words, min_tokens and structured_output;
    logit_bias; repetition, frequency and presence penalty; temperature; min_p, top_k, top_p. Reported logprobs and
    their sum are of the logits before all changes.

    temperature: divides the logits; 0 is greedy; at most 1e9, where all tokens are equally likely.
    top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this, and all that are as
        likely as the last; in (0, 1].
    top_k: keep the k most likely tokens, and all that are as likely as the k-th; 1 keeps the first of the most likely.
        -1 or 0 keeps all.
    seed: seed of a random generator for this request; None uses the engine's generator.
    max_tokens: most tokens to generate; None leaves it to the model's length.
    stop: a text or several texts that end the output; kept as a tuple of non-empty strings. They may name special
        tokens, which end the output even if skip_special_tokens leaves them out of the text.
    ignore_eos: go on past the end-of-sequence token.
    min_p: keep the tokens whose probability is at least this share of the most likely one's; in [0, 1].
    stop_token_ids: token ids that end the output, whatever ignore_eos says; kept as a tuple.
    logprobs: how many of the most likely tokens to report at each position with their log probabilities, at most
        MAX_LOGPROBS. The sampled token is reported, too. None reports nothing.
    n: how many outputs to return.
    best_of: how many outputs to generate: the n of highest cumulative_logprob are returned. With use_beam_search, the
        width of the beam. None is n.
    use_beam_search: search for the most likely outputs instead of drawing tokens. temperature must be 0, and top_p,
        top_k and min_p must leave all tokens.
    length_penalty: of beam search, which ranks by cumulative logprob / length ** length_penalty.
    early_stopping: True ends beam search when best_of outputs are finished, False when a better output is unlikely,
        "never" when a better output is impossible (as in Hugging Face).
    presence_penalty: subtracted from the logit of each token in the output so far; in [-2, 2], as OpenAI's.
    frequency_penalty: the same for each time that the token is in the output so far; in [-2, 2], as OpenAI's.
    repetition_penalty: divides the positive logits of the tokens in the prompt or the output so far, and multiplies
        their negative logits; in [0.001, 1000], as CTRL's.
    include_stop_str_in_output: leave the stop string at the end of the text.
    min_tokens: before this many tokens, no end-of-sequence or stop token comes, and no stop string ends the output.
    logprob_token_ids: token ids whose log probabilities to report at each position, beside the sampled token's and in
        place of the most likely ones, whatever `logprobs` says; at most MAX_LOGPROB_TOKEN_IDS, kept as a tuple. Not
        with use_beam_search.
    prompt_logprobs: as logprobs, at each position of the prompt but the first.
    logit_bias: numbers in [-100, 100] to add to the logits, a dict by token id; a key may be an int or, as in JSON, its
        digits. Kept as a tuple of pairs.
    bad_words: texts that cannot come: the last token is never generated after the tokens before it. Kept as a tuple.
    skip_special_tokens: leave special tokens out of the text.
    allowed_token_ids: the only token ids that can come, kept as a tuple; None allows all.
    logits_processors: callables f(output_token_ids, logits) or f(prompt_token_ids, output_token_ids, logits). They take
        fp32 logits [vocab_size], may write to them, and return the new logits. Kept as a tuple.
    detokenize: whether the output has a text.
    output_kind: what each RequestOutput holds. With best_of above n, or use_beam_search, only the end tells which
        outputs there are: such a request has one RequestOutput, as with FINAL_ONLY.
    structured_output: a form that the output follows: only tokens that the form allows can come, and at the end of the
        form only an end-of-sequence token. Whatever else ends the output may cut the form short. Not with
        use_beam_search or ignore_eos.
    reports_logprobs: not an argument: whether logprobs or logprob_token_ids ask for some.
    changes_logits: not an argument: whether anything but structured_output changes the logits before the temperature.

    vLLM's structured_outputs is structured_output. Another argument of vLLM's may be given if its value means what
    happens here anyway.
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
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    logits_processors: list[Callable[..., Any]] | tuple[Callable[..., Any], ...] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_output: StructuredOutput | None = None
    logprob_token_ids: list[int] | tuple[int, ...] | None = None
    reports_logprobs: bool = field(init=False, repr=False, compare=False)
    changes_logits: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0, _MAX_TEMPERATURE)
        check_float("top_p", self.top_p, 0, 1, but=0)
        check_int("top_k", self.top_k, -1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)  # what torch.Generator.manual_seed takes
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        self._keep("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        check_bool("ignore_eos", self.ignore_eos)
        check_float("min_p", self.min_p, 0, 1)
        self._keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._keep("logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids))
        if len(self.token_ids_to_report) > MAX_LOGPROB_TOKEN_IDS:
            expected = f"at most {MAX_LOGPROB_TOKEN_IDS} token ids"
            raise ArgumentError("logprob_token_ids", expected, len(self.token_ids_to_report))
        self._keep("reports_logprobs", self.logprobs is not None or bool(self.token_ids_to_report))
        check_float("presence_penalty", self.presence_penalty, -_MAX_PENALTY, _MAX_PENALTY)
        check_float("frequency_penalty", self.frequency_penalty, -_MAX_PENALTY, _MAX_PENALTY)
        check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            expected = f"an int <= max_tokens, which is {shown(self.max_tokens)}"
            raise ArgumentError("min_tokens", expected, self.min_tokens)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._keep("logit_bias", _logit_bias(self.logit_bias))
        self._keep("bad_words", _strings("bad_words", self.bad_words))
        check_bool("skip_special_tokens", self.skip_special_tokens)
        if self.allowed_token_ids is not None:
            self._keep("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ArgumentError("allowed_token_ids", "one token id at least, or None for all", "none")
        self._keep("logits_processors", _processors(self.logits_processors))
        if not check_bool("detokenize", self.detokenize) and self.stop:
            raise ArgumentError("detokenize", f"True, as stop strings {self.stop} are looked for in the text")
        if not isinstance(self.output_kind, RequestOutputKind):
            kind = type(self.output_kind).__name__
            raise ArgumentTypeError("output_kind", "a RequestOutputKind", f"{shown(self.output_kind)} of type {kind}")
        self._check_sequences()
        self._check_structured_output()
        self._keep(
            "changes_logits",
            bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.min_tokens)
            or bool(self.logit_bias or self.bad_words or self.allowed_token_ids or self.logits_processors),
        )

    def _check_sequences(self) -> None:
        """n, best_of and beam search, and what can be said beside them."""
        check_int("n", self.n, 1)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1)
            if self.best_of < self.n:
                raise ArgumentError("best_of", f"an int >= n, which is {shown(self.n)}", self.best_of)
        check_float("length_penalty", self.length_penalty)
        is_never = isinstance(self.early_stopping, str) and self.early_stopping == "never"
        if not is_never and not isinstance(self.early_stopping, bool):
            kind = type(self.early_stopping).__name__
            error = ArgumentError if isinstance(self.early_stopping, str) else ArgumentTypeError
            raise error("early_stopping", 'True, False or "never"', f"{shown(self.early_stopping)} of type {kind}")
        if check_bool("use_beam_search", self.use_beam_search):
            if self.token_ids_to_report:
                raise ArgumentError("logprob_token_ids", "none with use_beam_search", list(self.token_ids_to_report))
            if not self.greedy:
                raise ArgumentError("temperature", "0, as use_beam_search draws nothing", self.temperature)
            for name, default in (("top_p", (1,)), ("top_k", (-1, 0)), ("min_p", (0,))):
                if getattr(self, name) not in default:
                    raise ArgumentError(name, f"{default[0]}, as use_beam_search draws nothing", getattr(self, name))
            if self.beam_width < 2:
                raise ArgumentError(
                    "best_of",
                    "a beam width of 2 at least with use_beam_search, as one of width 1 is greedy "
                    "(use_beam_search=False, temperature=0)",
                    "1",
                )
            return
        if self.length_penalty != 1:
            raise ArgumentError("length_penalty", "1 without use_beam_search", self.length_penalty)
        if self.early_stopping is not False:
            raise ArgumentError("early_stopping", "False without use_beam_search", repr(self.early_stopping))

    def _check_structured_output(self) -> None:
        if self.structured_output is None:
            return
        if not isinstance(self.structured_output, StructuredOutput):
            kind = type(self.structured_output).__name__
            raise ArgumentTypeError("structured_output", "StructuredOutput", kind)
        if self.use_beam_search:
            raise ArgumentError("use_beam_search", "False beside structured_output", "True")
        if self.ignore_eos:
            raise ArgumentError("ignore_eos", "False beside structured_output, which ends with that token", "True")

    @classmethod
    def from_optional(cls, **params: Any) -> Self:
        """Parameters of which some may be None, for the default. max_tokens=None is no default: it sets no limit."""
        return cls(**{name: value for name, value in params.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        """A copy. It cannot be changed: `dataclasses.replace` makes parameters that differ in some."""
        return copy(self)

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: written at construction and never again

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no randomness."""
        return self.temperature == 0

    # Five of the fields, with the types that they have after construction:
    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    @property
    def token_ids_to_report(self) -> tuple[int, ...]:
        """Empty if there are no logprob_token_ids."""
        assert isinstance(self.logprob_token_ids, tuple)
        return self.logprob_token_ids

    @property
    def num_most_likely(self) -> int:
        """How many of the most likely tokens the logprobs of a position have."""
        return 0 if self.logprob_token_ids else self.logprobs or 0

    @property
    def bias_of_token_ids(self) -> tuple[tuple[int, float], ...]:
        """Empty if there is no logit_bias."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def num_sequences(self) -> int:
        """How many sequences to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beam_width(self) -> int:
        """How many sequences beam search goes on with at each step; of no meaning without use_beam_search."""
        return self.num_sequences

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError if the parameters name tokens that the model lacks, or allow more than there are."""
        num_allowed = len(self.allowed_token_ids or ())
        if num_allowed > vocab_size:
            raise ArgumentError("allowed_token_ids", f"at most {vocab_size} token ids, the vocabulary", num_allowed)
        for name, token_ids in (
            ("logit_bias", [token_id for token_id, _ in self.bias_of_token_ids]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.token_ids_to_report),
        ):
            for token_id in token_ids:
                check_int(name, token_id, 0, vocab_size - 1)


@dataclass(slots=True, frozen=True)
class BeamSearchParams:
    """Beam search for `LLM.beam_search`, in vLLM's words. Raises as `SamplingParams` does, which says what they mean.

    beam_width: how many sequences the search goes on with at each step, and returns.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutput | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        self.sampling_params()  # which checks all others

    def sampling_params(self) -> SamplingParams:
        """The same search as `SamplingParams`; a beam of width 1 is greedy."""
        params: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        width = params.pop("beam_width")
        if width == 1:
            del params["length_penalty"]  # there is nothing to rank
            return SamplingParams(**params)
        return SamplingParams(n=width, use_beam_search=True, early_stopping="never", **params)


@dataclass(slots=True, frozen=True)
class TokenRules:
    """The token ids that the parameters of a request give as texts, or leave to the model.

    end_token_ids: the end-of-sequence tokens, unless ignore_eos, and the stop tokens: none comes before min_tokens.
    bad_words: sequences of token ids. The last id of a sequence cannot come after the ids before it.
    """

    end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for token_id in self.end_token_ids:
            check_int("end_token_ids", token_id, 0)
        for word in self.bad_words:
            if not word:
                raise ArgumentError("bad_words", "one token id at least in each", "none")
            for token_id in word:
                check_int("bad_words", token_id, 0)


NO_RULES = TokenRules()


def takes_prompt(processor: Callable[..., Any]) -> bool:
    """Whether a logits processor takes (prompt_token_ids, output_token_ids, logits) rather than (output_token_ids,
    logits). Raises TypeError if it takes neither."""
    try:
        signature = inspect.signature(processor)
    except ValueError:  # some callables that are written in C have none
        raise ArgumentTypeError("logits_processors", "a callable with a signature", shown(processor)) from None
    for num_arguments in (2, 3):
        try:
            signature.bind(*[None] * num_arguments)
        except TypeError:
            continue
        return num_arguments == 3
    raise ArgumentTypeError(
        "logits_processors",
        "f(output_token_ids, logits) or f(prompt_token_ids, output_token_ids, logits)",
        f"{shown(processor)} with {signature}",
    )


def _items(name: str, value: object, kind: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(name, f"a list of {kind}", f"{shown(value)} of type {type(value).__name__}")
    return tuple(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    texts = _items(name, value, "strings")
    for text in texts:
        if not isinstance(text, str):
            raise ArgumentTypeError(name, "strings", f"{shown(text)} of type {type(text).__name__}")
        if not check_text(name, text):
            raise ArgumentError(name, "non-empty strings", list(texts))
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    token_ids = _items(name, value, "token ids")
    if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:  # the usual case, in a tenth of the time
        return token_ids
    for token_id in token_ids:
        check_int(name, token_id, 0)
    return token_ids


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    pairs: dict[int, float] = {}
    for pair in _items("logit_bias", value, "pairs, or a dict"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentTypeError("logit_bias", "pairs of token id and bias", shown(pair))
        token_id, bias = pair
        if isinstance(token_id, str):
            if not re.fullmatch("[0-9]{1,19}", token_id):
                raise ArgumentError("logit_bias", "token ids", repr(token_id[:100]))
            token_id = int(token_id)
        check_int("logit_bias", token_id, 0)
        check_float("logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)
        if token_id in pairs:
            raise ArgumentError("logit_bias", "each token id once", f"{shown(token_id)} twice")
        pairs[token_id] = bias
    return tuple(pairs.items())


def _processors(value: object) -> tuple[Callable[..., Any], ...]:
    processors = _items("logits_processors", value, "callables")
    for processor in processors:
        if not callable(processor):
            kind = type(processor).__name__
            raise ArgumentTypeError("logits_processors", "callables", f"{shown(processor)} of type {kind}")
        takes_prompt(processor)
    return processors

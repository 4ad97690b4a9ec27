"""What a caller says of a request: its arguments, the forms that a prompt may have, text to token ids and back."""

import threading
import time
from operator import index
from typing import Any, NamedTuple, NotRequired, TypedDict

from pagedattn_serve.config import check_bool, check_float, check_int, check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, shown
from pagedattn_serve.loading.generation_config import GenerationDefaults
from pagedattn_serve.pooling_params import Pooling, PoolingParams
from pagedattn_serve.requests.pooling import SEQUENCE_RULES, PoolingRequest
from pagedattn_serve.requests.request import BeamRequest, OutputRules, Request
from pagedattn_serve.sampling.grammar import GrammarCompiler, TokenMatcher
from pagedattn_serve.sampling.pooling import PoolingState
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams, TokenRules
from pagedattn_serve.scheduling.sequence import SequenceGroup, SequenceRules
from pagedattn_serve.text.detokenizer import TokenNames
from pagedattn_serve.text.stop_strings import SpecialStops, StopStrings
from pagedattn_serve.text.tokenizer import bad_word_ids
from pagedattn_serve.vllm_arguments import PROMPT_ARGUMENTS, refuse

# A text; token ids in a list, a tuple, or an array or tensor of one dimension; or a dict with prompt, prompt_token_ids
# or both. With both, the model runs the ids, and `RequestOutput.prompt` shows the text. A dict may also have the
# cache_salt of the request.
Prompt = Any


class RequestArgs(NamedTuple):
    """What a caller says of a request: a prompt, or its token ids, and what is to be done with the prompt.

    prompt: in one of the forms of `Prompt`.
    sampling_params: default `LLMEngine.get_default_sampling_params()`. `PoolingParams` ask for the embedding of the
        prompt, and for no output.
    arrival_time: a time of `time.monotonic()`; default now. The metrics use it, the order of service does not.
    priority: with the scheduling policy "priority", a lower number is served earlier. So that nobody waits for ever, a
        number lower by k passes only the requests that came at most k * 10,000 requests before.
    cache_salt: only requests with the same salt share cached blocks. So the time that a prompt takes tells nobody
        whether users with another salt have sent the same prompt.
    """

    request_id: str
    prompt: Prompt | None = None
    sampling_params: SamplingParams | PoolingParams | None = None
    prompt_token_ids: Any | None = None
    arrival_time: float | None = None
    priority: int = 0
    cache_salt: str = ""


class TextPrompt(TypedDict):
    """A prompt that is a text. cache_salt: as in `LLMEngine.add_request`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt that is token ids. prompt: a text for `RequestOutput.prompt`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def split_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts from one prompt, or from a list, a tuple or a two-dimensional array of prompts."""
    prompts = without_array(prompts)
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ArgumentTypeError("prompts", "a string or a list of strings", type(prompts).__name__)
    if prompts and is_int(prompts[0]):
        return [prompts]
    return list(prompts)


def text_or_ids(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """The text of a prompt, its token ids as a new list, or both. Raises TypeError, and ValueError for a wrong key."""
    if isinstance(prompt, dict):
        of_vllm = {key: value for key, value in prompt.items() if key in PROMPT_ARGUMENTS}
        refuse(of_vllm, PROMPT_ARGUMENTS, "prompt")
        keys_here = prompt.keys() - of_vllm.keys() - {"cache_salt"}
        if not keys_here or not keys_here <= {"prompt", "prompt_token_ids"}:
            keys = ", ".join(map(str, prompt)) or "none"
            raise ArgumentError("prompt", "a dict with prompt, prompt_token_ids or both", keys)
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            if "prompt" in prompt and not isinstance(text, str):
                raise ArgumentTypeError("prompt", "a string beside prompt_token_ids", type(text).__name__)
            return text, to_ids(prompt["prompt_token_ids"])
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(without_array(prompt), list | tuple):
        return None, to_ids(prompt)
    raise ArgumentTypeError("prompt", "a string, token ids or a dict", type(prompt).__name__)


def to_ids(token_ids: Any, name: str = "prompt_token_ids") -> list[int]:
    """Token ids as a new list of ints, from a list or tuple of integers, or an array or tensor of one dimension. Raises
    TypeError, which calls the token ids `name`."""
    token_ids = without_array(token_ids)
    if not isinstance(token_ids, list | tuple):
        raise ArgumentTypeError(name, "a list of token ids", type(token_ids).__name__)
    for token_id in token_ids:
        if type(token_id) is not int and not is_int(token_id):
            kind = type(token_id).__name__
            raise ArgumentTypeError(name, "an int", f"{shown(token_id)} of type {kind}")
    return list(map(index, token_ids))


def without_array(value: Any) -> Any:
    """Arrays and tensors as lists of plain numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "ndim") else value


def is_int(value: Any) -> bool:
    """Whether a value is an int of Python or numpy. A bool is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


class Texts:
    """A tokenizer for one caller at a time, because transformers does not promise that a tokenizer is thread-safe.

    tokenizer: from transformers; None if the model's directory has none. vocab_size: the model's. lock: for whoever
    calls the tokenizer beside `tokenize` and `detokenize`.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.lock = threading.Lock()
        self._num_token_ids = max(vocab_size, 0 if tokenizer is None else len(tokenizer))

    @property
    def is_busy(self) -> bool:
        """Whether a thread is in the tokenizer. Then `tokenize` and `detokenize` wait for that thread."""
        return self.lock.locked()

    def tokenize(
        self, text: str, add_special_tokens: bool = True, name: str = "text", pair: str | None = None
    ) -> list[int]:
        """`LLMEngine.tokenize`; errors call the text `name`. pair: a text that the tokenizer puts behind."""
        for each in (text, pair) if pair is not None else (text,):
            check_text(name, each)
        check_bool("add_special_tokens", add_special_tokens)
        if self.tokenizer is None:
            expected = "prompt_token_ids" if name == "prompt" else "none"
            raise ArgumentError(name, f"{expected}, as the model's directory has no tokenizer")
        with self.lock:
            given = (text,) if pair is None else (text, pair)
            return list(self.tokenizer(*given, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def detokenize(self, token_ids: Any) -> str:
        """`LLMEngine.detokenize`."""
        token_ids = to_ids(token_ids, name="token_ids")
        if self.tokenizer is None:
            raise ArgumentError("token_ids", "none, as the model's directory has no tokenizer")
        for token_id in token_ids:
            check_int("token_ids", token_id, 0, self._num_token_ids - 1)
        with self.lock:
            return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


class InputProcessor:
    """Makes requests, which the engine queues, from what callers say. For one model and its tokenizer.

    tokenizer: from transformers; None if the model's directory has none.
    pooling, embedding_size: how the model's hidden states become an embedding, or why they cannot; and how many
        elements the embedding has.
    generates: whether the model has a head, for tokens.

    Changes no request and no queue. Any thread may call its methods at any time.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        defaults: GenerationDefaults,
        pooling: Pooling | ArgumentError,
        embedding_size: int,
        generates: bool = True,
    ) -> None:
        self.defaults = defaults
        self._pooling = pooling
        self._embedding_size = embedding_size
        self._generates = generates
        self.texts = Texts(tokenizer, vocab_size)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._token_names = None if tokenizer is None else TokenNames(tokenizer)
        self._grammars: GrammarCompiler | None = None  # made for the first request with structured output

    @property
    def scores_pairs(self) -> bool:
        """Whether the model gives the score of a pair of texts, and no embeddings."""
        return isinstance(self._pooling, Pooling) and self._pooling.score_weight is not None

    def pair(self, first: Prompt, second: Prompt) -> Prompt:
        """Two texts as one prompt, as the tokenizer joins them; or the token ids of both. Raises as `prompt_tokens`."""
        (text, ids), (second_text, second_ids) = text_or_ids(first), text_or_ids(second)
        if ids is None and second_ids is None:
            assert text is not None and second_text is not None
            return {"prompt_token_ids": self.texts.tokenize(text, name="prompt", pair=second_text)}
        return {"prompt_token_ids": self.prompt_tokens(first)[1] + self.prompt_tokens(second)[1]}

    def prompt_tokens(self, prompt: Prompt | None, token_ids: Any | None = None) -> tuple[str | None, list[int]]:
        """The text of a prompt (None if it came as token ids alone) and its token ids. Raises ValueError, TypeError."""
        if (prompt is None) == (token_ids is None):
            raise ArgumentError("prompt", "either prompt or prompt_token_ids", "none" if prompt is None else "both")
        text, ids = text_or_ids(prompt) if token_ids is None else (None, to_ids(token_ids))
        if ids is None:
            assert text is not None
            ids = self.texts.tokenize(text, name="prompt")
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise ArgumentError("prompt_token_ids", f"an int in [0, {self._vocab_size - 1}]", token_id)
        return text, ids

    def make_request(self, args: RequestArgs) -> Request:
        """A request that is not queued yet. Errors are those of `LLMEngine.add_request`. The scheduler checks later
        what depends on other requests, and the length of the prompt."""
        request_id, prompt, sampling_params, prompt_token_ids, arrival_time, priority, cache_salt = args
        if not isinstance(request_id, str):
            raise ArgumentTypeError("request_id", "a string", type(request_id).__name__)
        params = self.defaults.params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams | PoolingParams):
            raise ArgumentTypeError("sampling_params", "SamplingParams", type(params).__name__)
        if isinstance(params, SamplingParams) and not self._generates:
            raise ArgumentError("model", "one with a head (lm_head), to generate", "one that gives embeddings alone")
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        check_float("arrival_time", arrival_time)
        check_int("priority", priority, -(2**31), 2**31 - 1)
        if isinstance(prompt, dict) and not cache_salt:
            cache_salt = prompt.get("cache_salt", "")
        check_text("cache_salt", cache_salt)
        text, token_ids = self.prompt_tokens(prompt, prompt_token_ids)
        if isinstance(params, PoolingParams):
            group = SequenceGroup(request_id, token_ids, SEQUENCE_RULES, arrival_time, priority)
            self._pool(group, params)
            group.sequences[0].cache_salt = cache_salt
            return PoolingRequest(text, group)
        if self._tokenizer is None and params.stop:
            raise ArgumentError("stop", "none, as the model's directory has no tokenizer")
        params.check_token_ids(self._vocab_size)
        is_default = sampling_params is None
        token_rules = self._token_rules(params, self.defaults.bad_words if is_default else ())
        max_length = self.defaults.max_length if is_default else None
        rules = self._output_rules(params, len(token_ids), max_length)
        group = SequenceGroup(request_id, token_ids, sequence_rules(params), arrival_time, priority)
        [sequence] = group.sequences
        sequence.cache_salt = cache_salt
        if params.prompt_logprobs is not None and len(token_ids) > 1:
            sequence.prompt_logits_from = 0
        sequence.sampling = SamplingState(
            params, token_ids, sequence.output_token_ids, token_rules=token_rules, matcher=self._matcher(params)
        )
        return (BeamRequest if params.use_beam_search else Request)(text, group, rules)

    def _pool(self, group: SequenceGroup, params: PoolingParams) -> None:
        """Let the one sequence of the group be pooled."""
        if isinstance(self._pooling, ArgumentError):
            raise self._pooling.at("")  # a copy: each raise adds to a traceback
        if params.dimensions is not None:
            check_int("dimensions", params.dimensions, 1, self._embedding_size)
        [sequence] = group.sequences
        sequence.pooling = PoolingState(self._pooling, params.dimensions)
        if self._pooling.mode == "mean":
            sequence.prompt_logits_from = 0

    def _token_rules(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> TokenRules:
        """bad_words: sequences of token ids beside the bad_words of `params`."""
        if params.bad_words:
            if self._tokenizer is None:
                raise ArgumentError("bad_words", "none, as the model's directory has no tokenizer")
            with self.texts.lock:
                bad_words = (*bad_words, *bad_word_ids(self._tokenizer, params.bad_word_strings))
        end_token_ids = params.stop_ids if params.ignore_eos else (*self._eos_token_ids, *params.stop_ids)
        return TokenRules(end_token_ids, bad_words)

    def _matcher(self, params: SamplingParams) -> TokenMatcher | None:
        if params.structured_output is None:
            return None
        if self._tokenizer is None:
            raise ArgumentError("structured_output", "none, as the model's directory has no tokenizer")
        with self.texts.lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._grammars.matcher(params.structured_output)

    def _output_rules(self, params: SamplingParams, num_prompt_tokens: int, max_length: int | None) -> OutputRules:
        """max_length: most tokens of prompt and output, but the output may always have one; None: the model's limit."""
        max_len = self._max_model_len
        if max_length is not None:
            max_len = min(max_len, max(max_length, num_prompt_tokens + 1))
        room = max(max_len - num_prompt_tokens, 1)  # the scheduler refuses a prompt that leaves none
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        special_stops = None
        if params.stop and self._token_names is not None:
            with self.texts.lock:
                special_texts = self._token_names.special_texts
            special_stops = SpecialStops(params.stop_strings, special_texts) or None
        return OutputRules(
            params=params,
            eos_token_ids=eos_token_ids,
            end_token_ids=eos_token_ids.union(params.stop_ids) if params.stop_ids else eos_token_ids,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_strings=StopStrings(params.stop_strings) if params.stop else None,
            special_stops=special_stops,
            token_names=self._token_names if params.detokenize else None,
        )


def sequence_rules(params: SamplingParams) -> SequenceRules:
    """The parameters that the scheduler needs."""
    return SequenceRules(
        num_sequences=params.num_sequences,
        uses_beams=params.use_beam_search,
        width_argument="n" if params.best_of is None else "best_of",
        max_tokens=params.max_tokens,
        # A logits processor may keep a state. Tokens that are taken back later would spoil it.
        takes_drafts=params.num_sequences == 1 and not params.logits_processors,
    )

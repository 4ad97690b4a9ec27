"""What a caller says of a request: its arguments, the forms that a prompt may have, text to token ids and back."""

import threading
from operator import index
from typing import Any, NamedTuple

from pagedattn_serve.config import check_bool, check_int, check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.sampling_params import SamplingParams

# A text; token ids in a list, a tuple, or an array or tensor of one dimension; or a dict with prompt, prompt_token_ids
# or both. With both, the model runs the ids, and `RequestOutput.prompt` shows the text.
Prompt = Any


class RequestArgs(NamedTuple):
    """What a caller says of a request: a prompt, or its token ids, and what is to be done with the prompt.

    prompt: a text; token ids in a list, tuple, array or tensor; {"prompt": text} or {"prompt_token_ids": ids}; or
        one dict with both: the model runs the ids, and the output shows the text.
    sampling_params: default `LLMEngine.get_default_sampling_params()`.
    arrival_time: a time of `time.monotonic()`; default now. The metrics use it, the order of service does not.
    priority: with the scheduling policy "priority", a lower number is served earlier. So that nobody waits for ever, a
        number lower by k passes only the requests that came at most k * 10,000 requests before.
    cache_salt: only requests with the same salt share cached blocks. So the time that a prompt takes tells nobody
        whether users with another salt have sent the same prompt.
    """

    request_id: str
    prompt: Prompt | None = None
    sampling_params: SamplingParams | None = None
    prompt_token_ids: Any | None = None
    arrival_time: float | None = None
    priority: int = 0
    cache_salt: str = ""


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
        if not prompt or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
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
            raise ArgumentTypeError(name, "an int", f"{token_id!r} of type {kind}")
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

    def tokenize(self, text: str, add_special_tokens: bool = True, name: str = "text") -> list[int]:
        """`LLMEngine.tokenize`; errors call the text `name`."""
        check_text(name, text)
        check_bool("add_special_tokens", add_special_tokens)
        if self.tokenizer is None:
            expected = "prompt_token_ids" if name == "prompt" else "none"
            raise ArgumentError(name, f"{expected}, as the model's directory has no tokenizer")
        with self.lock:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def detokenize(self, token_ids: Any) -> str:
        """`LLMEngine.detokenize`."""
        token_ids = to_ids(token_ids, name="token_ids")
        if self.tokenizer is None:
            raise ArgumentError("token_ids", "none, as the model's directory has no tokenizer")
        for token_id in token_ids:
            check_int("token_ids", token_id, 0, self._num_token_ids - 1)
        with self.lock:
            return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

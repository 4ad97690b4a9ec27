"""Logprobs of outputs in OpenAI's two formats, whose `add` takes the next tokens; of prompts in vLLM's format."""

import copy
from collections.abc import Mapping, Sequence
from typing import Self

from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import CompletionOutput, Logprob, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.text.detokenizer import TokenNames, is_in_text, names_in_prompt

LOWEST = -9999.0  # for minus infinity, which JSON does not have

Entries = Mapping[int, Logprob]


class CompletionLogprobs(TypedDict):
    """A list entry for each token. top_logprobs: the likeliest tokens by name, and the token itself."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(TypedDict):
    """bytes: what the token adds to the UTF-8 of the answer, also if it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobsFormat:
    """The format of completions: four lists, with the place of each token in the text.

    The place of a token is the length of the text before it. Tokens that are parts of one character have one place.
    params: those of the output. as_ids: whether the names of tokens are their ids.
    """

    def __init__(self, names: TokenNames, params: SamplingParams, as_ids: bool = False) -> None:
        self._names = names
        self._num_top_of_prompt = params.logprobs or 0
        self._num_top = _num_top_of(params)
        self._skips_special_tokens = params.skip_special_tokens
        self._as_ids = as_ids
        self._offset = 0

    def fork(self) -> Self:
        """A format that goes on from here by itself."""
        return copy.copy(self)

    def add_prompt(self, text: str, token_ids: list[int], entries: Sequence[Entries | None]) -> CompletionLogprobs:
        """entries: one for each token; None for the first token, which nothing predicts."""
        result = _no_logprobs()
        for token_id, each in zip(token_ids, entries, strict=True):
            if each is None:
                name = next(names_in_prompt(self._names, token_ids, text, [[token_id]]))[token_id]
            else:
                name = each[token_id].decoded_token or ""
            is_in = is_in_text(self._names, token_id, text, self._offset)
            self._add(result, token_id, name, each, self._num_top_of_prompt, is_in)
        self._offset = len(text)  # the text may have spaces or capitals that the tokenizer does not keep
        return result

    def add(self, completion: CompletionOutput) -> CompletionLogprobs:
        result = _no_logprobs()
        for token_id, each in zip(completion.token_ids, completion.logprobs or [], strict=True):
            is_in = not (self._skips_special_tokens and token_id in self._names.special_texts)
            self._add(result, token_id, each[token_id].decoded_token or "", each, self._num_top, is_in)
        return result

    def _add(
        self, result: CompletionLogprobs, token_id: int, name: str, entries: Entries | None, num_top: int, is_in: bool
    ) -> None:
        result["text_offset"].append(self._offset)
        result["tokens"].append(_id_name(token_id) if self._as_ids else name)
        result["token_logprobs"].append(None if entries is None else _finite(entries[token_id].logprob))
        result["top_logprobs"].append(None if entries is None else self._top(token_id, entries, num_top))
        if is_in:
            self._offset += len(name)

    def _top(self, token_id: int, entries: Entries, num_top: int) -> dict[str, float]:
        """The token itself and the likeliest ones by name. If several have one name, it is the token's or else the
        likeliest one's; the names of the others are their ids."""
        top: dict[str, float] = {}
        for each_id, entry in _with_likeliest(token_id, entries, num_top).items():
            name = entry.decoded_token or ""
            if self._as_ids or name in top:
                name = _id_name(each_id)
            top[name] = _finite(entry.logprob)
        return top


class ChatLogprobsFormat:
    """The format of chats: an object for each token. params: those of the output. as_ids: whether the names of tokens
    are their ids.

    The bytes of all tokens, joined, are the UTF-8 of the answer: a token that the answer leaves out has none.
    """

    def __init__(self, names: TokenNames, params: SamplingParams, as_ids: bool = False) -> None:
        self._names = names
        self._num_top = _num_top_of(params)
        self._params = params
        self._as_ids = as_ids

    def add(self, completion: CompletionOutput) -> ChatLogprobs:
        content: list[TokenLogprob] = []
        for place, (token_id, each) in enumerate(
            zip(completion.token_ids, completion.logprobs or [], strict=True), 1 - len(completion.token_ids)
        ):
            left_out = token_id if place == 0 and self._ends_unseen(completion) else None
            top = [self._entry(each_id, entry, left_out) for each_id, entry in _likeliest(each, self._num_top)]
            content.append({**self._entry(token_id, each[token_id], left_out), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _ends_unseen(self, completion: CompletionOutput) -> bool:
        """Whether the last token is an end-of-sequence or stop token, which the text leaves out."""
        is_string = isinstance(completion.stop_reason, str)
        return completion.finish_reason == "stop" and not is_string and not self._params.include_stop_str_in_output

    def _entry(self, token_id: int, entry: Logprob, left_out: int | None) -> TopLogprob:
        name = entry.decoded_token or ""
        is_left_out = self._params.skip_special_tokens and token_id in self._names.special_texts
        token_bytes = b"" if is_left_out or token_id == left_out else self._names.bytes_of(token_id, name)
        name = _id_name(token_id) if self._as_ids else name
        return {"token": name, "logprob": _finite(entry.logprob), "bytes": list(token_bytes)}


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The logprobs of a prompt and of its output in one."""
    return {
        "text_offset": first["text_offset"] + second["text_offset"],
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
    }


def prompt_logprobs(output: RequestOutput, num_top: int) -> PromptLogprobs:
    """In vLLM's format: for each token of the prompt but the first, it and the likeliest tokens by token id."""
    result: PromptLogprobs = []
    for token_id, entries in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
        if entries is None:
            result.append(None)
            continue
        result.append(
            {
                str(each_id): {
                    "logprob": _finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for each_id, entry in _with_likeliest(token_id, entries, num_top).items()
            }
        )
    return result


def _num_top_of(params: SamplingParams) -> int:
    """How many entries to show of a token of the output: with `logprob_token_ids` all of them, the token's own too."""
    return len(params.token_ids_to_report) + 1 if params.token_ids_to_report else params.num_most_likely


def _likeliest(entries: Entries, num_top: int) -> list[tuple[int, Logprob]]:
    """The entries of the likeliest tokens. They are counted, as equally likely tokens have one rank."""
    return sorted(entries.items(), key=lambda item: item[1].rank)[:num_top]


def _with_likeliest(token_id: int, entries: Entries, num_top: int) -> dict[int, Logprob]:
    """The entry of a token, and then those of the likeliest tokens."""
    return {token_id: entries[token_id], **dict(_likeliest(entries, num_top))}


def _no_logprobs() -> CompletionLogprobs:
    return {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}


def _id_name(token_id: int) -> str:
    """As vLLM writes an id in place of a name."""
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

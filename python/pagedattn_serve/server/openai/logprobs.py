"""Logprobs of outputs in OpenAI's two formats, whose `add` takes the next tokens; of prompts in vLLM's format."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pagedattn_serve.outputs import Logprob, RequestOutput
from pagedattn_serve.server.openai.response_bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from pagedattn_serve.text.detokenizer import REPLACEMENT, IncrementalDetokenizer

LOWEST = -9999.0  # for minus infinity, which JSON does not have

Entries = Mapping[int, Logprob]


class CompletionLogprobsFormat:
    """The format of completions: four lists, with the place of each token in the text.

    The place of a token is the length of the text before it. Tokens that are parts of one character have one place.
    num_top: how many of the most likely tokens were asked for.
    """

    def __init__(self, tokenizer: Any, context: list[int], skip_special_tokens: bool, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._num_top = num_top

    def fork(self) -> Self:
        """A format that goes on from here by itself."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        return other

    def add(self, token_ids: list[int], entries: Sequence[Entries | None]) -> CompletionLogprobs:
        """entries: one for each token; None for the first token of a prompt, which nothing predicts."""
        offsets, tokens = [], []
        logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, each in zip(token_ids, entries, strict=True):
            offsets.append(len(self._detokenizer.text))
            self._detokenizer.add(token_id)
            if each is None:
                tokens.append(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
                logprobs.append(None)
                top_logprobs.append(None)
                continue
            own = each[token_id]
            tokens.append(own.decoded_token or "")
            logprobs.append(_finite(own.logprob))
            top: dict[str, float] = {}
            for each_id, entry in sorted(each.items(), key=lambda item: item[1].rank):
                if entry.rank <= self._num_top or each_id == token_id:
                    top.setdefault(entry.decoded_token or "", _finite(entry.logprob))
            top_logprobs.append(top)
        return {
            "text_offset": offsets,
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs if self._num_top else None,
        }


class ChatLogprobsFormat:
    """The format of chats: an object for each token. num_top: most entries of its top_logprobs."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top

    def add(self, token_ids: list[int], entries: list[Entries]) -> ChatLogprobs:
        content: list[TokenLogprob] = []
        for token_id, each in zip(token_ids, entries, strict=True):
            ranked = sorted(each.values(), key=lambda entry: entry.rank)
            top = [_entry(entry) for entry in ranked[: self._num_top]]
            content.append({**_entry(each[token_id]), "top_logprobs": top})
        return {"content": content, "refusal": None}


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The logprobs of a prompt and of its output in one."""
    top = None
    if first["top_logprobs"] is not None and second["top_logprobs"] is not None:
        top = first["top_logprobs"] + second["top_logprobs"]
    return {
        "text_offset": first["text_offset"] + second["text_offset"],
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": top,
    }


def prompt_logprobs(output: RequestOutput, num_top: int) -> PromptLogprobs:
    """In vLLM's format: for each token of the prompt but the first, it and the likeliest tokens by token id."""
    told: PromptLogprobs = []
    for token_id, entries in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
        if entries is None:
            told.append(None)
            continue
        told.append(
            {
                str(each_id): {
                    "logprob": _finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for each_id, entry in entries.items()
                if entry.rank <= num_top or each_id == token_id
            }
        )
    return told


def _entry(entry: Logprob) -> TopLogprob:
    token = entry.decoded_token or ""
    token_bytes = None if REPLACEMENT in token else list(token.encode())
    return {"token": token, "logprob": _finite(entry.logprob), "bytes": token_bytes}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

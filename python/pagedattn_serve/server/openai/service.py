"""What every route needs: the engine, the config, and what turns a request into work for them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.http.metrics import ServerMetrics
from pagedattn_serve.server.http.request_context import current_request
from pagedattn_serve.server.openai.body_params import form_field
from pagedattn_serve.server.openai.generation import Job, JobRunner, PromptTokens
from pagedattn_serve.server.openai.request_bodies import SamplingBody
from pagedattn_serve.text.chat_template import render_chat
from pagedattn_serve.text.token_names import TokenNames

T = TypeVar("T")

LONG_TEXT = 4096  # characters: tokenizing more takes longer than waking a thread


class Service:
    """One model, served under one name. Raises ValueError if it has no tokenizer."""

    def __init__(self, engine: AsyncLLMEngine, config: ServerConfig) -> None:
        self.texts = engine.texts
        if (tokenizer := engine.texts.tokenizer) is None:
            raise ArgumentError("model", "a directory with a tokenizer", "one without, which serves no texts")
        self.tokenizer: Any = tokenizer
        self.token_names = TokenNames(tokenizer)
        self.max_model_len = engine.facts.max_model_len
        self.defaults = engine.facts.default_sampling_params  # for requests that leave them out
        self.config = config
        self.metrics = ServerMetrics(engine.replicas, config.served_model_name)
        self.jobs = JobRunner(engine, self.metrics)
        self.created = int(time.time())
        self._max_characters = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless the name is the model's, or None."""
        if name is not None and name != self.config.served_model_name:
            message = f"model: expected {self.config.served_model_name}, got {name}, which does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(self, texts: list[str], add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
        """Token ids of each text. Raises ApiError, which names the field, for a text that UTF-8 cannot write."""
        return await self._with_tokenizer(
            sum(map(len, texts)), lambda: [self.texts.tokenize(text, add_special_tokens) for text in texts], param
        )

    async def detokenize(self, prompts: list[list[int]], param: str = "prompt") -> list[str]:
        """The text of each prompt, with special tokens. Raises ApiError, which names the field, for unknown ids."""
        return await self._with_tokenizer(
            sum(map(len, prompts)), lambda: list(map(self.texts.detokenize, prompts)), param
        )

    async def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, reasoning_effort: str | None = None
    ) -> str:
        """A chat as the text that the model continues. Raises ApiError for a chat that the template refuses."""
        try:  # in a thread: a template is a program
            return await asyncio.to_thread(
                render_chat,
                self.tokenizer,
                messages,
                self.config.chat_template,
                add_generation_prompt,
                reasoning_effort,
            )
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param="messages") from None

    def check_characters(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long even if all tokens are as long as the longest token. Such a text
        could keep the tokenizer for a minute."""
        if len(text) > self._max_characters:
            raise self._too_long(f"{len(text)} characters in the {param}, which are more", param)

    def job(self, kind: str, prompts: list[PromptTokens], params: SamplingParams, body: SamplingBody) -> Job:
        """Work for the engine. Its id is the kind and the id of the HTTP request, so the log of either names both."""
        context = current_request.get()
        assert context is not None, "RequestLog has set it"
        context.answer_id = f"{kind}-{context.request_id}"
        return Job(
            request_id=context.answer_id,
            created=int(time.time()),
            model=self.config.served_model_name,
            prompts=prompts,
            params=params,
            priority=body.priority or 0,
            cache_salt=self._salt(body.cache_salt or ""),
            form_field=form_field(body),
            names_tier=body.service_tier is not None,
        )

    def check_room(self, num_tokens: int, max_tokens: int | None, param: str) -> None:
        """Raises ApiError if the prompt and its output do not fit. max_tokens: None takes any output that fits."""
        if num_tokens == 0:
            raise ApiError(400, f"{param}: expected one token at least, got none", param=param)
        num_output = max_tokens or 1
        if num_tokens + num_output > self.max_model_len:
            requested = (
                f"{num_tokens + num_output} tokens ({num_tokens} in the {param}, {num_output} for the completion)"
            )
            raise self._too_long(requested, param)

    def _too_long(self, requested: str, param: str) -> ApiError:
        """The error in OpenAI's words, which clients look for."""
        text = (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {requested}."
        )
        return ApiError(400, text, param=param, code="context_length_exceeded")

    async def _with_tokenizer(self, size: int, work: Callable[[], T], param: str) -> T:
        """What `work` returns. Raises ApiError, which names the field, instead of its TypeError or ValueError. Long
        work runs in a thread. So does work while another thread has the tokenizer: the event loop does not wait."""
        try:
            if size < LONG_TEXT and not self.texts.is_busy:
                return work()
            return await asyncio.to_thread(work)
        except (TypeError, ValueError) as error:
            message = error.renamed(param) if isinstance(error, BadArgument) else f"{param}: {error}"
            raise ApiError(400, str(message), param=param) from None

    def _salt(self, own: str) -> str:
        """Only prompts with the same salt share cached blocks: the request's salt, within the salt of its key."""
        context = current_request.get()
        return f"{context.key_id}:{own}" if context and self.config.prefix_cache_per_key else own


async def service_of(request: Request) -> Service:
    """A FastAPI dependency. It is async, because FastAPI runs other dependencies in threads."""
    service: Service = request.app.state.service
    return service

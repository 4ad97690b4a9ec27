"""What endpoints share. `Service` makes a job of a request; its `JobRunner` sends the job through the engine."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.output_parsing.output_format import Turn, output_format
from pagedattn_serve.output_parsing.parser import OutputParser
from pagedattn_serve.output_parsing.tool_format import ToolUse
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.errors import ApiError, is_anthropic
from pagedattn_serve.server.http.logs import current_request
from pagedattn_serve.server.http.metrics import ServerMetrics
from pagedattn_serve.server.openai.errors import engine_error
from pagedattn_serve.server.openai.fields import SamplingBody, form_field
from pagedattn_serve.server.openai.jobs import Job, JobRunner, PromptTokens
from pagedattn_serve.text.chat_template import render_chat, template_text
from pagedattn_serve.text.detokenizer import TokenNames, num_tokens_within
from pagedattn_serve.text.infilling import infilling_of

T = TypeVar("T")

LONG_TEXT = 4096  # characters: tokenizing more takes longer than waking a thread
TOO_LONG = "context_length_exceeded"  # the code of an error
# Of a text that may be much too long, so many characters for each token of the model's length are tokenized first; and
# so many tokens at their end may be others amid the whole text.
CHARACTERS_FIRST = 8
TOKENS_AT_THE_END = 64

TakeTokens = Callable[[list[int]], list[int]]


def _as_they_are(token_ids: list[int]) -> list[int]:
    return token_ids


class Service:
    """One model, served under its names. Raises ValueError if it has no tokenizer."""

    def __init__(self, engine: AsyncLLMEngine, config: ServerConfig) -> None:
        self.texts = engine.texts
        if (tokenizer := engine.texts.tokenizer) is None:
            raise ArgumentError("model", "a directory with a tokenizer", "one without, which serves no texts")
        self.tokenizer: Any = tokenizer
        self.token_names = TokenNames(tokenizer)
        self.infilling = infilling_of(tokenizer)  # None if the model fills in nothing
        self.max_model_len, self.vocab_size = engine.facts.max_model_len, engine.facts.vocab_size
        self.scores_pairs = engine.facts.scores_pairs  # instead of giving embeddings
        self.system_fingerprint = engine.facts.system_fingerprint
        self.defaults = engine.facts.default_sampling_params  # for requests that leave them out
        self.config = config
        self.metrics = ServerMetrics(engine.replicas, config.model_names[0])
        self.jobs = JobRunner(engine, self.metrics, config.max_waiting)
        self.created = int(time.time())
        template = template_text(tokenizer, config.chat_template)
        special_tokens = set(self.token_names.special_texts.values())
        self.output_format = output_format(
            config.tool_call_parser, config.reasoning_parser, template, special_tokens, self.token_names.added_texts
        )
        self.max_characters = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless the name is one of the model's, or None."""
        if name is not None and name not in self.config.model_names:
            expected = " or ".join(self.config.model_names)
            message = f"model: expected {expected}, got {name}, which does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(
        self,
        texts: list[str],
        add_special_tokens: bool,
        param: str = "prompt",
        take: TakeTokens = _as_they_are,
        must_fit: bool = False,
    ) -> list[list[int]]:
        """Token ids of each text. Raises ApiError, which names the field, for a text that UTF-8 cannot write, and for
        one that `check_characters` refuses.

        take: called with the token ids of a text before the next text is tokenized. Returns those that are kept, or
        raises ApiError.
        must_fit: whether `take` raises for more tokens than the model takes. Then a text whose beginning has more of
            them is refused by the beginning: megabytes would keep the tokenizer from others for many seconds.
        """
        for text in texts:
            self.check_characters(text, param)

        def token_ids(text: str) -> list[int]:
            if must_fit:
                self._check_beginning(text, param)
            return self.texts.tokenize(text, add_special_tokens)

        return await self._with_tokenizer(
            sum(map(len, texts)), lambda: [take(token_ids(text)) for text in texts], param
        )

    async def tokenize_pairs(
        self, firsts: list[str], seconds: list[str], param: str, take: TakeTokens
    ) -> list[list[int]]:
        """Token ids of each pair of texts, as the tokenizer joins them. take, raises: as `tokenize`."""
        return await self._with_tokenizer(
            sum(map(len, firsts + seconds)),
            lambda: [take(self.texts.tokenize(a, pair=b)) for a, b in zip(firsts, seconds, strict=True)],
            param,
        )

    async def tokenize_infilling(
        self, prefixes: list[str], suffix: str, add_special_tokens: bool, take: TakeTokens
    ) -> list[list[int]]:
        """Token ids of each prompt that asks for what stands before the suffix. take: as `tokenize`. Raises ApiError,
        which names the field, as `tokenize`, and if the model fills in nothing."""
        for prefix in prefixes:
            self.check_characters(prefix, "prompt")
        self.check_characters(suffix, "suffix")
        if (infilling := self.infilling) is None:
            message = "suffix: expected none, as the model has no tokens that ask for what stands between two texts"
            raise ApiError(400, message, param="suffix")
        await self.tokenize([suffix], False, "suffix")
        prompt = partial(infilling.prompt, self.texts.tokenize, suffix=suffix, add_special_tokens=add_special_tokens)
        return await self._with_tokenizer(
            sum(map(len, prefixes)) + len(suffix), lambda: [take(prompt(prefix)) for prefix in prefixes], "prompt"
        )

    async def detokenize(self, prompts: list[list[int]], param: str = "prompt") -> list[str]:
        """The text of each prompt, with special tokens. Raises ApiError, which names the field, for unknown ids."""
        return await self._with_tokenizer(
            sum(map(len, prompts)), lambda: list(map(self.texts.detokenize, prompts)), param
        )

    async def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **options: Any) -> str:
        """A chat as the text that the model continues. options: of `render_chat`. Raises ApiError for a chat that the
        template refuses."""
        template = self.config.chat_template
        try:  # in a thread: a template is a program
            return await asyncio.to_thread(
                render_chat, self.tokenizer, messages, template, add_generation_prompt, **options
            )
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param=_field_of(error)) from None

    def turn(
        self,
        prompt: str,
        params: SamplingParams,
        use: ToolUse | None,
        continued: str = "",
        max_thought_tokens: int | None = None,
    ) -> tuple[SamplingParams, Turn | None]:
        """What an output after a prompt may be and how it is read, and the parameters that hold the output to it.

        use: the calls that the output may have; None if the request has no tools. continued: the beginning of the
        answer, if the prompt has it already. max_thought_tokens: None for any number. No turn: the output is text
        alone. Raises ApiError.
        """
        try:
            turn = self.output_format.turn(prompt, use, params.structured_output, continued, max_thought_tokens)
            return (params, None) if turn is None else (turn.hold(params), turn)
        except (TypeError, ValueError) as error:
            raise engine_error(error, None if use is None else "tools") from None

    def num_thought_tokens(self, job: Job, parser: OutputParser, token_ids: list[int]) -> int:
        """How many tokens of an output are of its thoughts. parser: has read all of its text. This may take long."""
        detokenizer = self.token_names.detokenizer(job.prompts[0].token_ids, job.params.skip_special_tokens)
        return num_tokens_within(parser.thoughts, detokenizer, token_ids)

    def truncate(self, prompt: PromptTokens, body: SamplingBody, max_tokens: int | None) -> PromptTokens:
        """The prompt, or its last tokens, or first ones, if the request wants no more. Raises ApiError."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt
        if body.prompt_logprobs is not None:
            message = f"truncate_prompt_tokens: expected none with prompt_logprobs, got {most}"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        self.check_truncation(most)
        if most == -1:
            most = max(self.max_model_len - (max_tokens or 1), 1)
        kept = prompt.token_ids[:most] if body.truncation_side == "right" else prompt.token_ids[-most:]
        return PromptTokens(prompt.text, kept)

    def check_truncation(self, most: int | None) -> None:
        """Raises ApiError if a request keeps more tokens of a text than the model takes."""
        if most is not None and most > self.max_model_len:
            message = f"truncate_prompt_tokens: expected at most {self.max_model_len}, the model's length, got {most}"
            raise ApiError(400, message, param="truncate_prompt_tokens")

    def check_characters(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long even if all tokens are as long as the longest token. Such a text
        could keep the tokenizer for a minute."""
        if len(text) > self.max_characters:
            raise self._too_long(
                f"{len(text)} characters", self.max_characters, f" in the {param}, which are more", param
            )

    def _check_beginning(self, text: str, param: str) -> None:
        """Raises ApiError for a long text whose beginning alone has too many tokens."""
        num_characters = CHARACTERS_FIRST * self.max_model_len
        if len(text) > 2 * num_characters:
            num_tokens = len(self.texts.tokenize(text[:num_characters], False)) - TOKENS_AT_THE_END
            if num_tokens > self.max_model_len:
                raise self._too_long(f"more than {num_tokens} tokens", self.max_model_len, f" in the {param}", param)

    def job(
        self,
        id_prefix: str,
        prompts: list[PromptTokens],
        params: SamplingParams,
        body: SamplingBody,
        has_tools: bool = False,
    ) -> Job:
        """Work for the engine. Its id ends with that of the HTTP request, so the log of either names both."""
        return self._job(
            id_prefix,
            prompts,
            params,
            body.priority,
            body.cache_salt,
            form_field="tools" if has_tools else form_field(body),
            names_tier=body.service_tier is not None,
        )

    def pooling_job(
        self,
        id_prefix: str,
        prompts: list[PromptTokens],
        pooling: PoolingParams,
        priority: int | None,
        cache_salt: str | None,
    ) -> Job:
        """As `job`, where the prompts become embeddings."""
        return self._job(id_prefix, prompts, self.defaults, priority, cache_salt, pooling=pooling)

    def check_length(self, num_tokens: int, param: str) -> None:
        """Raises ApiError unless a prompt that nothing is generated for fits."""
        if num_tokens == 0:
            raise ApiError(400, f"{param}: expected one token at least, got none", param=param)
        if num_tokens > self.max_model_len:
            raise self._too_long(f"{num_tokens} tokens", self.max_model_len, f" in the {param}", param)

    def check_room(self, num_tokens: int, max_tokens: int | None, param: str) -> None:
        """Raises ApiError if the prompt and its output do not fit. max_tokens: None takes any output that fits."""
        if num_tokens == 0:
            raise ApiError(400, f"{param}: expected one token at least, got none", param=param)
        num_output = max_tokens or 1
        if num_tokens + num_output > self.max_model_len:
            parts = f" ({num_tokens} in the {param}, {num_output} for the completion)"
            raise self._too_long(f"{num_tokens + num_output} tokens", self.max_model_len, parts, param)

    def _job(
        self,
        id_prefix: str,
        prompts: list[PromptTokens],
        params: SamplingParams,
        priority: int | None,
        cache_salt: str | None,
        **others: Any,
    ) -> Job:
        """others: fields of `Job`."""
        context = current_request.get()
        assert context is not None, "RequestLog has set it"
        context.answer_id = id_prefix + context.request_id
        return Job(
            request_id=context.answer_id,
            created=int(time.time()),
            model=self.config.model_names[0],
            system_fingerprint=self.system_fingerprint,
            prompts=prompts,
            params=params,
            priority=priority or 0,
            cache_salt=self._salt(cache_salt or ""),
            **others,
        )

    def _too_long(self, amount: str, limit: int, details: str, param: str) -> ApiError:
        """The error in the words of OpenAI or of Anthropic, which clients look for: Claude Code makes a conversation
        shorter if it finds Anthropic's."""
        context = current_request.get()
        if context is not None and is_anthropic(context.path):
            text = f"prompt is too long: {amount} > {limit} maximum"
        else:
            most = f"This model's maximum context length is {self.max_model_len} tokens."
            text = f"{most} However, you requested {amount}{details}."
        return ApiError(400, text, param=param, code=TOO_LONG)

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


# Fields beside the messages that a chat is rendered by.
_RENDERED_FIELDS = ("tools", "chat_template_kwargs", "continue_final_message")


def _field_of(error: Exception) -> str:
    """The field of the request that an error of `render_chat` is about."""
    is_other = isinstance(error, BadArgument) and error.argument in _RENDERED_FIELDS
    return error.argument if is_other else "messages"  # type: ignore[attr-defined]


async def service_of(request: Request) -> Service:
    """A FastAPI dependency. It is async, because FastAPI runs other dependencies in threads."""
    service: Service = request.app.state.service
    return service

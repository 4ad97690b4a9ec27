"""Offline generation: a list of prompts in, a list of outputs out."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from os import PathLike
from threading import Lock, get_ident
from typing import Any, TypeVar, cast

from pagedattn_serve.config import check_int, check_text
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs, takes_options
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, nth, with_place
from pagedattn_serve.output_parsing.events import ParsedOutput
from pagedattn_serve.output_parsing.output_format import AUTO, BUDGET, OutputFormat, check_parsers, output_format
from pagedattn_serve.output_parsing.parser import parse
from pagedattn_serve.output_parsing.tool_format import tool_use
from pagedattn_serve.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    embedding_output,
)
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.progress import Progress
from pagedattn_serve.requests.inputs import Prompt, RequestArgs, split_prompts, without_array
from pagedattn_serve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagedattn_serve.text.chat_template import Message, content_text, load_chat_template, render_chat, template_text
from pagedattn_serve.text.detokenizer import TokenNames
from pagedattn_serve.vllm_arguments import (
    BEAM_SEARCH_ARGUMENTS,
    CALL_ARGUMENTS,
    CHAT_ARGUMENTS,
    POOLING_ARGUMENTS,
    refuse,
)

T = TypeVar("T")


class LLM:
    """A model with its engine, `llm_engine`. The arguments are those of `EngineArgs`. Raises as `LLMEngine` does.

    Calls from several threads wait for each other. Raises RuntimeError for a call from within a call, such as one by a
    logits processor.
    """

    @takes_options(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._num_requests = 0
        self._request_ids: list[str] = []  # of the current call
        self._one_call = Lock()
        self._caller: int | None = None  # the thread of the current call

    def get_tokenizer(self) -> Any | None:
        """The tokenizer from transformers; None if the model's directory has none."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a prompt that brings none: `LLMEngine.get_default_sampling_params`."""
        return self.llm_engine.get_default_sampling_params()

    def register_prefix(self, prefix: Prompt) -> int:
        """Compute and keep a prefix that many prompts begin with. Returns and raises as `LLMEngine.register_prefix`."""
        self._refuse_nested_call()
        with self._one_call:
            num_tokens = self.llm_engine.register_prefix(prefix)
        one_token = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        has_head = self.llm_engine.model_runner.model.head
        self._run([prefix], [one_token if has_head else PoolingParams()], [0], use_tqdm=False)
        return num_tokens

    def generate(
        self,
        prompts: Prompt | list[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Any | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        *,
        priority: int | Sequence[int] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Generate for all prompts together, batched continuously.

        Args:
            prompts: one prompt or a list of prompts, each in a form that `LLMEngine.add_request` takes: a text, token
                ids, or a dict with either. A list of ints is one prompt.
            sampling_params: one for all prompts, or a list with one for each; default `get_default_sampling_params()`.
                Each prompt has one RequestOutput, whatever output_kind says.
            prompt_token_ids: instead of prompts, a list of token ids for each prompt, or one such list.
            use_tqdm: show progress on standard error: on a terminal a line that changes, elsewhere a line every 10
                seconds and a last one. (The name is vLLM's; tqdm is not used. A function that makes a bar is True.)
            priority: one for all prompts, or a list with one for each, as `LLMEngine.add_request` takes it.
            of_vllm: arguments of vLLM's `LLM.generate`, at values that mean what happens here anyway.

        Returns the finished requests, in the order of the prompts. `error` says why a request could not go on.

        Raises ValueError or TypeError, before anything is generated, if a request is not valid (`add_request`). The
        error names the prompt by its place in the list.
        """
        requests = list_prompts(prompts, prompt_token_ids)
        params = one_each("sampling_params", sampling_params, len(requests))
        check_each("sampling_params", params, SamplingParams)
        priorities = one_each("priority", priority, len(requests))
        refuse(of_vllm, CALL_ARGUMENTS, "LLM.generate")
        return self._run(requests, params, priorities, use_tqdm)

    def embed(
        self,
        prompts: Prompt | list[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, all batched together.

        Args:
            prompts, use_tqdm: as in `generate`.
            pooling_params: one for all prompts, or a list with one for each; default `PoolingParams()`.
            of_vllm: arguments of vLLM's `LLM.embed`, at values that mean what happens here anyway.

        The model's hidden states behind its last norm are pooled as the checkpoint's modules.json says: the last token
        or the mean, normalised or not. Without that file the last token is taken and normalised.

        Returns the embeddings in the order of the prompts. Raises as `generate` does, and RuntimeError, which names the
        prompt, where an embedding would be no numbers.
        """
        refuse(of_vllm, POOLING_ARGUMENTS, "LLM.embed")
        if self.llm_engine.inputs.scores_pairs:
            raise ArgumentError("model", "one that gives embeddings", "a reranker: call LLM.score")
        return self._embed(split_prompts(prompts), pooling_params, use_tqdm)

    def _embed(
        self,
        requests: list[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: bool | Callable[..., object],
    ) -> list[EmbeddingRequestOutput]:
        given = one_each("pooling_params", pooling_params, len(requests))
        check_each("pooling_params", given, PoolingParams)
        params = [PoolingParams() if each is None else each for each in given]
        outputs = self._run(requests, params, [0] * len(requests), use_tqdm)
        for i, output in enumerate(outputs):
            if output.error is not None:
                raise RuntimeError(f"{nth('prompt', i, len(outputs))}: {output.error}")
        return list(map(embedding_output, outputs))

    def score(
        self,
        text_1: Prompt | list[Prompt],
        text_2: Prompt | list[Prompt],
        use_tqdm: bool | Callable[..., object] = True,
        **of_vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: the cosine of their embeddings, or what a reranker says of each pair.

        Args:
            text_1: one prompt, which is scored with each of text_2, or as many prompts as there are in text_2.
            text_2: one prompt or a list of prompts.
            use_tqdm: as in `generate`.
            of_vllm: arguments of vLLM's `LLM.score`, at values that mean what happens here anyway.

        Returns a score for each of text_2. Raises as `embed` does.
        """
        refuse(of_vllm, POOLING_ARGUMENTS, "LLM.score")
        firsts, seconds = split_prompts(text_1), split_prompts(text_2)
        if len(firsts) not in (1, len(seconds)):
            raise ArgumentError("text_1", f"one prompt, or {len(seconds)} as in text_2", len(firsts))
        times = len(seconds) // max(len(firsts), 1)
        inputs = self.llm_engine.inputs
        if inputs.scores_pairs:
            scored = self._embed(list(map(inputs.pair, firsts * times, seconds)), None, use_tqdm)
            return [
                ScoringRequestOutput(
                    each.request_id,
                    ScoringOutput(each.outputs.embedding[0]),
                    each.prompt_token_ids,
                    each.num_cached_tokens,
                    each.finished,
                )
                for each in scored
            ]
        embedded = self.embed([*firsts, *seconds], None, use_tqdm)
        of_firsts, of_seconds = embedded[: len(firsts)], embedded[len(firsts) :]
        return list(map(_score, of_firsts * times, of_seconds))

    def _run(
        self,
        requests: list[Prompt],
        params: Sequence[SamplingParams | PoolingParams | None],
        priorities: Sequence[int | None],
        use_tqdm: bool | Callable[..., object],
    ) -> list[RequestOutput]:
        self._refuse_nested_call()
        with self._one_call:
            self._abort_all()  # an interrupt may have kept the last call from it
            outputs: dict[str, RequestOutput] = {}
            try:
                self._caller = get_ident()
                for i, (prompt, param, each) in enumerate(zip(requests, params, priorities, strict=True)):
                    self._add(nth("prompt", i, len(requests)), prompt, param, 0 if each is None else each)
                own = set(self._request_ids)
                with Progress(len(requests), "Requests", shown=bool(use_tqdm)) as progress:
                    while len(outputs) < len(requests):
                        stepped = self.llm_engine.step()  # the engine may hold requests of other callers, too
                        finished = [output for output in stepped if output.request_id in own]
                        outputs.update((output.request_id, output) for output in finished)
                        progress.update(len(finished))
                self.llm_engine.flush(waits=False)
                return [outputs[request_id] for request_id in self._request_ids]
            finally:
                self._caller = None
                self._abort_all()

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Generate the answer to a conversation, or to each of a list of them, batched as `generate` does.

        Args:
            messages: one conversation, a list of dicts with a role and a content; or a list of conversations.
            sampling_params, use_tqdm, priority: as in `generate`.
            chat_template: a Jinja template, or the path of its file, instead of the tokenizer's own template.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
            continue_final_message: whether the prompt ends with the content of the last message, which the answer goes
                on with. Not with add_generation_prompt.
            tools: functions that the model may call, in OpenAI's form. The template gets them. From the moment that a
                call begins, the output is held to the function's schema. The text has the call in the model's own form,
                and `parse_chat` reads it.
            tool_choice: "auto", which is the default, "none", "required", or a function's name, as OpenAI has it.
            tool_call_parser, reasoning_parser: how the model writes calls and thoughts, by the names of the server's
                options; "auto" looks at the chat template.
            thinking_token_budget: tokens of a thought, at most; then its end comes, and the answer.
            chat_template_kwargs: variables for the template, such as {"enable_thinking": False}.
            of_vllm: arguments of vLLM's `LLM.chat`, at values that mean what happens here anyway.

        Returns what `generate` returns; `prompt` is the text that the template made.

        Raises ValueError or TypeError, before anything is generated, as `render_chat` and `generate` do. The error
        names the conversation by its place in the list.
        """
        refuse(of_vllm, CHAT_ARGUMENTS, "LLM.chat")
        if not isinstance(messages, list | tuple):
            raise ArgumentTypeError("messages", "a list of messages", type(messages).__name__)
        template = None if chat_template is None else load_chat_template(chat_template)
        if messages and isinstance(messages[0], list | tuple):
            places = [nth("conversation", i, len(messages)) for i in range(len(messages))]
            conversations = messages
        else:
            places, conversations = [""], [messages]
        given = one_each("sampling_params", sampling_params, len(conversations))
        check_each("sampling_params", given, SamplingParams)
        check_parsers(tool_call_parser, reasoning_parser)
        if thinking_token_budget is not None:
            check_int(BUDGET, thinking_token_budget, 0)
        params = [self.get_default_sampling_params() if each is None else each for each in given]
        use = tool_use(tools, tool_choice)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "variables": chat_template_kwargs,
        }
        # Made once for all conversations, if they need it at all.
        form_of_outputs = cache(partial(self._output_format, template, tool_call_parser, reasoning_parser))
        prompts: list[Prompt] = []
        for i, (place, conversation) in enumerate(zip(places, conversations, strict=True)):
            try:
                text = render_chat(self.get_tokenizer(), conversation, template, **options)
                if use is not None or thinking_token_budget is not None:
                    continued = content_text(conversation[-1]) if continue_final_message else ""
                    form = params[i].structured_output
                    turn = form_of_outputs().turn(text, use, form, continued, thinking_token_budget)
                    params[i] = params[i] if turn is None else turn.hold(params[i])
                # The template has written the special tokens that a prompt begins with.
                token_ids = self.llm_engine.tokenize(text, add_special_tokens=False)
                prompts.append({"prompt": text, "prompt_token_ids": token_ids})
            except (TypeError, ValueError) as error:
                raise (with_place(error, place) if place else error) from None
        return self.generate(prompts, params, None, use_tqdm, priority=priority)

    def parse_chat(
        self,
        output: RequestOutput,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | PathLike[str] | None = None,
        continued: str = "",
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> list[ParsedOutput]:
        """What each output of `chat` says: `content`, `reasoning`, and `calls`, each with a name and with arguments as
        JSON. The chat template tells in what form the model writes thoughts and calls.

        tools, chat_template, tool_call_parser, reasoning_parser: as `chat` got them. continued: the content of the last
        message with continue_final_message.

        Raises ValueError or TypeError as `chat` does.
        """
        if not isinstance(output, RequestOutput):
            raise ArgumentTypeError(
                "output", "a RequestOutput, as chat gives for each conversation", type(output).__name__
            )
        check_text("continued", continued)
        template = None if chat_template is None else load_chat_template(chat_template)
        form = self._output_format(template, tool_call_parser, reasoning_parser)
        turn = form.turn(output.prompt or "", tool_use(tools), None, continued)
        texts = [completion.text for completion in output.outputs]
        return [ParsedOutput(text) if turn is None else parse(turn.parser(), text) for text in texts]

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        priority: int | Sequence[int] | None = None,
        **of_vllm: Any,
    ) -> list[BeamSearchOutput]:
        """vLLM's call for what `generate` does with `SamplingParams(use_beam_search=True)`.

        prompts, priority: as in `generate`. of_vllm: arguments of vLLM's `LLM.beam_search`, at values that mean what
        happens here anyway. Returns beam_width sequences for each prompt. Raises as `generate` does.
        """
        refuse(of_vllm, BEAM_SEARCH_ARGUMENTS, "LLM.beam_search")
        if not isinstance(params, BeamSearchParams):
            raise ArgumentTypeError("params", "BeamSearchParams", type(params).__name__)
        outputs = self.generate(prompts, params.sampling_params(), None, use_tqdm, priority=priority)
        return [BeamSearchOutput([self._beam(output, each, params) for each in output.outputs]) for output in outputs]

    def _beam(self, output: RequestOutput, beam: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        tokens = output.prompt_token_ids + beam.token_ids
        tokenizer = self.get_tokenizer()
        text = tokenizer and tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        return BeamSearchSequence(tokens, beam.cumulative_logprob, text, beam.finish_reason, beam.stop_reason)

    def _output_format(self, template: str | None, tool_call_parser: str, reasoning_parser: str) -> OutputFormat:
        tokenizer = self.get_tokenizer()
        names, text = TokenNames(tokenizer), template_text(tokenizer, template)
        special_tokens = set(names.special_texts.values())
        return output_format(tool_call_parser, reasoning_parser, text, special_tokens, names.added_texts)

    def _add(self, place: str, prompt: Prompt, param: SamplingParams | PoolingParams | None, priority: int) -> None:
        request_id = f"llm-{self._num_requests}"
        self._num_requests += 1
        self._request_ids.append(request_id)  # first: the engine may hold no request that is not listed
        try:
            request = self.llm_engine.make_request(RequestArgs(request_id, prompt, param, priority=priority))
            request.output_kind = RequestOutputKind.FINAL_ONLY
            self.llm_engine.queue_request(request)
        except (TypeError, ValueError) as error:
            self._request_ids.pop()  # if the id is taken, the request of that id has another caller
            raise with_place(error, place) from None

    def _refuse_nested_call(self) -> None:
        if self._caller == get_ident():
            raise RuntimeError("LLM: expected a call after the end of the last one, got one from within a call")

    def _abort_all(self) -> None:
        """After an error or an interrupt, no request of the call stays behind."""
        self.llm_engine.abort_request(self._request_ids)
        self._request_ids = []


def _score(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    score = cosine(first.outputs.embedding, second.outputs.embedding)
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(score),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
        True,
    )


def list_prompts(prompts: Any | None, prompt_token_ids: Any | None) -> list[Prompt]:
    if (prompts is None) == (prompt_token_ids is None):
        raise ArgumentError("prompts", "either prompts or prompt_token_ids", "none" if prompts is None else "both")
    if prompt_token_ids is None:
        return split_prompts(prompts)
    if not isinstance(without_array(prompt_token_ids), list | tuple):
        raise ArgumentTypeError("prompt_token_ids", "a list of lists", type(prompt_token_ids).__name__)
    return [{"prompt_token_ids": token_ids} for token_ids in split_prompts(prompt_token_ids)]


def one_each(name: str, given: T | Sequence[T] | None, count: int) -> list[T | None]:
    if not isinstance(given, list | tuple):
        return [cast(T | None, given)] * count
    if len(given) != count:
        raise ArgumentError(name, f"one for all or one for each of {count} prompts", len(given))
    return list(given)


def check_each(name: str, params: Sequence[object], kind: type) -> None:
    """Raise TypeError, which names the prompt, unless the parameters of each are of this kind, or None."""
    for i, param in enumerate(params):
        if param is not None and not isinstance(param, kind):
            raise ArgumentTypeError(name, kind.__name__, type(param).__name__).at(nth("prompt", i, len(params)))

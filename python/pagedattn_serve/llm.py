"""Offline generation: a list of prompts in, a list of outputs out."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar, cast

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs, takes_options
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, nth, with_place
from pagedattn_serve.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from pagedattn_serve.progress import Progress
from pagedattn_serve.requests.inputs import Prompt, RequestArgs, split_prompts, without_array
from pagedattn_serve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagedattn_serve.text.chat_template import Message, load_chat_template, render_chat
from pagedattn_serve.vllm_arguments import BEAM_SEARCH_ARGUMENTS, CALL_ARGUMENTS, CHAT_ARGUMENTS, refuse

T = TypeVar("T")


class LLM:
    """A model with its engine, `llm_engine`. The arguments are those of `EngineArgs`. Raises as `LLMEngine` does."""

    @takes_options(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._num_requests = 0
        self._request_ids: list[str] = []  # of the current call

    def get_tokenizer(self) -> Any | None:
        """The tokenizer from transformers; None if the model's directory has none."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a prompt that brings none: `LLMEngine.get_default_sampling_params`."""
        return self.llm_engine.get_default_sampling_params()

    def register_prefix(self, prefix: Prompt) -> int:
        """Compute and keep a prefix that many prompts begin with. Returns and raises as `LLMEngine.register_prefix`."""
        num_tokens = self.llm_engine.register_prefix(prefix)
        self.generate(prefix, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
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
        priorities = one_each("priority", priority, len(requests))
        refuse(of_vllm, CALL_ARGUMENTS, "LLM.generate")
        self._abort_all()  # an interrupt may have kept the last call from it
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, param, each) in enumerate(zip(requests, params, priorities, strict=True)):
                self._add(nth("prompt", i, len(requests)), prompt, param, 0 if each is None else each)
            own = set(self._request_ids)
            with Progress(len(requests), "Requests", shown=bool(use_tqdm)) as progress:
                while len(outputs) < len(requests):
                    stepped = self.llm_engine.step()  # the engine may hold requests of other callers, too
                    finished = [output for output in stepped if output.request_id in own]
                    outputs.update((output.request_id, output) for output in finished)
                    progress.update(len(finished))
            return [outputs[request_id] for request_id in self._request_ids]
        finally:
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Generate the answer to a conversation, or to each of a list of them, batched as `generate` does.

        Args:
            messages: one conversation, a list of dicts with a role and a content; or a list of conversations.
            sampling_params, use_tqdm, priority: as in `generate`.
            chat_template: a Jinja template, or the path of its file, instead of the tokenizer's own template.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
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
        prompts = []
        for place, conversation in zip(places, conversations, strict=True):
            try:
                prompts.append(self._chat_prompt(conversation, template, add_generation_prompt, chat_template_kwargs))
            except (TypeError, ValueError) as error:
                raise (with_place(error, place) if place else error) from None
        return self.generate(prompts, sampling_params, None, use_tqdm, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        **of_vllm: Any,
    ) -> list[BeamSearchOutput]:
        """vLLM's call for what `generate` does with `SamplingParams(use_beam_search=True)`.

        prompts: as in `generate`. of_vllm: arguments of vLLM's `LLM.beam_search`, at values that mean what happens here
        anyway. Returns beam_width sequences for each prompt. Raises as `generate` does.
        """
        refuse(of_vllm, BEAM_SEARCH_ARGUMENTS, "LLM.beam_search")
        if not isinstance(params, BeamSearchParams):
            raise ArgumentTypeError("params", "BeamSearchParams", type(params).__name__)
        outputs = self.generate(prompts, params.sampling_params(), None, use_tqdm)
        return [BeamSearchOutput([self._beam(output, each, params) for each in output.outputs]) for output in outputs]

    def _beam(self, output: RequestOutput, beam: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        tokens = output.prompt_token_ids + beam.token_ids
        tokenizer = self.get_tokenizer()
        text = tokenizer and tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        return BeamSearchSequence(tokens, beam.cumulative_logprob, text, beam.finish_reason, beam.stop_reason)

    def _chat_prompt(
        self,
        messages: Any,
        template: str | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> Prompt:
        text = render_chat(self.get_tokenizer(), messages, template, add_generation_prompt, variables=variables)
        # The template has written the special tokens that a prompt begins with.
        token_ids = self.llm_engine.tokenize(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _add(self, place: str, prompt: Prompt, param: SamplingParams | None, priority: int) -> None:
        request_id = f"llm-{self._num_requests}"
        self._num_requests += 1
        self._request_ids.append(request_id)  # first: the engine may hold no request that is not listed
        try:
            request = self.llm_engine.inputs.make_request(RequestArgs(request_id, prompt, param, priority=priority))
            request.output_kind = RequestOutputKind.FINAL_ONLY
            self.llm_engine.queue_request(request)
        except (TypeError, ValueError) as error:
            self._request_ids.pop()  # if the id is taken, the request of that id has another caller
            raise with_place(error, place) from None

    def _abort_all(self) -> None:
        """After an error or an interrupt, no request of the call stays behind."""
        self.llm_engine.abort_request(self._request_ids)
        self._request_ids = []


def list_prompts(prompts: Any | None, prompt_token_ids: Any | None) -> list[Prompt]:
    if (prompts is None) == (prompt_token_ids is None):
        raise ArgumentError("prompts", "either prompts or prompt_token_ids")
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

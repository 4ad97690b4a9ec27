"""Offline generation: a list of prompts in, a list of outputs out."""

from os import PathLike
from typing import Any

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs, takes_options
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, nth, with_place
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.progress import Progress
from pagedattn_serve.requests.inputs import Prompt, RequestArgs, split_prompts, without_array
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.text.chat_template import Message, load_chat_template, render_chat


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
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        prompt_token_ids: Any | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts together, batched continuously.

        Args:
            prompts: one prompt or a list of prompts, each in a form that `LLMEngine.add_request` takes: a text, token
                ids, or a dict with either. A list of ints is one prompt.
            sampling_params: one for all prompts, or a list with one for each; default `get_default_sampling_params()`.
                Each prompt has one RequestOutput, whatever output_kind says.
            prompt_token_ids: instead of prompts, a list of token ids for each prompt, or one such list.
            use_tqdm: show progress on standard error: on a terminal a line that changes, elsewhere a line every 10
                seconds and a last one. (The name is vLLM's; tqdm is not used.)

        Returns the finished requests, in the order of the prompts. `error` says why a request could not go on.

        Raises ValueError or TypeError, before anything is generated, if a request is not valid (`add_request`). The
        error names the prompt by its place in the list.
        """
        requests = list_prompts(prompts, prompt_token_ids)
        params = one_each(sampling_params, len(requests))
        self._abort_all()  # an interrupt may have kept the last call from it
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, param) in enumerate(zip(requests, params, strict=True)):
                self._add(nth("prompt", i, len(requests)), prompt, param)
            own = set(self._request_ids)
            with Progress(len(requests), "Requests", shown=use_tqdm) as progress:
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
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | PathLike[str] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generate the answer to a conversation, or to each of a list of them, batched as `generate` does.

        Args:
            messages: one conversation, a list of dicts with a role and a content; or a list of conversations.
            sampling_params, use_tqdm: as in `generate`.
            chat_template: a Jinja template, or the path of its file, instead of the tokenizer's own template.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.

        Returns what `generate` returns; `prompt` is the text that the template made.

        Raises ValueError or TypeError, before anything is generated, as `render_chat` and `generate` do. The error
        names the conversation by its place in the list.
        """
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
                prompts.append(self._chat_prompt(conversation, template, add_generation_prompt))
            except (TypeError, ValueError) as error:
                raise (with_place(error, place) if place else error) from None
        return self.generate(prompts, sampling_params, None, use_tqdm)

    def _chat_prompt(self, messages: Any, template: str | None, add_generation_prompt: bool) -> Prompt:
        text = render_chat(self.get_tokenizer(), messages, template, add_generation_prompt)
        # The template has written the special tokens that a prompt begins with.
        token_ids = self.llm_engine.tokenize(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _add(self, place: str, prompt: Prompt, param: SamplingParams | None) -> None:
        request_id = f"llm-{self._num_requests}"
        self._num_requests += 1
        self._request_ids.append(request_id)  # first: the engine may hold no request that is not listed
        try:
            request = self.llm_engine.inputs.make_request(RequestArgs(request_id, prompt, param))
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


def one_each(params: SamplingParams | list[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if not isinstance(params, list):
        return [params] * count
    if len(params) != count:
        raise ArgumentError("sampling_params", f"one for all or one for each of {count} prompts", len(params))
    return list(params)

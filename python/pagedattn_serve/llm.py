"""Offline generation: a list of prompts in, a list of outputs out."""

from os import PathLike
from typing import Any

from tqdm import tqdm

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs, takes_options
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, with_place
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.requests.prompts import Prompt, split_prompts, without_array
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.text.chat_template import Message, load_chat_template, render_chat


class LLM:
    """A model with its engine, `llm_engine`. The arguments are those of `EngineArgs`.

    Raises as `LLMEngine` does.
    """

    @takes_options(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._num_requests = 0
        self._request_ids: list[str] = []  # of the current call

    def get_tokenizer(self) -> Any | None:
        """The tokenizer from transformers; None if the model's directory has none."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: the engine's, `LLMEngine.get_default_sampling_params`."""
        return self.llm_engine.get_default_sampling_params()

    def register_prefix(self, prefix: Prompt) -> int:
        """Compute a prefix that many prompts begin with, and keep it; `LLMEngine.register_prefix`, whose result and
        errors these are."""
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
            prompts: one prompt or a list of them, each in any of the forms that `LLMEngine.add_request` takes: a text,
                token ids, a dict with either. A list of ints is one prompt. Or else prompt_token_ids.
            sampling_params: one for all, or one a prompt; default `get_default_sampling_params()`. Whatever output_kind
                says, each prompt has one output.
            prompt_token_ids: one list of token ids a prompt, or that of a single one.
            use_tqdm: show progress on standard error.

        Returns:
            The finished requests, in the order of the prompts; one that could not go on says why in `error`.

        Raises ValueError or TypeError, before anything is generated, if a request is not valid (`add_request`); it
        names the prompt, by its place in the list.
        """
        requests = list_prompts(prompts, prompt_token_ids)
        params = one_each(sampling_params, len(requests))
        self._abort_all()  # where an interrupt did not let the last call do it
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, param) in enumerate(zip(requests, params, strict=True)):
                self._add(f"prompt {i} of {len(requests)}", prompt, param)
            own = set(self._request_ids)
            with tqdm(total=len(requests), desc="Requests", disable=not use_tqdm) as progress:
                while len(outputs) < len(requests):
                    stepped = self.llm_engine.step()  # somebody else's requests may be in the engine as well
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
            messages: dicts with a role and a content, in order; or a list of such lists.
            sampling_params: one for all, or one a conversation; default `get_default_sampling_params()`.
            use_tqdm: show progress on standard error.
            chat_template: Jinja, or the path of a file of it, instead of the tokenizer's own template.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.

        Returns:
            What `generate` does; `prompt` is the text that the template made.

        Raises ValueError or TypeError, before anything is generated, as `render_chat` and `generate` do; for a list of
        conversations it names the one, by its place.
        """
        if not isinstance(messages, list | tuple):
            raise ArgumentTypeError("messages", "a list of messages", type(messages).__name__)
        template = None if chat_template is None else load_chat_template(chat_template)
        if messages and isinstance(messages[0], list | tuple):
            places = [f"conversation {i} of {len(messages)}" for i in range(len(messages))]
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
        # The template has written what special tokens a prompt begins with.
        token_ids = self.llm_engine.tokenize(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _add(self, place: str, prompt: Prompt, param: SamplingParams | None) -> None:
        request_id = f"llm-{self._num_requests}"
        self._num_requests += 1
        self._request_ids.append(request_id)  # first, so that no request is in the engine without
        try:
            request = self.llm_engine.inputs.make_request(request_id, prompt, param)
            request.output_kind = RequestOutputKind.FINAL_ONLY
            self.llm_engine.queue_request(request)
        except (TypeError, ValueError) as error:
            self._request_ids.pop()  # if the id is taken, that request is somebody else's
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

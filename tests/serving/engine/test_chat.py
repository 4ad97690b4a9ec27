"""LLM.chat: a conversation is the prompt that its template makes, and nothing else."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TOKENIZER_SIZE, Checkpoint, make_model, make_tokenizer, put_bos_first
from engine_runs import completions
from tool_models import make_tool_model

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.llm import LLM
from pagedattn_serve.output_parsing.events import ParsedOutput
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FIRST = [{"role": "user", "content": "the cat"}]
SECOND = [
    {"role": "system", "content": "the mat"},
    {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "hat"}]},
]
PROMPTS = ["<s>user: the cat\nassistant:", "<s>system: the mat\nuser: the\nhat\nassistant:"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Of a tokenizer that puts <s> before every text, as its chat template does."""
    directory = tmp_path_factory.mktemp("chat")
    make_tokenizer(directory)
    put_bos_first(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    make_model("llama-gqa", vocab_size=TOKENIZER_SIZE).save_pretrained(directory)
    return LLM(directory, num_blocks=40)


def test_a_conversation_is_its_prompt(llm: LLM) -> None:
    for conversation, prompt in zip((FIRST, SECOND), PROMPTS, strict=True):
        [output] = llm.chat(conversation, GREEDY, use_tqdm=False)
        ids = llm.llm_engine.tokenize(prompt, add_special_tokens=False)
        assert (output.prompt, output.prompt_token_ids) == (prompt, ids)
        assert completions([output]) == completions(llm.generate([ids], GREEDY, use_tqdm=False))


def test_one_beginning_of_sequence(llm: LLM) -> None:
    [output] = llm.chat(FIRST, GREEDY, use_tqdm=False)
    assert llm.llm_engine.tokenize("the cat")[0] == 0, "the tokenizer puts one of its own before a text"
    assert output.prompt_token_ids.count(0) == 1 and output.prompt_token_ids[0] == 0


def test_conversations_come_back_in_order(llm: LLM) -> None:
    each = [llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in (FIRST, SECOND, FIRST)]
    together = llm.chat([FIRST, SECOND, tuple(FIRST)], GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    assert completions(together) == completions(each)


def test_params_of_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.chat([FIRST, SECOND], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    assert llm.chat(FIRST, use_tqdm=False)[0].finished


def test_another_template_and_no_generation_prompt(llm: LLM, tmp_path: Path) -> None:
    short = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "short.jinja").write_text(short)
    for template in (tmp_path / "short.jinja", short):
        outputs = llm.chat([FIRST, SECOND], GREEDY, use_tqdm=False, chat_template=template)
        assert [output.prompt for output in outputs] == ["the cat", "the matthe\nhat"]
        assert outputs[0].prompt_token_ids == llm.llm_engine.tokenize("the cat", add_special_tokens=False)
    [output] = llm.chat(FIRST, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "<s>user: the cat\n"


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "messages: expected one at least, got none"),
        ("hello", TypeError, "messages: expected a list of messages, got str"),
        (FIRST[0], TypeError, "messages: expected a list of messages, got dict"),
        (["hello"], TypeError, "messages[0]: expected a dict with role and content, got str"),
        ([[]], ValueError, "conversation 1 of 1: messages: expected one at least, got none"),
        ([FIRST, FIRST[0]], TypeError, "conversation 2 of 2: messages: expected a list of messages, got dict"),
        ([FIRST[0], FIRST], TypeError, "messages[1]: expected a dict with role and content, got list"),
        ([FIRST, [{"role": 1}]], TypeError, "conversation 2 of 2: messages[0].role: expected a string, got int"),
        (
            [FIRST, [FIRST[0], {"role": "user", "name": "b"}]],
            ValueError,
            "conversation 2 of 2: messages[1]: expected what the chat template writes for role 'user', got ",
        ),
        ([{"role": "user", "content": "\ud800"}], ValueError, "text: expected text that UTF-8 can write, got "),
        ([{"role": "user", "content": "x" * 200}], ValueError, "prompt 1 of 1: expected 1 to 127 tokens "),
    ],
)
def test_wrong_conversations(llm: LLM, messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert str(caught.value).startswith(message)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": {"max_tokens": 5}}, "prompt 1 of 1: sampling_params: expected SamplingParams, got dict"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget: expected an int, got '5' of type str"),
        ({"thinking_token_budget": True}, "thinking_token_budget: expected an int, got True of type bool"),
        ({"thinking_token_budget": -1}, "thinking_token_budget: expected an int >= 0, got -1"),
        (
            {"tool_call_parser": "hermess"},
            "tool_call_parser: expected one of auto, none, hermes, ",
        ),  # without tools, too
    ],
)
def test_wrong_arguments(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    """With a budget, which looks at the parameters before the engine does."""
    with pytest.raises((TypeError, ValueError)) as caught:
        llm.chat(FIRST, **{"thinking_token_budget": 5, "reasoning_parser": "qwen3"} | arguments)
    assert str(caught.value).startswith(message)


def test_what_is_no_output_of_chat(llm: LLM) -> None:
    outputs = llm.chat(FIRST, GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match=r"^output: expected a RequestOutput, .* got list$"):
        llm.parse_chat(outputs)  # type: ignore[arg-type]  # all of them, and not one
    with pytest.raises(TypeError, match=r"^continued: expected a string, got NoneType$"):
        llm.parse_chat(outputs[0], continued=None)  # type: ignore[arg-type]


def test_no_tokenizer_and_no_template(llama: Checkpoint, text_model: str) -> None:
    with pytest.raises(ValueError, match=r"^messages: expected none, as the model's directory has no tokenizer$"):
        LLM(llama.path, num_blocks=40).chat(FIRST)
    with pytest.raises(ValueError, match=r"^chat_template: expected one .*, as the model's tokenizer has none$"):
        LLM(text_model, num_blocks=40).chat(FIRST)


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call><think></think>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if think is defined %}<think>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def tool_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("tools")
    make_tool_model(directory, TOOL_TEMPLATE)
    return LLM(directory, num_blocks=256)


def test_calls_of_tools(tool_llm: LLM) -> None:
    """Held to the schema, wherever a call begins."""
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=1, seed=1, n=12, max_tokens=300, logit_bias={"272": 8})  # of <tool_call>
    [output] = tool_llm.chat(FIRST, params, use_tqdm=False, tools=TOOLS)
    parsed = tool_llm.parse_chat(output, TOOLS)
    calls = [call for each in parsed for call in each.calls]
    whole = [call for call in calls if call.arguments.endswith("}")]
    assert len(whole) > 6
    assert all(call.name == "add" and json.loads(call.arguments)["a"] in (1, 2) for call in whole)
    with pytest.raises(ValueError, match=r"^conversation 1 of 2: tools: expected none, as the model's chat template"):
        tool_llm.chat([FIRST, FIRST], tools=TOOLS, chat_template="<tool_call>{{ messages[0].content }}")


def test_which_tools_are_called(tool_llm: LLM) -> None:
    """A choice, and a bound of the thought before it, hold whatever the model would say."""
    pytest.importorskip("llguidance")
    tools = [*TOOLS, {"type": "function", "function": {"name": "stop"}}]
    named = {"type": "function", "function": {"name": "stop"}}
    params = SamplingParams(temperature=1, seed=1, n=4, max_tokens=200)
    for choice, names in (("required", {"add", "stop"}), (named, {"stop"}), ("none", set())):
        [output] = tool_llm.chat(
            FIRST, params, False, tools=tools, tool_choice=choice, thinking_token_budget=0, tool_call_parser="hermes"
        )
        parsed = tool_llm.parse_chat(output, tools)
        assert {call.name for each in parsed for call in each.calls} <= names
        assert all(each.calls for each in parsed) == (choice != "none")
    [output] = tool_llm.chat(
        FIRST, params, False, thinking_token_budget=3, chat_template_kwargs={"think": 1}, reasoning_parser="qwen3"
    )
    [end] = tool_llm.llm_engine.tokenize("</think>")
    assert all(end in completion.token_ids[:4] for completion in output.outputs)
    for choice, message in (
        ("stop", "expected auto, none, "),
        ({**named, "function": {"name": "a"}}, "expected names"),
    ):
        with pytest.raises(ValueError, match=f"^tool_choice: {message}"):
            tool_llm.chat(FIRST, params, tools=tools, tool_choice=choice)  # type: ignore[arg-type]
    for fields, message in (
        ({"tool_choice": "required"}, "^tool_choice: expected auto or none without tools"),
        ({"thinking_token_budget": 3, "reasoning_parser": "none"}, "^thinking_token_budget: expected none"),
        ({"tools": tools, "tool_call_parser": "other"}, "^tool_call_parser: expected one of "),
    ):
        with pytest.raises(ValueError, match=message):
            tool_llm.chat(FIRST, params, **fields)  # type: ignore[arg-type]


def test_a_budget_of_thoughts_whose_end_is_no_token(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^conversation 1 of 1: thinking_token_budget: .* </think>, is not one of"):
        llm.chat([FIRST], GREEDY, thinking_token_budget=3, reasoning_parser="qwen3")


def test_a_form_of_calls_that_is_not_known(llm: LLM) -> None:
    template = "{{ tools | tojson }}" + TEMPLATE
    with pytest.raises(ValueError, match=r"^tools: expected none, as the model's form of calls is not known"):
        llm.chat(FIRST, GREEDY, tools=TOOLS, chat_template=template)
    for tools, message in (
        ([{"type": "function"}], r"^tools\[0\]: expected a dict"),
        ([{"type": "function", "function": {"name": ""}}], r"^tools\[0\].function.name: expected letters, digits"),
        (TOOLS * 2, r"^tools\[1\].function.name: expected a name of its own, got 'add' again"),
        ({"a": 1}, r"^tools: expected a list of tools, got dict"),
        ([{"type": "function", "function": {"name": "a", "parameters": 5}}], r"parameters: expected a JSON schema"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            llm.chat(FIRST, GREEDY, tools=tools)  # type: ignore[arg-type]


def test_a_message_that_is_continued(llm: LLM, tool_llm: LLM) -> None:
    begun = [*FIRST, {"role": "assistant", "content": "on the"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    [output] = llm.chat(begun, GREEDY, **options)
    assert output.prompt == "<s>user: the cat\nassistant: on the"
    with pytest.raises(ValueError, match=r"^continue_final_message: expected False beside add_generation_prompt"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    output.outputs[0].text = "mat</think>hat"
    assert tool_llm.parse_chat(output, continued="<think>on the") == [ParsedOutput("hat", "mat")]
    assert llm.parse_chat(output) == [ParsedOutput("mat</think>hat")]


def test_the_demo_model_answers() -> None:
    llm = LLM(DEMO_MODEL, dtype="float32", num_blocks=40)
    [output] = llm.chat([{"role": "user", "content": "What is the with statement?"}], GREEDY, use_tqdm=False)
    assert output.prompt == "What is the with statement?\n\n"
    assert output.outputs[0].text.startswith('\nThe "with" statement')


def test_arguments_of_chat() -> None:
    parameters = list(inspect.signature(LLM.chat).parameters.values())[1:]
    assert [(each.name, each.default) for each in parameters] == [
        ("messages", inspect.Parameter.empty),
        ("sampling_params", None),
        ("use_tqdm", True),
        ("priority", None),
        ("chat_template", None),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("tools", None),
        ("tool_choice", None),
        ("tool_call_parser", "auto"),
        ("reasoning_parser", "auto"),
        ("thinking_token_budget", None),
        ("chat_template_kwargs", None),
        ("of_vllm", inspect.Parameter.empty),
    ]
    assert {each.kind for each in parameters[3:-1]} == {inspect.Parameter.KEYWORD_ONLY}  # vLLM has another order

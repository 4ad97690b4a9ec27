"""A conversation as a prompt: what the template sees, and what is refused before and by it."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.text.chat_template import check_template, load_chat_template, render_chat

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Alternating roles, as LLaMA 2's and Mistral's have it, and no tools.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
)
# What an assistant calls, and what the function answers.
CALLS = (
    "{% for m in messages %}{{ m.role }}({{ m.keys() | sort | join(',') }}){{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
# As Qwen's and LLaMA 3.2's: a loop over parts, unless the content is a text.
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
# As LLaVA's: parts alone.
PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
# As LLaMA 2's and Gemma's: what is not known is left out.
KNOWN = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content | trim }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content %}A{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The cat?"},
    {"role": "assistant", "content": "Sat."},
    {"role": "user", "content": "Where?"},
]


@pytest.fixture(scope="module")
def demo() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_roles_and_the_generation_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<|system|>Be brief.</s><|user|>The cat?</s><|assistant|>Sat.</s><|user|>Where?</s>"
    assert render_chat(tokenizer, TALK, CHATML) == f"{text}<|assistant|>"
    assert render_chat(tokenizer, TALK, CHATML, add_generation_prompt=False) == text
    assert render_chat(tokenizer, tuple(TALK), CHATML) == f"{text}<|assistant|>"


def in_parts(*texts: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text} for text in texts]}]


@given(parts=st.lists(st.text(max_size=5), max_size=4))
def test_parts_are_lines_where_a_template_wants_texts(tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> None:
    messages = in_parts(*parts)
    before = copy.deepcopy(messages)
    as_text = [{"role": "user", "content": "\n".join(parts)}]
    assert render_chat(tokenizer, messages, CHATML) == render_chat(tokenizer, as_text, CHATML)
    assert messages == before


@given(parts=st.lists(st.text(max_size=5), max_size=4))
@example(parts=["Key facts:", "Keys are."])
def test_parts_are_parts_where_a_template_walks_over_them(tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> None:
    text = f"<user>{''.join(parts)}"
    for template in (EITHER, PARTS):
        assert render_chat(tokenizer, in_parts(*parts), template) == text
        assert render_chat(tokenizer, [{"role": "user", "content": "".join(parts)}], template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ 'user: ' + m.content }}{% endfor %}",  # Python adds no list to a text
        "{% for m in messages %}user: {{ m.content | trim }}{% endfor %}",  # jinja writes a list as Python does
        "{% for m in messages %}{% if m.content is string %}user: {{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_templates_that_want_texts(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    assert render_chat(tokenizer, in_parts("a", "b"), template) == "user: a\nb"


def test_the_tokenizer_s_template_and_another(demo: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    own = render_chat(demo, TALK)
    assert own == "Be brief.\n\nThe cat?\n\nSat.\n\nWhere?\n\n"
    assert render_chat(demo, TALK, add_generation_prompt=False) == own.removesuffix("\n\n")
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    assert render_chat(demo, TALK, file) == render_chat(demo, TALK, str(file)) == render_chat(demo, TALK, CHATML) != own


def test_the_special_tokens_are_the_tokenizer_s(tokenizer: PreTrainedTokenizerBase) -> None:
    assert render_chat(tokenizer, TALK[1:], STRICT) == "<s>[user] The cat?[assistant] Sat.[user] Where?"


def test_fields_that_only_the_template_knows(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}]
    assert render_chat(tokenizer, messages, CALLS) == 'assistant(role,tool_calls){"name": "f", "arguments": {}}'
    answer = {"role": "tool", "content": "5", "tool_call_id": "a"}
    assert render_chat(tokenizer, [answer], CALLS) == "tool(content,role,tool_call_id)5"
    documents = {"role": "documents", "documents": [{"text": "the cat"}]}
    assert render_chat(tokenizer, [documents], "{{ messages[0].documents[0].text }}") == "the cat"


# ---- nothing is left out ---------------------------------------------------------------------------------------------


def test_a_developer_is_the_system_where_the_template_knows_no_developer(
    tokenizer: PreTrainedTokenizerBase, demo: PreTrainedTokenizerBase
) -> None:
    talk = [{"role": "developer", "content": "Be brief."}, *TALK[1:]]
    as_system = "[Be brief.]UThe cat?ASat.UWhere?"
    assert render_chat(tokenizer, talk, KNOWN) == render_chat(tokenizer, TALK, KNOWN) == as_system
    assert render_chat(demo, talk) == render_chat(demo, TALK)  # whose template refuses other roles
    assert render_chat(tokenizer, talk, CHATML).startswith("<|developer|>Be brief.</s>")
    with pytest.raises(ValueError, match=r"^messages\[1\].content: expected what .* for role 'developer', got what it"):
        render_chat(tokenizer, [TALK[1], talk[0]], KNOWN)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("message", "blamed"),
    [
        ({"role": "system", "content": "a"}, "messages[3].content"),  # in the middle
        ({"role": "tool", "content": "a", "tool_call_id": "b"}, "messages[3].content"),
        ({"role": "function", "content": "a", "name": "f"}, "messages[3].content"),
        ({"role": "critic", "content": "a"}, "messages[3].content"),
        ({"role": "critic", "content": "The cat?"}, "messages[3].content"),  # which stands elsewhere in the text
        ({"role": "critic", "content": ""}, "messages[3].content"),
        ({"role": "critic", "content": []}, "messages[3].content"),
        (in_parts("a", "b", role="critic")[0], "messages[3].content[0]"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "messages[3].tool_calls[0]"),
        ({"role": "assistant", "content": "a", "tool_calls": [CALL]}, "messages[3].tool_calls[0]"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[3].function_call"),
        ({"role": "assistant", "content": "a", "refusal": "b"}, "messages[3].refusal"),
        ({"role": "assistant", "content": None, "audio": {"id": "b"}}, "messages[3].audio"),
        ({"role": "user", "name": "b"}, "messages[3]"),
        ({"role": "documents", "documents": [{"text": "b"}]}, "messages[3]"),
    ],
    ids=str,
)
def test_what_a_template_leaves_out_is_named(
    tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], blamed: str
) -> None:
    with pytest.raises(ValueError) as error:
        render_chat(tokenizer, [*TALK[:3], message, TALK[3]], KNOWN)
    expected = f"what the chat template writes for role {message['role']!r}, got what it leaves out"
    assert str(error.value) == f"{blamed}: expected {expected}"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "a", "name": "Ann"}, "Ua"),
        ({"role": "user", "content": ""}, "U"),
        ({"role": "assistant", "content": ""}, ""),  # which the template writes if there is a text
        ({"role": "assistant", "content": "a", "tool_calls": [], "refusal": None, "audio": None}, "Aa"),
        ({"role": "assistant", "content": "<think>b</think>a"}, "Aa"),
        ({"role": "assistant", "content": "a</think>"}, "A"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "ANo."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "ANo."),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]},
            "Aa",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}]}, "Ua"),
        ({"role": "user", "content": "  "}, "U  "),
    ],
    ids=str,
)
def test_what_a_template_writes(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], text: str) -> None:
    assert render_chat(tokenizer, [message], KNOWN) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[-1].content }}", None),
        ("{% for m in messages %}{{ m.content[:25] }}{% endfor %}", "Be brief.The cat?Sat.Where?"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "BE BRIEF.THE CAT?SAT.WHERE?"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", None),
    ],
)
def test_templates_that_change_what_they_write(
    tokenizer: PreTrainedTokenizerBase, template: str, text: str | None
) -> None:
    if text is not None:
        assert render_chat(tokenizer, TALK, template) == text
    else:
        with pytest.raises(ValueError, match=r"^messages\[0\].content: expected what the chat template writes for"):
            render_chat(tokenizer, TALK, template)


def test_a_text_costs_two_renderings(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has the marks. More come only if a template leaves something out, or takes another form."""
    calls = []
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda messages, **_: calls.append(1) or str(messages))
    render_chat(tokenizer, TALK, CHATML)
    assert len(calls) == 2


BESIDE_CALLS = (  # as Hermes' and Mistral's: text or calls
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LOOP = [
    {"role": "user", "content": "The cat?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "Sat.", "tool_call_id": "a"},
]


def test_text_beside_calls_may_be_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """As the server has written both, and gets them with the next turn of a loop."""
    text = '<user>The cat?<assistant>{}{{"name": "f", "arguments": {{"a": 1}}}}<tool>Sat.'
    in_one_part = [LOOP[0], {**LOOP[1], **in_parts("I look.")[0], "role": "assistant"}, LOOP[2]]
    for messages in (LOOP, in_one_part):
        assert render_chat(tokenizer, messages, BESIDE_CALLS) == text.format("")
        with_text = BESIDE_CALLS.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.content if m.tool_calls }}")
        assert render_chat(tokenizer, messages, with_text) == text.format("I look."), "parts are no Python"
        parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}"
        parts += "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
        assert render_chat(tokenizer, messages, parts) == text.format("I look."), "another form leaves out nothing"
    without_text = BESIDE_CALLS.replace("{% else %}", "{% elif m.role != 'assistant' %}")
    with pytest.raises(ValueError, match=r"^messages\[1\].content: expected what "):
        render_chat(tokenizer, [LOOP[0], {"role": "assistant", "content": "I look."}], without_text)


LATE_SYSTEM = (  # as Mistral's: before the last message of a user, if the conversation ends there
    "{% for m in messages if m.role not in ('system', 'developer') %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)


def test_a_system_message_may_be_left_out_until_a_user_speaks(tokenizer: PreTrainedTokenizerBase) -> None:
    system = {"role": "system", "content": "Be brief."}
    call = '{"name": "f", "arguments": {"a": 1}}'
    for role in ("system", "developer"):
        loop = [{**system, "role": role}, *LOOP]
        assert render_chat(tokenizer, loop[:2], LATE_SYSTEM) == "[Be brief.]<user>The cat?"
        assert render_chat(tokenizer, loop, LATE_SYSTEM) == f"<user>The cat?<assistant>I look.{call}<tool>Sat."
    never = LATE_SYSTEM.replace("[{{ messages[0].content }}]", "[]")
    beside_first = LATE_SYSTEM.replace("loop.last", "loop.last and loop.first")  # message of a user
    for messages, template, blamed in (
        ([system, *LOOP], never, 0),
        ([*LOOP, system, LOOP[2]], LATE_SYSTEM, 3),  # behind the last message of a user
        ([system, *LOOP[1:]], LATE_SYSTEM, 0),  # no user has spoken
        ([system, *LOOP, *LOOP], beside_first, 0),
        ([system, *LOOP], "{% if messages | length < 3 %}{{ no.more }}{% endif %}" + never, 0),
    ):
        with pytest.raises(ValueError, match=rf"^messages\[{blamed}\].content: expected what .* for role 'system'"):
            render_chat(tokenizer, messages, template)


# ---- calls -----------------------------------------------------------------------------------------------------------


def calling(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}]


CALLING = "{% for call in messages[0].tool_calls %}{{ call.function.name }}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CALLING + "{{ call.function.arguments | tojson }}{% endfor %}", 'f{"a": "é"}'),
        (
            CALLING + "{% for k, v in call.function.arguments.items() %}:{{ k }}='{{ v }}'{% endfor %}{% endfor %}",
            "f:a='é'",
        ),
        # texts, as DeepSeek's have it
        (CALLING + "{{ '(' + call.function.arguments + ')' }}{% endfor %}", 'f({"a": "é"})'),
        (CALLING + "{{ call.function.arguments }}{% endfor %}", 'f{"a": "é"}'),
        (
            CALLING + "{% if call.function.arguments is string %}text{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}{% endfor %}",
            'f{"a": "é"}',
        ),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}], ids=["text", "object"])
def test_arguments_of_a_call(tokenizer: PreTrainedTokenizerBase, template: str, text: str, arguments: Any) -> None:
    messages = calling(arguments)
    before = copy.deepcopy(messages)
    assert render_chat(tokenizer, messages, template) == text
    assert messages == before


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_a_call_without_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Any) -> None:
    for end in (" | tojson", " + ''"):
        template = CALLING + "{{ call.function.arguments" + end + " }}{% endfor %}"
        assert render_chat(tokenizer, calling(arguments), template) == "f{}"
    assert render_chat(tokenizer, calling(arguments), CALLING + "{% endfor %}") == "f"


def test_arguments_that_a_template_leaves_out(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments: expected what"):
        render_chat(tokenizer, calling('{"a": 1}'), CALLING + "{% endfor %}")


@pytest.mark.parametrize(
    ("calls", "error", "message"),
    [
        (
            calling('{"a": '),
            ValueError,
            ".tool_calls[0].function.arguments: expected an object as JSON, got what ",
        ),
        (calling('{"a": NaN}'), ValueError, ".tool_calls[0].function.arguments: expected an object as JSON, got what "),
        (calling("[" * 10**5), ValueError, ".tool_calls[0].function.arguments: expected an object as JSON, got what "),
        (calling("[1]"), ValueError, ".tool_calls[0].function.arguments: expected an object as JSON, got JSON of list"),
        (calling([1]), TypeError, ".tool_calls[0].function.arguments: expected an object, or its JSON, got list"),
        (calling(5), TypeError, ".tool_calls[0].function.arguments: expected an object, or its JSON, got int"),
        ([{"role": "a", "tool_calls": 5}], TypeError, ".tool_calls: expected a list of calls, got int"),
        ([{"role": "a", "tool_calls": [5]}], TypeError, ".tool_calls[0]: expected a dict with function, got int"),
        ([{"role": "a", "tool_calls": [{}]}], TypeError, ".tool_calls[0].function: expected a dict with name and arg"),
        (
            [{"role": "a", "tool_calls": [{"function": {}}]}],
            TypeError,
            ".tool_calls[0].function.name: expected a string, got NoneType",
        ),
        ([{"role": "a", "tool_calls": []}], ValueError, ".content: expected a text, got none"),
        (
            [{"role": "a", "function_call": {"name": "f", "arguments": "{"}}],
            ValueError,
            ".function_call.arguments: expected an object as JSON, got what is no JSON",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_calls(tokenizer: PreTrainedTokenizerBase, calls: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        render_chat(tokenizer, calls, CALLS)
    assert str(caught.value).startswith(f"messages[0]{message}")


def test_reasoning_effort_is_for_templates_that_know_it(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{{ reasoning_effort or 'medium' }}" + CHATML
    talk = [{"role": "user", "content": "a"}]
    assert render_chat(tokenizer, talk, template, False, "high") == "high<|user|>a</s>"
    assert render_chat(tokenizer, talk, template, False) == "medium<|user|>a</s>"
    assert render_chat(tokenizer, talk, CHATML, False, "high") == "<|user|>a</s>"


# ---- tools, and a message that goes on -------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get", "get_all")]


def test_tools_are_for_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHATML
    talk = [{"role": "user", "content": "get a"}]
    assert render_chat(tokenizer, talk, template, False, tools=TOOLS) == "get get_all <|user|>get a</s>"
    assert render_chat(tokenizer, talk, template, False, tools=[]) == "<|user|>get a</s>"
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: expected no tools, which are an argument of"):
        render_chat(tokenizer, talk, template, variables={"tools": TOOLS}, tools=TOOLS)


@pytest.mark.parametrize("written", ["", "{{ tools[0].function.name }}", "{{ tools | length }} get get_all"])
def test_a_template_that_leaves_tools_out(tokenizer: PreTrainedTokenizerBase, written: str) -> None:
    """None, all but the first, and their names, which stand there anyway."""
    talk = [{"role": "user", "content": "get get_all"}]
    with pytest.raises(ValueError, match=r"^tools: expected none, as the model's chat template does not write them"):
        render_chat(tokenizer, talk, written + CHATML, tools=TOOLS)


def test_a_template_that_looks_at_names_of_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% if tools[0].function.name != 'get' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    assert render_chat(tokenizer, [{"role": "user", "content": "a"}], template, False, tools=TOOLS)


def test_a_message_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    text = render_chat(tokenizer, talk, CHATML, False, continue_final_message=True)
    assert text == "<|user|>a</s><|assistant|>b "
    with pytest.raises(ValueError, match=r"^continue_final_message: expected False beside add_generation_prompt"):
        render_chat(tokenizer, talk, CHATML, continue_final_message=True)


def test_both_names_of_a_thought(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}: {{ m.content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        assert render_chat(tokenizer, [{"role": "assistant", "content": "b", name: "hm"}], template) == "hm: b"
    both = {"reasoning": "a", "reasoning_content": "hm"}  # the name that templates know counts
    assert render_chat(tokenizer, [{"role": "assistant", "content": "b", **both}], template) == "hm: b"


def test_parts_that_are_thoughts(tokenizer: PreTrainedTokenizerBase) -> None:
    """They are what an assistant thought, as in a field. Nobody else has any."""
    template = "{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}"
    within = [{"type": "text", "text": "c"}]
    thoughts = [{"type": "thinking", "thinking": "b"}, {"type": "thinking", "thinking": within, "closed": True}]
    message = {"role": "assistant", "content": [thoughts[0], thoughts[1], {"type": "text", "text": "a"}]}
    assert render_chat(tokenizer, [message], template) == "(b\nc)a"
    with pytest.raises(ValueError, match=r"^messages\[0\].content\[0\].type: expected "):
        render_chat(tokenizer, [{"role": "user", "content": thoughts}], template)
    with pytest.raises(TypeError, match=r"^messages\[0\].content\[0\].thinking: expected "):
        render_chat(tokenizer, [{"role": "assistant", "content": [{"type": "thinking"}]}], template)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "role", [{"role": "tool", "content": "5", "tool_call_id": "a"}, {"role": "critic", "content": "No."}]
)
def test_a_role_that_the_demo_model_does_not_have(demo: PreTrainedTokenizerBase, role: dict[str, str]) -> None:
    with pytest.raises(ValueError) as error:
        render_chat(demo, [*TALK, role])
    reason = f"role: expected system, user or assistant, got {role['role']}"
    assert str(error.value) == f"chat_template: cannot render the messages: {reason}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (STRICT, "Conversation roles must alternate user/assistant/user/assistant/..."),
        ("{{ messages[0].nothing.more }}", "UndefinedError: 'dict object' has no attribute 'nothing'"),
        ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end of template."),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'list' object"),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{% include 'other' %}", "TypeError: no loader for this environment specified"),
        ("{{ range(10 ** 9) | list }}", "OverflowError: Range too big."),
    ],
)
def test_a_template_that_refuses(tokenizer: PreTrainedTokenizerBase, template: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        render_chat(tokenizer, TALK, template)
    assert str(error.value).startswith(f"chat_template: cannot render the messages: {message}")


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "messages: expected one at least, got none"),
        ("hello", TypeError, "messages: expected a list of messages, got str"),
        (TALK[0], TypeError, "messages: expected a list of messages, got dict"),
        ([TALK[0], "hello"], TypeError, "messages[1]: expected a dict with role and content, got str"),
        ([{"content": "a"}], TypeError, "messages[0].role: expected a string, got NoneType"),
        ([{"role": 5, "content": "a"}], TypeError, "messages[0].role: expected a string, got int"),
        ([{"role": "", "content": "a"}], ValueError, "messages[0].role: expected a role, got ''"),
        ([{"role": "user"}], ValueError, "messages[0].content: expected a text, got none"),
        ([{"role": "user", "content": None}], ValueError, "messages[0].content: expected a text, got none"),
        (
            [{"role": "user", "content": 5}],
            TypeError,
            "messages[0].content: expected a string or a list of parts, got int",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            ValueError,
            "messages[0].content[1].type: expected \"text\", the only kind of content here, got 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"text": "a"}]}],
            ValueError,
            'messages[0].content[0].type: expected "text", the only kind of content here, got None',
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            TypeError,
            "messages[0].content[0].text: expected a string, got NoneType",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            TypeError,
            "messages[0].content[0]: expected a dict with type and text, got str",
        ),
    ],
)
def test_wrong_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        render_chat(tokenizer, messages, CHATML)
    assert str(caught.value) == message


def test_no_template_and_no_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"^chat_template: expected one .*, as the model's tokenizer has none$"):
        render_chat(tokenizer, TALK)
    with pytest.raises(ValueError, match=r"^messages: expected none, as the model's directory has no tokenizer$"):
        render_chat(None, TALK, CHATML)
    with pytest.raises(TypeError, match=r"^add_generation_prompt: expected a bool, got 1 of type int$"):
        render_chat(tokenizer, TALK, CHATML, add_generation_prompt=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (5, TypeError, "chat_template: expected a text or a path, got int"),
        (
            "nowhere.jinja",
            ValueError,
            "chat_template: expected Jinja, or a file of it, got nowhere.jinja: No such file",
        ),
        ("", ValueError, "chat_template: expected Jinja, or a file of it, got : "),
        ("a\0b", ValueError, "chat_template: expected Jinja, or a file of it, got a\0b: "),
        (Path("no{where}"), ValueError, "chat_template: expected Jinja, or a file of it, got no{where}: No such file"),
    ],
)
def test_a_template_that_is_none(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        load_chat_template(given)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(ValueError, match=r"^chat_template: expected Jinja.*codec can't decode"):
        load_chat_template(tmp_path / "a.jinja")


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("a\n{{ x", "line 2: unexpected end of template"),
        ("{{ x | no_filter }}", "line 1: No filter named 'no_filter'"),
        ("{{" + "(" * 10**5, "one that is nested too deeply"),
    ],
)
def test_what_is_no_template(template: str, got: str) -> None:
    with pytest.raises(ValueError, match=f"^chat_template: expected a template in Jinja, got {got}"):
        check_template(template)


@pytest.mark.parametrize("template", [CHATML, STRICT, CALLS, EITHER, PARTS])
def test_what_transformers_reads_is_a_template(template: str) -> None:
    """What it adds to Jinja, too."""
    check_template("{% for a in b %}{% break %}{% endfor %}{% generation %}" + template + "{% endgeneration %}")

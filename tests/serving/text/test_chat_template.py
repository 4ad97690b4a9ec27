"""A conversation as a prompt: what the template sees, and what is refused before and by it."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.text.chat_template import load_chat_template, render_chat

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
CALLS = "{% for m in messages %}{{ m.role }}{{ m.keys() | sort | join(',') }}{{ m.tool_calls }}{% endfor %}"
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


@given(parts=st.lists(st.text(max_size=5), max_size=4))
def test_parts_are_lines_of_one_text(tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> None:
    in_parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
    before = copy.deepcopy(in_parts)
    as_text = [{"role": "user", "content": "\n".join(parts)}]
    assert render_chat(tokenizer, in_parts, CHATML) == render_chat(tokenizer, as_text, CHATML)
    assert in_parts == before


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
    messages = [{"role": "assistant", "content": None, "refusal": None, "tool_calls": [1, 2]}]
    assert render_chat(tokenizer, messages, CALLS) == "assistantrole,tool_calls[1, 2]"
    answer = {"role": "tool", "content": "5", "tool_call_id": "a"}
    assert render_chat(tokenizer, [answer], CALLS) == "toolcontent,role,tool_call_id"


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

"""LLM.chat: a conversation is the prompt that its template makes, and nothing else."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TOKENIZER_SIZE, Checkpoint, completions, make_model, make_tokenizer, put_bos_first

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.llm import LLM
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


def test_no_tokenizer_and_no_template(llama: Checkpoint, text_model: str) -> None:
    with pytest.raises(ValueError, match=r"^messages: expected none, as the model's directory has no tokenizer$"):
        LLM(llama.path, num_blocks=40).chat(FIRST)
    with pytest.raises(ValueError, match=r"^chat_template: expected one .*, as the model's tokenizer has none$"):
        LLM(text_model, num_blocks=40).chat(FIRST)


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
        ("chat_template_kwargs", None),
        ("of_vllm", inspect.Parameter.empty),
    ]
    assert {each.kind for each in parameters[3:-1]} == {inspect.Parameter.KEYWORD_ONLY}  # vLLM has another order

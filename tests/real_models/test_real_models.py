"""Real models, `make test-models`: the tokens of transformers' and llama.cpp's own reading of the same files; a chat;
an object held by a schema; what the formats of weights and caches cost in perplexity, as a table."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import xllamacpp
from real_models import ALICE, WORK, gemma3, in_fp32, logits_of, microformer, smollm2, text_tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedattn_serve import LLM, SamplingParams, StructuredOutput
from pagedattn_serve.text.tokenizer import load_tokenizer

FILES = {"smollm2": smollm2, "gemma3": gemma3}
PROMPTS = ["The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n", "Water boils at 100"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
TEXTS = [
    *PROMPTS,
    "  two  spaces\n\n\nand lines\t",
    "naïve café, 2,048 €; 日本語 🙂",
    "<|im_start|>user\nhi<|im_end|>",
    "1234567",
]


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> Path:
    WORK.mkdir(parents=True, exist_ok=True)
    return FILES[request.param]()


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, kv_cache_memory=256 << 20, **options)


def generated(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def greedily(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """As GREEDY: no token ends an output."""
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_tokens_of_transformers(file: Path) -> None:
    """The weights in fp32, as both read them from the file: all tokens are equal, and all weights."""
    directory = in_fp32(file)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
    del ours
    llm = make_llm(directory)
    prompts = [text_tokens(llm, prompt) for prompt in PROMPTS]
    for prompt, tokens in zip(prompts, generated(llm, prompts), strict=True):
        assert tokens == greedily(theirs, prompt)


class LlamaCpp:
    """llama.cpp's server in this process, one sequence at a time, on as many threads as torch has."""

    def __init__(self, file: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        self.server = xllamacpp.Server(params)

    def tokenize(self, text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = Request(f"{self.server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def generate(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Greedy tokens, and their logprobs."""
        fields = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        answer = self.server.handle_completions(fields)
        tokens = answer["choices"][0]["logprobs"]["content"]
        return [token["id"] for token in tokens], [token["logprob"] for token in tokens]


@pytest.fixture
def llama_cpp(file: Path) -> Iterator[LlamaCpp]:
    yield LlamaCpp(file)


def test_tokens_of_a_text(file: Path, llama_cpp: LlamaCpp) -> None:
    """The tokenizers of the two files are byte-level BPE and SentencePiece."""
    tokenizer: Any = load_tokenizer(file, None)
    for text in [*TEXTS, ALICE.read_text()]:
        assert tokenizer(text, add_special_tokens=False).input_ids == llama_cpp.tokenize(text), text


# What comes of rounding: llama.cpp rounds rows to 8 bits in groups of 32, with weights as the file has them; our layers
# round them as a whole, but for large elements, and the weights to a scale for each output feature.
MEAN_DIFFERENCE, LARGEST_DIFFERENCE, EQUAL = 0.15, 1.2, 0.9


def test_tokens_of_llama_cpp(file: Path, llama_cpp: LlamaCpp, capsys: pytest.CaptureFixture[str]) -> None:
    """After each beginning of what llama.cpp says: whether our next token is the same, and how its logprob differs."""
    llm = make_llm(file)
    equal, differences = [], []
    for text in PROMPTS:
        prompt = text_tokens(llm, text)
        tokens, logprobs = llama_cpp.generate(prompt)
        logits = logits_of(llm, prompt + tokens)[len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        equal.append((logits.argmax(-1) == torch.tensor(tokens)).float())
        differences.append((ours - torch.tensor(logprobs)).abs())
    share, difference = torch.cat(equal).mean().item(), torch.cat(differences)
    with capsys.disabled():
        print(f"\n{file.name}: {share:.1%} of llama.cpp's tokens; logprobs differ by {difference.mean():.4f}, ", end="")
        print(f"{difference.max():.3f} at most")
    assert share >= EQUAL and difference.mean() < MEAN_DIFFERENCE and difference.max() < LARGEST_DIFFERENCE


def test_chat() -> None:
    llm = make_llm(smollm2())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert answer.prompt is not None and answer.prompt.endswith("<|im_start|>assistant\n")
    assert "Paris" in answer.outputs[0].text and "<|im_end|>" not in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_a_call_that_a_schema_holds() -> None:
    """As a tool's call is: a name of two, and arguments."""
    place = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["get_weather", "get_time"]},
            "arguments": place | {"additionalProperties": False},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    form = StructuredOutput(json=schema, whitespace_pattern="")
    request = "What is the weather in Paris? Answer with a call of get_weather(city) or get_time(city), as JSON."
    params = SamplingParams(temperature=0, max_tokens=64, structured_output=form)
    [answer] = make_llm(smollm2()).chat([{"role": "user", "content": request}], params, use_tqdm=False)
    assert json.loads(answer.outputs[0].text) == {"name": "get_weather", "arguments": {"city": "Paris"}}


# SmolLM2's own template knows no tools. This one writes them as Hermes does.
TOOL_TEMPLATE = """\
{{- '<|im_start|>system\\nYou are a helpful assistant. You may call these functions:\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool.function | tojson }}
{% endfor %}</tools>
A call is a JSON object: <tool_call>
{"name": <function>, "arguments": <object>}
</tool_call><|im_end|>
{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}
{{- '<|im_start|>assistant\\n' }}"""


def test_a_call_of_a_tool() -> None:
    """The model chooses which, and with what: it has to call one."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    descriptions = {"get_weather": "The weather of a city.", "get_time": "The time in a city."}
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": words, "parameters": city | {"additionalProperties": False}},
        }
        for name, words in descriptions.items()
    ]
    llm = make_llm(smollm2())
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    [output] = llm.chat(
        question, params, use_tqdm=False, tools=tools, tool_choice="required", chat_template=TOOL_TEMPLATE
    )
    [said] = llm.parse_chat(output, tools, TOOL_TEMPLATE)
    assert (said.calls[0].name, json.loads(said.calls[0].arguments)) == ("get_weather", {"city": "Paris"})


def test_microformer() -> None:
    """pytorch_model.bin, and words of its own: the tokens of transformers' `generate`."""
    directory = microformer()
    llm = make_llm(directory)
    samples = ["<bos> g__Bacteroides g__Prevotella", "<bos>", "<bos> g__Escherichia"]
    outputs = llm.generate(samples, GREEDY, use_tqdm=False)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for output in outputs:
        prompt = output.prompt_token_ids
        assert prompt[0] == 2 and 1 not in prompt  # <bos>, and no word that is unknown
        assert output.outputs[0].token_ids == greedily(theirs, prompt)
        assert all(word.startswith(("g__", "<")) for word in output.outputs[0].text.split())


@pytest.mark.parametrize("name", [*FILES, "microformer"])
def test_the_command(name: str) -> None:
    model = FILES[name]() if name in FILES else microformer()
    prompt = PROMPTS[0] if name in FILES else "<bos> g__Bacteroides"
    command = [sys.executable, "-m", "pagedattn_serve", "generate", str(model), "--prompt", prompt, "--max-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.startswith(prompt) and len(done.stdout) > len(prompt) + 4


# ---- the table of docs/serving.md -----------------------------------------------------------------------------------

# By name: whether the model is the file itself, and options. The first is what all others are compared with.
FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "fp32, the file's weights dequantized": (False, {}),
    "the file as it is": (True, {}),
    "int8": (False, dict(quantization="int8")),
    "int4": (False, dict(quantization="int4")),
    "int8 cache": (False, dict(kv_cache_dtype="int8")),
    "fp8 (e4m3) cache": (False, dict(kv_cache_dtype="fp8")),
    "fp8 (e5m2) cache": (False, dict(kv_cache_dtype="fp8_e5m2")),
}
LIMITS = {"the file as it is": 1.05, "int8": 1.05, "int4": 1.4, "int8 cache": 1.01, "fp8 (e4m3) cache": 1.05}


def test_perplexity(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, reference = in_fp32(file), None
    lines = [f"\n| {file.name} | perplexity | change | same next token |", "|---|---|---|---|"]
    for name, (is_file, options) in FORMS.items():
        llm = make_llm(file if is_file else directory, **options)
        token_ids = text_tokens(llm, ALICE.read_text())
        logits = logits_of(llm, token_ids)[:-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:]))
        perplexity, likeliest = math.exp(loss.item()), logits.argmax(-1)
        if reference is None:
            reference = perplexity, likeliest
            lines.append(f"| {name} | {perplexity:.2f} | | |")
            continue
        change, same = perplexity / reference[0] - 1, (likeliest == reference[1]).float().mean().item()
        lines.append(f"| {name} | {perplexity:.2f} | {change:+.2%} | {same:.1%} |")
        assert perplexity < LIMITS.get(name, 1.1) * reference[0], name
    with capsys.disabled():
        print("\n".join(lines))

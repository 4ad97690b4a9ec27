"""A model that calls tools and answers as a good one would, with no luck in it: its chat template decides what it says.

The template ends the prompt with a script of SCRIPT_LEN tokens, and the model copies: each token that it writes is the
one that stands SCRIPT_LEN before.
"""

import json
from pathlib import Path

import torch
from checkpoints import EOS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPT_LEN = 256
HEAD_SIZE = 64
MAX_LEN = 32768  # a token is a byte, and clients have long system messages
ANSWER = {"city": "Rome", "rains": True}
# What stands in the names of tools with which clients take a typed answer: pydantic-ai, smolagents, the AI SDK with
# /v1/messages, and others, which name the type.
ANSWERING_TOOLS = ("final_result", "final_answer", "json", "Weather")
# Calls are Hermes', thoughts Qwen's. The model asks for the weather of two cities, one after the other, and answers.
SCRIPT_TEMPLATE = """\
{%- macro called(name, arguments) -%}
<tool_call>
{"name": {{ name | tojson }}, "arguments": {{ arguments | tojson }}}
</tool_call>
{%- endmacro %}
{%- set history %}
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ called(call.function.name, call.function.arguments) }}{% endfor %}
{% endfor %}
{%- endset %}
{{- history }}
{%- if add_generation_prompt %}
{%- set names = tools | default([], true) | map(attribute='function.name') | list %}
{%- set num_results = history.count('rain in ') %}
{%- set script %}
{%- if 'get_weather' in names and num_results < 2 %}
{%- if num_results == 0 and enable_thinking is not false %}<think>
Perhaps in Paris.
</think>

{% endif %}{{ called('get_weather', {'city': ['Paris', 'Rome'][num_results]}) }}
{%- else %}
{%- set ns = namespace(answering='') %}
{%- for name in names %}{% for known in ANSWERING_TOOLS if known in name %}{% set ns.answering = name %}
{%- endfor %}{% endfor %}
{%- set answer = {'answer': ANSWER | tojson} if ns.answering == 'final_answer' else ANSWER %}
{{- called(ns.answering, answer) if ns.answering else answer | tojson }}
{%- endif %}
{%- endset %}
{{- script ~ '</s>' * (SCRIPT_LEN - script | length) }}{% endif %}"""
for name in ("ANSWERING_TOOLS", "ANSWER", "SCRIPT_LEN"):
    SCRIPT_TEMPLATE = SCRIPT_TEMPLATE.replace(name, json.dumps(globals()[name]))


def make_scripted_model(directory: Path, chat_template: str = SCRIPT_TEMPLATE) -> None:
    """Write the model, and its tokenizer of bytes."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=chat_template)
    fast.save_pretrained(directory)
    _make_copier(len(fast), fast.eos_token_id).save_pretrained(directory)


def _make_copier(vocab_size: int, eos_token_id: int) -> LlamaForCausalLM:
    """A LLaMA whose one layer adds to each token the one SCRIPT_LEN - 1 before it, which the head then reads.

    A channel for each token says which it is, and the last channel is 1 for all. Keys and queries come of this one, so
    where a head looks depends on nothing but the distance: the angle between them is 0 in each pair at this distance.
    """
    num_heads = vocab_size // HEAD_SIZE + 1
    size = num_heads * HEAD_SIZE
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=HEAD_SIZE,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    model = LlamaForCausalLM(config)
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE)
    angles = -(SCRIPT_LEN - 1) * frequencies
    weights = model.model.layers[0].self_attn
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, size))
        model.model.embed_tokens.weight[:, -1] = 1.0
        weights.q_proj.weight[:, -1] = 2 * torch.cat([angles.cos(), angles.sin()]).repeat(num_heads)
        weights.k_proj.weight[:, -1] = 2 * torch.cat([angles * 0 + 1, angles * 0]).repeat(num_heads)
        weights.v_proj.weight.copy_(torch.eye(size))
        weights.o_proj.weight.copy_(10 * torch.eye(size))
        model.lm_head.weight.copy_(10 * torch.eye(vocab_size, size))
    return model

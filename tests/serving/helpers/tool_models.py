"""A tokenizer with the tokens of every form of calls and thoughts, and a model that has it."""

from pathlib import Path

from checkpoints import EOS, make_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Calls are Hermes', thoughts Qwen's.
TOOL_TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call></tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
# Some are special tokens, which texts leave out unless they are asked for.
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
IN_TEXT = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Tokens that lie across the places where a schema begins or ends.
PIECES = ("}}", '"}', "},", '{"', ": {", "</", ">\n")


def make_tool_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, PIECES, and the tokens above."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for piece in PIECES:
        [(symbols, _)] = to_bytes.pre_tokenize_str(piece)
        for end in range(1, len(symbols)):
            merges.append((symbols[:end], symbols[end]))
            vocabulary.append(symbols[: end + 1])
    vocabulary = list(dict.fromkeys(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = to_bytes, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (EOS, *SPECIAL)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in IN_TEXT])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def make_tool_model(directory: Path, chat_template: str) -> None:
    """A random model with this tokenizer. Only a grammar makes it write what a parser can read."""
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    eos = tokenizer.eos_token_id
    make_model("llama-gqa", vocab_size=len(tokenizer), eos_token_id=eos, max_position_embeddings=2048).save_pretrained(
        directory
    )

"""The tokenizer of a GGUF file, made of the tokens, merges or scores, and switches in its metadata."""

from collections.abc import Callable
from typing import Any

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "▁"  # as SentencePiece writes a space

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before merges, by `tokenizer.ggml.pre`: one pattern after the other, as llama.cpp has them.
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo"), (GPT2_WORDS,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), (LLAMA3_WORDS,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), (QWEN2_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2_WORDS)),
    "tekken": (TEKKEN_WORDS,),
}
# A word that is a token stays. And a text begins with the BOS token if the file does not say whether, as in llama.cpp.
OF_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})


def load_gguf_tokenizer(file: GgufFile) -> Any | None:
    """A tokenizer of transformers; None if the file has none. Raises ArgumentError for a kind that cannot be made."""
    if (kind := file.get("tokenizer.ggml.model", str, None)) is None:
        return None
    if kind not in KINDS:
        raise ArgumentError("tokenizer.ggml.model", f"{' or '.join(KINDS)} in {file.path}{INSTEAD}", repr(kind))
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens = file.texts("tokenizer.ggml.tokens")
    types = one_each(file, "token_type", tokens) if "tokenizer.ggml.token_type" in file.metadata else [1] * len(tokens)
    of_type = {
        wanted: [text for text, type in zip(tokens, types, strict=True) if type == wanted]
        for wanted in (CONTROL, USER_DEFINED)
    }
    tokenizer = KINDS[kind](file, tokens, {*of_type[CONTROL], *of_type[USER_DEFINED]})
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in of_type[CONTROL]])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in of_type[USER_DEFINED]])
    adds_bos = kind == "llama" or file.get("tokenizer.ggml.pre", str, None) in OF_LLAMA3
    set_ends(tokenizer, file, tokens, adds_bos)
    named = {
        f"{name}_token": tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := token_id_of(file, key, tokens)) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.get("tokenizer.chat_template", str, None),
        clean_up_tokenization_spaces=False,
        **named,
    )


INSTEAD = ", or a directory with the model's own tokenizer beside the model"


def token_id_of(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.get(key, int, None)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ArgumentError(key, f"one of the {len(tokens)} tokens of {file.path}", token_id)
    return token_id


def one_each(file: GgufFile, name: str, tokens: list[str]) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    found: list[Any] = file.get(key, list)
    if len(found) != len(tokens):
        raise ArgumentError(key, f"one for each of {len(tokens)} tokens in {file.path}", len(found))
    return found


def set_ends(tokenizer: Any, file: GgufFile, tokens: list[str], adds_bos: bool) -> None:
    """The tokens that a text begins and ends with. adds_bos: if the file does not say so."""
    from tokenizers.processors import TemplateProcessing

    places = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token_id = token_id_of(file, name, tokens)
        adds = file.get(f"tokenizer.ggml.add_{name}_token", bool, default) and token_id is not None
        places.append([(tokens[token_id], token_id)] if adds and token_id is not None else [])
    first, last = places
    if first or last:
        single = [*(text for text, _ in first), "$A", *(text for text, _ in last)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*first, *last])


# ---- byte-level BPE, as GPT-2's -------------------------------------------------------------------------------------


def byte_level(file: GgufFile, tokens: list[str], taken_whole: set[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = file.get("tokenizer.ggml.pre", str, "none")
    if words not in WORDS:
        raise ArgumentError("tokenizer.ggml.pre", f"one of {', '.join(WORDS)} in {file.path}{INSTEAD}", repr(words))
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in file.texts("tokenizer.ggml.merges"))]
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words in OF_LLAMA3)
    except Exception as error:  # of no other type
        raise ArgumentError(
            "tokenizer.ggml.merges", f"pairs of tokens that make tokens in {file.path}", error
        ) from None
    tokenizer = Tokenizer(model)
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in WORDS[words]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---- BPE of SentencePiece, as LLaMA's -------------------------------------------------------------------------------


def sentencepiece(file: GgufFile, tokens: list[str], taken_whole: set[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = one_each(file, "scores", tokens)
    unknown = token_id_of(file, "unknown", tokens)
    # Of each text the first token: some vocabularies have a text twice.
    vocabulary = {text: token_id for token_id, text in reversed(list(enumerate(tokens)))}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of_scores(vocabulary, scores, taken_whole),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
    )
    begins_with_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    to_spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), to_spaces]) if begins_with_space else to_spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins_with_space else steps)
    return tokenizer


def merges_of_scores(vocabulary: dict[str, int], scores: list[float], taken_whole: set[str]) -> list[tuple[str, str]]:
    """Each way to make a token of two, the tokens with the highest scores first, as SentencePiece merges them.

    taken_whole: tokens that are found in a text before, and are not merged.
    """
    mergeable = vocabulary.keys() - taken_whole
    merges: list[tuple[float, int, int, str, str]] = []
    for text in mergeable:
        token_id = vocabulary[text]
        for end in range(1, len(text)):
            left, right = text[:end], text[end:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[token_id], token_id, vocabulary[left], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


# By `tokenizer.ggml.model`. Each takes the tokens, and which of them are taken whole.
KINDS: dict[str, Callable[[GgufFile, list[str], set[str]], Any]] = {"gpt2": byte_level, "llama": sentencepiece}

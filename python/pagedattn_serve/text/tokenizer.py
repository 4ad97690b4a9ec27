"""The tokenizer of a model's directory, or of a GGUF file."""

from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.errors import ArgumentError, ArgumentFileError
from pagedattn_serve.loading.directory import find_directory, find_gguf, read_json, read_plain_config
from pagedattn_serve.loading.gguf_file import GgufFile
from pagedattn_serve.text.gguf_tokenizer import load_gguf_tokenizer

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
# Names of the class that is all in tokenizer.json; the second since transformers 5.
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(
    model: str | PathLike[str], tokenizer: str | PathLike[str] | None, allow_download: bool = False
) -> Any | None:
    """The tokenizer of the directory `tokenizer`, or of the model's directory; None if the model's directory has none.
    A GGUF file may be in place of either directory. Raises as `tokenizer_directory` does, and ValueError if a tokenizer
    cannot be loaded."""
    directory = tokenizer_directory(model, tokenizer, allow_download)
    if directory is None:
        return None
    if directory.is_file():
        return load_gguf_tokenizer(GgufFile.open(directory))
    try:
        return _from_pretrained(directory)
    except Exception as error:  # of any type, mostly without the name of the file
        for file in sorted(directory.glob("*.json")):
            read_json(file)
        if "trust_remote_code" in str(error):
            expected, got = "a tokenizer that transformers has", f"code of its own in {directory}, which is not run"
            raise ArgumentError("tokenizer", expected, got) from None
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer: cannot load that of {directory}: {type(error).__name__}: {reason}") from None


def tokenizer_directory(
    model: str | PathLike[str], tokenizer: str | PathLike[str] | None, allow_download: bool = False
) -> Path | None:
    """The directory or GGUF file `tokenizer`, or the model's; None if the model's directory has no tokenizer. Raises
    ArgumentFileError if the directory `tokenizer` has none."""
    argument, path = ("model", model) if tokenizer is None else ("tokenizer", tokenizer)
    if (file := find_gguf(argument, path)) is not None:
        return file
    directory = find_directory(argument, path, allow_download)
    if directory is not None and any((directory / name).is_file() for name in FILES):
        return directory
    if tokenizer is None:
        return None
    raise ArgumentFileError("tokenizer", f"a directory with one of {', '.join(FILES)}", tokenizer)


def _from_pretrained(directory: Path) -> Any:
    """What AutoTokenizer makes of a directory, without imports that most directories do not need.

    For the model_type alone, AutoTokenizer imports the class of the model's config, and with it torch's compiler: two
    seconds of CPU time. If tokenizer_config.json names the tokenizer's class, any config with the model_type does.

    Code in the directory is not run, and nobody is asked whether it may be.
    """
    fields, names = (
        read_json(directory / name) if (directory / name).is_file() else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    is_named = isinstance(names.get("tokenizer_class"), str) and "auto_map" not in names
    if not is_named or read_plain_config(fields) is None:
        from transformers import AutoTokenizer  # here, as importing transformers takes longer than all of this package

        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if fields["model_type"] == "llama" and names["tokenizer_class"] in GENERIC:
        from transformers import PreTrainedTokenizerFast  # half of what AutoTokenizer imports

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer, PretrainedConfig

    looked_at = {name: fields[name] for name in ("model_type", "model_name") if name in fields}
    config = PretrainedConfig(name_or_path=str(directory), **looked_at)
    return AutoTokenizer.from_pretrained(directory, config=config, trust_remote_code=False)


def turn_end_token_ids(tokenizer: Any | None) -> set[int]:
    """The token that ends a turn of a chat: the end-of-sequence token of a tokenizer with a chat template. Many models
    are trained for chats under the config.json of the model they came from, whose end-of-sequence token is another."""
    if tokenizer is None or not tokenizer.chat_template or tokenizer.eos_token_id is None:
        return set()
    return {tokenizer.eos_token_id}


def bad_word_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word where a text begins with it, and where it follows a space, as in vLLM. Most tokenizers
    give the two places different ids. Raises ValueError for a word without token ids."""
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.lstrip() or word
        spellings = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (bare, f" {bare}")]
        if not any(spellings):
            raise ArgumentError("bad_words", "words that the tokenizer has tokens for", repr(word))
        found.update(dict.fromkeys(filter(None, spellings)))
    return tuple(found)

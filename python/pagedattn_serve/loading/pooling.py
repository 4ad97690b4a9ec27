"""How a checkpoint wants its hidden states pooled: as sentence-transformers writes it beside an embedding model; or as
the last layer of a reranker (`...ForSequenceClassification` with one label)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from pagedattn_serve.config import parse_json
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.checkpoint_files import OpenFiles, open_checkpoint
from pagedattn_serve.loading.directory import config_fields, read_json
from pagedattn_serve.loading.gguf_file import GgufFile, is_gguf
from pagedattn_serve.loading.loader import CLASSIFIERS
from pagedattn_serve.pooling_params import Pooling, PoolingMode

MODES: tuple[PoolingMode, ...] = ("lasttoken", "mean")
# Of pooling_type in a GGUF file. 0 is llama.cpp's number for a model that is not said to be pooled.
GGUF_MODES: dict[int, PoolingMode] = {0: "lasttoken", 1: "mean", 3: "lasttoken"}
# The names of modes in files of earlier sentence-transformers, each true or false.
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_pooling(directory: Path) -> Pooling | ArgumentError:
    """What modules.json says, or the last layer of a reranker, or a GGUF file. Another model has its last token pooled
    and normalised.

    Returns an error, for those who ask for embeddings, for modules or ways of pooling that are not here. Raises
    ValueError for files that cannot be read.
    """
    try:
        if is_gguf(directory):
            return _pooling_of_gguf(GgufFile.open(directory))
        fields = config_fields(directory)
        if (fields.get("architectures") or [""])[0] in CLASSIFIERS:
            return _score_of(directory)
        if (directory / "modules.json").is_file():
            return _pooling_of(directory, directory / "modules.json")
        return Pooling()
    except ArgumentError as error:
        return error


def _pooling_of_gguf(file: GgufFile) -> Pooling:
    name = file.architecture
    kind = file.get(f"{name}.pooling_type", int, 0)
    if kind not in GGUF_MODES:
        expected = f"pooling by lasttoken (3) or mean (1) in {file.path}"
        raise ArgumentError("model", expected, f"{name}.pooling_type {kind}")
    return Pooling(GGUF_MODES[kind])


def _pooling_of(directory: Path, file: Path) -> Pooling:
    kinds = []
    mode: PoolingMode | None = None
    for module in _read_modules(file):
        kind, folder = str(module.get("type", "none")).rpartition(".")[2], directory / str(module.get("path") or "")
        kinds.append(kind)
        if kind == "Pooling":
            mode = _read_mode(folder / "config.json")
        if kind == "Transformer" and folder != directory:
            raise ArgumentError("model", f"a Transformer with the path '' in {file}", repr(module["path"]))
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or mode is None:
        expected = f"Transformer, Pooling and perhaps Normalize in {file}"
        raise ArgumentError("model", expected, ", ".join(kinds) or "none")
    of_texts = directory / "sentence_bert_config.json"
    if of_texts.is_file() and read_json(of_texts).get("do_lower_case"):
        raise ArgumentError("model", "one whose texts stay as they are", f"do_lower_case true in {of_texts}")
    return Pooling(mode, normalizes="Normalize" in kinds)


def _score_of(directory: Path) -> Pooling:
    activation = _activation_of(directory)
    if activation not in ("Sigmoid", "Identity"):
        raise ArgumentError("model", "a reranker with the activation Sigmoid or Identity", activation)
    fields = config_fields(directory)
    _check_end(directory, fields.get("pad_token_id"))
    with OpenFiles() as open_files:
        tensors = open_checkpoint(directory, open_files)
        weight = tensors["score.weight"]() if "score.weight" in tensors else None
        found = list(weight.shape) if isinstance(weight, Tensor) else "none"
        if not isinstance(weight, Tensor) or weight.dim() != 2 or found != [1, fields.get("hidden_size", found[1])]:
            raise ArgumentError("model", "a reranker with one label: score.weight [1, hidden_size]", found)
        return Pooling("lasttoken", False, weight[0].double().numpy(), activation == "Sigmoid")


def _check_end(directory: Path, pad_token_id: int | None) -> None:
    """Raise ArgumentError if the tokenizer ends pairs of texts with the token of padding: transformers scores the token
    before, and we the last one."""
    file = directory / "tokenizer.json"
    if pad_token_id is None or not file.is_file():
        return
    from tokenizers import Tokenizer  # here, as no other model needs it

    if Tokenizer.from_file(str(file)).encode("a", "b").ids[-1:] == [pad_token_id]:
        expected = f"a reranker whose pairs end in another token than that of padding, in {file}"
        raise ArgumentError("model", expected, f"pad_token_id {pad_token_id}")


def _activation_of(directory: Path) -> str:
    """The class that a score goes through, from the first of the places where sentence-transformers has written it."""
    fields, file = config_fields(directory), directory / "config_sentence_transformers.json"
    own = read_json(file) if file.is_file() else {}
    of_config = fields.get("sentence_transformers") or {}
    if not isinstance(of_config, dict):
        name = f"{directory / 'config.json'}: sentence_transformers"
        raise ValueError(f"{name}: expected a JSON object, got {of_config!r:.80}")
    older = fields.get("sbert_ce_default_activation_function")
    name = own.get("activation_fn") or of_config.get("activation_fn") or older or "Sigmoid"
    return str(name).rpartition(".")[2]


def _read_modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON list, got {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{file}: expected a list of objects, got {modules!r:.80}")
    return modules


def _read_mode(file: Path) -> PoolingMode:
    if not file.is_file():
        raise ArgumentError("model", f"pooling by {' or '.join(MODES)} in {file}", "no such file")
    fields = read_json(file)
    modes: Any = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in SWITCHES.items() if fields.get(name)] or ["mean"]
    names = modes if isinstance(modes, list) else [modes]
    for mode in MODES:
        if names == [mode]:
            return mode
    raise ArgumentError("model", f"pooling by {' or '.join(MODES)} in {file}", ", ".join(map(str, names)))

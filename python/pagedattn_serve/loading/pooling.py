"""How a checkpoint wants its hidden states pooled: as sentence-transformers writes it beside an embedding model; or as
the last layer of a reranker (`...ForSequenceClassification` with one label)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from pagedattn_serve.config import parse_json
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.checkpoint_files import OpenFiles, open_checkpoint
from pagedattn_serve.loading.directory import config_fields, read_json
from pagedattn_serve.loading.gguf_file import is_gguf
from pagedattn_serve.loading.loader import CLASSIFIERS
from pagedattn_serve.pooling_params import Pooling, PoolingMode

MODES: tuple[PoolingMode, ...] = ("lasttoken", "mean")
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
    """What modules.json says, or the last layer of a reranker. Another model has its last token pooled and normalised.

    Returns an error, for those who ask for embeddings, for modules or ways of pooling that are not here, and for a
    model whose tokens see those after them. Raises ValueError for files that cannot be read.
    """
    if is_gguf(directory):
        return Pooling()
    fields = config_fields(directory)
    try:
        if fields.get("is_causal", True) is False:
            expected, found = "one whose tokens see only those before them", "is_causal false in config.json"
            raise ArgumentError("model", expected, found)
        if (fields.get("architectures") or [""])[0] in CLASSIFIERS:
            return _score_of(directory)
        if (directory / "modules.json").is_file():
            return _pooling_of(directory, directory / "modules.json")
        return Pooling()
    except ArgumentError as error:
        return error


def _pooling_of(directory: Path, file: Path) -> Pooling:
    kinds = []
    mode: PoolingMode | None = None
    for module in _read_modules(file):
        kind, path = str(module.get("type", "none")).rpartition(".")[2], str(module.get("path", ""))
        kinds.append(kind)
        if kind == "Pooling":
            mode = _read_mode(directory / path / "config.json")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or mode is None:
        expected = f"Transformer, Pooling and perhaps Normalize in {file}"
        raise ArgumentError("model", expected, ", ".join(kinds) or "none")
    return Pooling(mode, normalizes="Normalize" in kinds)


def _score_of(directory: Path) -> Pooling:
    activation = _activation_of(directory)
    if activation not in ("Sigmoid", "Identity"):
        raise ArgumentError("model", "a reranker with the activation Sigmoid or Identity", activation)
    with OpenFiles() as open_files:
        tensors = open_checkpoint(directory, open_files)
        weight = tensors["score.weight"]() if "score.weight" in tensors else None
        if not isinstance(weight, Tensor) or weight.dim() != 2 or len(weight) != 1:
            found = "none" if weight is None else list(weight.shape)
            raise ArgumentError("model", "a reranker with one label: score.weight [1, hidden_size]", found)
        return Pooling("lasttoken", False, weight[0].double().numpy(), activation == "Sigmoid")


def _activation_of(directory: Path) -> str:
    """The class that a score goes through, from the first of the places where sentence-transformers has written it."""
    fields, file = config_fields(directory), directory / "config_sentence_transformers.json"
    own = read_json(file) if file.is_file() else {}
    of_config = fields.get("sentence_transformers") or {}
    older = fields.get("sbert_ce_default_activation_function")
    name = own.get("activation_fn") or of_config.get("activation_fn") or older or "Sigmoid"
    return str(name).rpartition(".")[2]


def _read_modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON list, got {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{file}: expected a list of objects")
    return modules


def _read_mode(file: Path) -> PoolingMode:
    fields = read_json(file)
    modes: Any = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in SWITCHES.items() if fields.get(name)] or ["mean"]
    names = modes if isinstance(modes, list) else [modes]
    for mode in MODES:
        if names == [mode]:
            return mode
    raise ArgumentError("model", f"pooling by {' or '.join(MODES)} in {file}", ", ".join(map(str, names)))

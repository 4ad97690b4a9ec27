"""Where a checkpoint lies, its JSON files, and what its config.json says, read without transformers.

The class of a config imports half of transformers, and with it torch's compiler: two seconds of CPU time. So what is
plain is read here, into the values that `AutoConfig` gives. All else is left to `AutoConfig`, with its defaults, its
checks and its messages: a field that is missing, that is of another type or stands there twice, and what few models
have.
"""

from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import SimpleNamespace, UnionType
from typing import Any

from pagedattn_serve.config import parse_json
from pagedattn_serve.errors import ArgumentError, ArgumentFileError, ArgumentOSError, ArgumentTypeError, shown
from pagedattn_serve.loading.gguf_file import SUFFIX, GgufFile, is_gguf
from pagedattn_serve.loading.gguf_model import gguf_config

# What is downloaded of a repository: files beside the weights, and of the weights the first kind that there is.
BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
POOLING_FILES = "*_Pooling/config.json", "*_Normalize/config.json"  # of sentence-transformers, in folders


def find_directory(argument: str, path: str | PathLike[str], allow_download: bool = False) -> Path | None:
    """The directory `path`, with "~" expanded; or that of the config.json `path`; or the snapshot of the repository
    `path` in Hugging Face's cache; or None. Without allow_download the network is never asked. Raises TypeError, with
    the name of the argument, for what is not a path; ArgumentOSError for what cannot be downloaded."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(argument, "a directory as a string or a path", type(path).__name__)
    directory = Path(path).expanduser()
    try:
        is_there = directory.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ArgumentOSError(argument, "a directory", f"{shown(str(path))} ({error.strerror})") from None
    if is_there:
        return directory
    if directory.name == "config.json" and directory.is_file():
        return directory.parent
    if str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:  # no name of a repository
        return None
    from huggingface_hub import snapshot_download  # here, as the import takes long and most models are directories
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if allow_download:
        return download(argument, str(path))
    try:
        # Others may have left out files that nobody needs here. Without the pattern such a snapshot is an error.
        return Path(snapshot_download(str(path), local_files_only=True, allow_patterns=["config.json"]))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def download(argument: str, name: str) -> Path:
    """The snapshot of a repository of Hugging Face, with the files that are missing in the cache downloaded: configs,
    tokenizer, and the weights in one format. Raises ArgumentOSError, which says why, if that cannot be done."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        files = HfApi().list_repo_files(name)
        weights = next((each for each in WEIGHTS if any(Path(file).match(each) for file in files)), WEIGHTS[0])
        wanted = [file for file in files if "/" not in file and any(map(Path(file).match, (*BESIDE_WEIGHTS, weights)))]
        return Path(snapshot_download(name, allow_patterns=[*wanted, *POOLING_FILES]))
    except Exception as error:  # of any type: those of the library that it speaks HTTP with, too
        reason = " ".join(str(error).split())
        raise ArgumentOSError(argument, "a repository that can be downloaded", f"{name} ({reason})") from None


def model_directory(model: str | PathLike[str], allow_download: bool = False) -> Path:
    """The directory that `find_directory` finds, or a GGUF file, which stands for one. Raises ArgumentFileError if the
    directory has no config.json, or if there is no such file."""
    if (file := find_gguf("model", model)) is not None:
        return file
    directory = find_directory("model", model, allow_download)
    if directory is not None and (directory / "config.json").is_file():
        return directory
    advice = ""
    if directory is not None and (files := sorted(file.name for file in directory.glob(f"*{SUFFIX}"))):
        advice = f", where a file of it can be the model: {', '.join(files[:8])}"
    if directory is None and str(model).count("/") == 1 and not str(model).startswith((".", "/", "~")):
        advice = f" (a repository of Hugging Face is downloaded with `hf download {model}`, or with allow_download)"
    raise ArgumentFileError("model", "a directory with a config.json", f"{model or 'an empty text'}{advice}")


def find_gguf(argument: str, path: str | PathLike[str]) -> Path | None:
    """The GGUF file of this path, with "~" expanded; None for a path that means something else. Raises
    ArgumentFileError, with the name of the argument, for the path of a GGUF file that is not there."""
    if not isinstance(path, str | PathLike) or not is_gguf(file := Path(path).expanduser()):
        return None
    if not file.is_file():
        raise ArgumentFileError(argument, "a GGUF file that exists", path)
    return file


def config_fields(model: Path) -> dict[str, Any]:
    """The fields of config.json, or what a GGUF file says in its place. Raises ValueError, with the file's name, for a
    file that cannot be read."""
    return gguf_config(GgufFile.open(model)) if is_gguf(model) else read_json(model / "config.json")


def directory_to_write(path: str | PathLike[str]) -> Path:
    """The directory, with "~" and links resolved. Raises ArgumentError for one that cannot be replaced in the end,
    and ArgumentOSError for one beside which nothing can be written."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError("out", "a directory as a string or a path", type(path).__name__)
    out = Path(path).expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError("out", "a directory that is empty or does not exist", f"{out}, which is in use")
    if not out.parent.is_dir():
        raise ArgumentError("out", "a directory within one that exists", out)
    if out.is_mount():
        raise ArgumentError("out", "a directory that is no mount point, such as one within it", out)
    try:
        TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent).cleanup()
    except OSError as error:
        raise ArgumentOSError("out", "a directory that can be written", f"{out} ({error.strerror})") from None
    return out


def prefix_cache_directory(path: str | PathLike[str]) -> Path:
    """The directory, with "~" expanded; it is made if it is not there, for this user alone. Raises ArgumentOSError for
    one in which nothing can be written."""
    directory = Path(path).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ArgumentOSError(
            "prefix_cache_dir", "a directory that can be written", f"{path} ({error.strerror})"
        ) from None
    return directory


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, with the file's name, if the file holds no object."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON object, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


_ALL: dict[str, Any] = {"vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int}
_LLAMA = _ALL | {
    "intermediate_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "hidden_act": str,
    "tie_word_embeddings": False,
}
# What models read, by model_type. A type: the field must be there. True, False or a number: what a field has that is
# missing. None: an int or null or missing.
FIELDS: dict[str, dict[str, type | UnionType | int | None]] = {
    "llama": _LLAMA | {"num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA | {"num_key_value_heads": int, "head_dim": None, "sliding_window": int | None},
    "qwen2": _LLAMA | {"num_key_value_heads": int, "head_dim": None, "use_sliding_window": False},
    "qwen3": _LLAMA
    | {"num_key_value_heads": int, "head_dim": int, "attention_bias": False, "use_sliding_window": False},
    "gpt2": _ALL
    | {
        "max_position_embeddings": int,
        "n_inner": None,
        "activation_function": str,
        "layer_norm_epsilon": float,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "opt": _ALL
    | {
        "max_position_embeddings": int,
        "ffn_dim": int,
        "word_embed_proj_dim": int,
        "activation_function": str,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    "bloom": _ALL
    | {
        "seq_length": None,
        "layer_norm_epsilon": float,
        "apply_residual_connection_post_layernorm": False,
        "pretraining_tp": 1,
        "slow_but_exact": False,
        "tie_word_embeddings": True,
    },
}
# Other names of fields in files.
_OTHER_NAMES = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    "bloom": {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
}
# Another file, values for each layer, heads that turn in part.
_NOT_PLAIN = {"configuration_files", "per_layer_config", "partial_rotary_factor"}
_DTYPES = (None, "float32", "float16", "bfloat16")
_MISSING = object()


def read_plain_config(fields: dict[str, Any]) -> SimpleNamespace | None:
    """What a model of FIELDS reads of a config.json, as attributes: the names and values are those that `AutoConfig`
    gives, but the dtype is a name. None for a file that is left to `AutoConfig`."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FIELDS or fields.keys() & _NOT_PLAIN:
        return None
    other_names = _OTHER_NAMES.get(model_type, {})
    named = {other_names.get(name, name): value for name, value in fields.items()}
    dtype = fields.get("torch_dtype") if fields.get("dtype") is None else fields["dtype"]
    if len(named) < len(fields) or dtype not in _DTYPES:
        return None
    config = SimpleNamespace(model_type=model_type, architectures=fields.get("architectures"), dtype=dtype)
    for name, rule in FIELDS[model_type].items():
        kind: type | UnionType
        if isinstance(rule, int):
            value, kind = named.get(name, rule), type(rule)
        elif rule is None:
            value, kind = named.get(name), int | None
        else:
            value, kind = named.get(name, _MISSING), rule
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return None
        setattr(config, name, value)
    if model_type in ("qwen2", "qwen3"):
        if not _has_no_windows(config, fields.get("layer_types")):
            return None
    elif "layer_types" in fields:  # which make another model of Mistral, for transformers
        return None
    if model_type in ("llama", "mistral", "qwen2", "qwen3") and not _complete(config, fields):
        return None
    return config


def _has_no_windows(config: SimpleNamespace, layer_types: Any) -> bool:
    if config.use_sliding_window or not isinstance(layer_types, list | None):
        return False
    return layer_types is None or layer_types.count("full_attention") == len(layer_types) == config.num_hidden_layers


def _complete(config: SimpleNamespace, fields: dict[str, Any]) -> bool:
    """Add what follows from other fields, for LLaMA and what differs from it by a switch; and what `models.rope` reads.
    Returns whether these fields are plain."""
    config.num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    config.rope_parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    config.rope_theta = fields.get("rope_theta", 10000.0)
    config.original_max_position_embeddings = fields.get("original_max_position_embeddings")
    return (
        config.hidden_size % config.num_attention_heads == config.head_dim % 2 == 0  # else it may refuse them
        and not (fields.get("rope_parameters") and fields.get("rope_scaling"))
        and isinstance(config.rope_parameters, dict)
        and not any(isinstance(value, dict) for value in config.rope_parameters.values())  # one for each type of layer
        and isinstance(config.rope_theta, int | float)
        and config.rope_theta > 0
    )

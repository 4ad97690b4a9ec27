"""Where a checkpoint lies, and its JSON files."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.errors import ArgumentTypeError


def find_directory(argument: str, path: str | PathLike[str]) -> Path | None:
    """The directory `path`, with "~" expanded. Or the snapshot of the repository `path` in Hugging Face's cache. Or
    None. The network is never asked. Raises TypeError, with the name of the argument, for what is not a path."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(argument, "a directory as a string or a path", type(path).__name__)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # here, as the import takes long and most models are directories
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def model_directory(model: str | PathLike[str]) -> Path:
    """The directory that `find_directory` finds. Raises FileNotFoundError if it has no config.json."""
    directory = find_directory("model", model)
    if directory is not None and (directory / "config.json").is_file():
        return directory
    message = f"model: expected a directory with a config.json, got {model}"
    if directory is None and str(model).count("/") == 1 and not str(model).startswith((".", "/", "~")):
        message += f" (a repository of Hugging Face is downloaded with `hf download {model}`)"
    raise FileNotFoundError(message)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, with the file's name, if the file holds no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON object, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content

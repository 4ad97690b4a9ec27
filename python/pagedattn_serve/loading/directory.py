"""Where a checkpoint lies, and its JSON files."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.errors import ArgumentError, ArgumentFileError, ArgumentTypeError


def find_directory(argument: str, path: str | PathLike[str]) -> Path | None:
    """The directory `path`, with "~" expanded. Or the snapshot of the repository `path` in Hugging Face's cache. Or
    None. The network is never asked. Raises TypeError, with the name of the argument, for what is not a path."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(argument, "a directory as a string or a path", type(path).__name__)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:  # no name of a repository
        return None
    from huggingface_hub import snapshot_download  # here, as the import takes long and most models are directories
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def model_directory(model: str | PathLike[str]) -> Path:
    """The directory that `find_directory` finds. Raises ArgumentFileError if it has no config.json."""
    directory = find_directory("model", model)
    if directory is not None and (directory / "config.json").is_file():
        return directory
    advice = ""
    if directory is None and str(model).count("/") == 1 and not str(model).startswith((".", "/", "~")):
        advice = f" (a repository of Hugging Face is downloaded with `hf download {model}`)"
    raise ArgumentFileError("model", "a directory with a config.json", f"{model or 'an empty text'}{advice}")


def directory_to_write(path: str | PathLike[str]) -> Path:
    """The directory, with "~" and links resolved. Raises ArgumentError for one that cannot be replaced in the end."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError("out", "a directory as a string or a path", type(path).__name__)
    out = Path(path).expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError("out", "a directory that is empty or does not exist", f"{out}, which is in use")
    if not out.parent.is_dir():
        raise ArgumentError("out", "a directory within one that exists", out)
    if out.is_mount():
        raise ArgumentError("out", "a directory that is no mount point, such as one within it", out)
    return out


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, with the file's name, if the file holds no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected a JSON object, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content

"""The fields of a quantization_config in config.json: where it is, and what a field may be."""

from pathlib import Path
from typing import Any

from pagedattn_serve.loading.directory import config_fields


def quantization_config(directory: Path) -> Any:
    """What config.json says of how weights are quantized; None if it says nothing."""
    fields = config_fields(directory)
    return fields.get("quantization_config", fields.get("compression_config"))  # the older name of compressed-tensors


def expect(config: dict[str, Any], name: str, *allowed: Any, default: Any = ()) -> Any:
    """That of `allowed` which a field is equal to, as 4.0 is to 4. By default the field must be there."""
    value = config.get(name, default)
    if value not in allowed:
        got = "none" if value == () else repr(value)
        raise ValueError(f"quantization_config: {name}: expected {' or '.join(map(str, allowed))}, got {got:.80}")
    return allowed[allowed.index(value)]


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object. If the field is null or not there, the object is empty."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config: {name}: expected an object, got {value!r:.80}")
    return value

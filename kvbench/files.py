"""Files that are whole at any moment, and content in JSON's own types."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """The same content in JSON's own types: tuples become lists, paths strings, non-finite floats None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars as well as arrays
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def to_json(content: Mapping[str, Any]) -> str:
    """Indented JSON text of an object, by the rules of `plain`."""
    return json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk; {} if it is absent or no JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

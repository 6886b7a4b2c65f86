"""Files that are complete at any moment, walking folders that change meanwhile, and JSON's own types."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbench.errors import NO_SPACE, UserError

NOT_WRITABLE = (*NO_SPACE, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, also after a crash."""
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """`.NAME.1a2b3c4d.tmp` beside `path`: where content is written before it gets its name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_synced(path: Path, data: bytes) -> None:
    """Create a file whose content is on the disk when this returns. Raises FileExistsError if it exists."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing_to(folder: Path, what: str = "results folder") -> Iterator[None]:
    """Raise UserError, one line that names the folder, where the block cannot write because of the disk or its rights.

    What was written before stays complete.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        advice = "make room" if error.errno in NO_SPACE else "choose a folder that can be written"
        raise UserError(
            f"{what} {str(folder)!r} cannot be written ({error.strerror}); {advice} and type the same command again"
        ) from error


def find_files(root: Path, *names: str) -> list[Path]:
    """Files at or below `root` with one of these names, sorted.

    Folders whose name begins with a dot are not entered, and neither are links to folders. A folder that vanishes
    meanwhile is skipped.
    """
    found = []
    for folder, folders, files in os.walk(root):  # os.walk skips what vanished; Path.rglob raises up to Python 3.12
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, file) for file in files if file in names]
    return sorted(found)


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


def parse_json(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError for anything else, nesting too deep to be read included."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk; {} if the file is absent or holds no JSON object."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}

"""What identifies a local checkpoint: a hash of every file that can change a prompt, an answer or a number.

Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvbench.files import read_json, write_atomic
from kvbench.models.gguf import weights_files
from kvbench.offline import cache_folder

JSON_FILES = ("config.json", "generation_config.json")
"""Hashed without the version of the library that wrote them. The second names the tokens that end an answer."""

TEXT_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map*",
    "added_tokens*",
    "*.jinja",
    "*.tiktoken",
    "spiece*",
    "sentencepiece*",
    "additional_chat_templates/*",
    "chat_template*",
)
"""What turns text into tokens."""

REMEMBERED = 2**20
"""Hashes of files of at least this many bytes are remembered."""


def weights_fingerprint(path: Path) -> str:
    """12 hex digits that change when a model folder or a GGUF file changes.

    Every byte of the weights is hashed once; the hash is remembered in the cache folder until the file's inode, size
    or time of change differ.
    """
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(file_hash(path).encode())
        return digest.hexdigest()[:12]
    for name in JSON_FILES:
        if (path / name).is_file():
            content = json.loads((path / name).read_text(encoding="utf-8"))
            if isinstance(content, dict):
                content.pop("transformers_version", None)
            digest.update(f"{name}:{json.dumps(content, sort_keys=True)};".encode())
    for file in (*text_files(path), *weights_files(path)):
        digest.update(f"{file.relative_to(path)}:{file_hash(file)};".encode())
    return digest.hexdigest()[:12]


def text_files(folder: Path) -> Iterator[Path]:
    """The files that turn text into tokens, each once, sorted."""
    yield from sorted({file for pattern in TEXT_FILES for file in folder.glob(pattern) if file.is_file()})


def file_hash(path: Path) -> str:
    """sha256 of a whole file, in hex; of a large one remembered while the file is unchanged."""
    status = path.stat()
    if status.st_size < REMEMBERED:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    # The time of change follows every write, also where the time of modification was set back.
    key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    memory = cache_folder() / "hashes.json"
    if isinstance(known := read_json(memory).get(key), str):
        return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # a cache folder that cannot be written costs the next run its time, and nothing else
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memory, json.dumps(read_json(memory) | {key: found}, indent=1))
    return found

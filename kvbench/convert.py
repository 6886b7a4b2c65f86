"""GGUF files: check one before anything parses it, and rebuild one as a plain model folder.

Nothing here imports torch or transformers until `gguf_to_folder` runs.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.errors import UserError

# What the GGUF reader raises on bytes that are not what the header promises.
BROKEN_GGUF = (ValueError, IndexError, KeyError, OverflowError, struct.error, MemoryError)


def check_gguf(path: Path) -> None:
    """Refuse a file that is not GGUF, or whose tensors do not all lie inside it.

    Raises UserError with the reason. Reads the header only; tensor data is mapped, not loaded.
    """
    from gguf import GGUFReader

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise UserError(f"{path} is not a GGUF file: it does not begin with the four bytes 'GGUF'")
    try:
        GGUFReader(path)
    except BROKEN_GGUF as error:
        raise UserError(
            f"{path} is a truncated or damaged GGUF file: its header does not parse or promises more than "
            f"its {size} bytes; download it again"
        ) from error


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Write `folder` (must exist) as a model folder in bf16 safetensors with its tokenizer.

    transformers dequantises a GGUF on load but refuses to save that object, so a plain model of the same
    class is rebuilt from its state dict. What was written is read back and compared, weight by weight.

    Raises UserError if the file is damaged, OSError if the folder cannot be written.
    """
    check_gguf(gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            settings.pop(key, None)
        plain = type(loaded)(type(loaded.config)(**settings))
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

        written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, weight in loaded.state_dict().items():
        if not torch.equal(written[name], weight.to(torch.bfloat16)):
            raise RuntimeError(f"{name} changed on its way through {folder}")


def weights_fingerprint(path: Path) -> str:
    """12 hex digits that change when a checkpoint changes, without reading all of it.

    For a folder: sha256 over config.json (less the version of the library that wrote it) and, for each
    weights file, its name, its size and its first and last MiB (a safetensors header lies in the first). For
    a GGUF file: the file. A change only in the middle of a weights file that keeps its size goes unseen.
    """
    import hashlib

    digest = hashlib.sha256()
    files = [path] if path.is_file() else weights_files(path)
    if path.is_dir():
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config.pop("transformers_version", None)
        digest.update(json.dumps(config, sort_keys=True).encode())
    for weights in files:
        size = weights.stat().st_size
        digest.update(f"{weights.name if path.is_dir() else ''}:{size};".encode())
        with weights.open("rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read(2**20))
    return digest.hexdigest()[:12]


def weights_files(folder: Path) -> list[Path]:
    """The weights files of a model folder, sorted: safetensors where there are any, else PyTorch's own."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' notes and progress bars while a model is taken apart; errors still show."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

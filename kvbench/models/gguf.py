"""GGUF files: checking one before it is parsed, and rebuilding one as a plain model folder.

Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Exceptions of the GGUF reader for bytes that do not fit the header.
BROKEN_GGUF = (ValueError, IndexError, KeyError, OverflowError, struct.error, MemoryError)


def check_gguf(path: Path) -> GGUFReader:
    """Refuse a file that is not GGUF, or whose tensors do not all lie inside it.

    Returns a reader of its header; tensor data is mapped, not loaded. Raises UserError with the reason.
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
        reader = GGUFReader(path)
        parts = reader.fields.get("split.count")
        count = 1 if parts is None else int(parts.contents())
    except BROKEN_GGUF as error:
        raise UserError(
            f"{path} is a truncated or damaged GGUF file: its header does not parse or promises more than "
            f"its {size} bytes; download it again"
        ) from error
    if count > 1:
        raise UserError(
            f"{path} is one of {count} parts of a split GGUF file, and transformers loads whole ones: join them with "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf and give that"
        )
    return reader


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with the pre-tokenizer that the file names.

    transformers ignores `tokenizer.ggml.pre`. `smollm` splits off every digit first, which changes how the spaces
    before a number are cut (8 of the essays' 154,028 tokens). Other values keep transformers' pre-tokenizer. Raises
    UserError if the file is damaged.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    named = check_gguf(path).fields.get("tokenizer.ggml.pre")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if named is not None and named.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Write `folder` (must exist) as a model folder in bf16 safetensors with its tokenizer.

    transformers dequantises a GGUF on load but refuses to save that object, so a plain model of the same
    class is rebuilt from its state dict. What was written is read back and compared, weight by weight.

    Raises UserError if the file is damaged, OSError if the folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        tokenizer = gguf_tokenizer(gguf)
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


def weights_files(folder: Path) -> list[Path]:
    """The weights files of a model folder, sorted: safetensors where there are any, else PyTorch's own."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the block transformers logs errors only and shows no progress bars."""
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

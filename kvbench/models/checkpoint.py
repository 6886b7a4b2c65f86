"""The `model` node of a config, where its checkpoint lies, and the error line when it cannot be loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

from kvbench.errors import UserError
from kvbench.hub import hub_reachable
from kvbench.models.gguf import check_gguf, weights_files
from kvbench.models.shape import LAYOUTS
from kvbench.offline import fetch_command, fetched_folder

POINTER = b"version https://git-lfs"
TORCH_FILES = (b"PK", b"\x80")
"""How torch's files begin: a zip archive, or a pickle as torch wrote it before 1.6."""
BROKEN_PICKLE = ("PytorchStreamReader", "Ran out of input", "invalid load key", "npickl", "zip archive", "zip file")
"""What torch says of a pytorch_model.bin that is not whole."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModelSpec:
    """The `model` node of a config, checked.

    `dtype=auto` is float32 on a CPU and bfloat16 on a GPU; `device=auto` is cuda where there is one.
    `load_kwargs` goes to `from_pretrained` unchanged.
    """

    name: str
    id: str | None = None  # on the hub
    path: str | None = None  # a folder or a .gguf
    fetched: str | None = None  # a name that kvbench.fetch knows
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    kv_heads: int | None = None  # of the checkpoint, repeated or mean-pooled to this many
    # a transformers config with `model_type`, and `seed` for the weights
    random: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    mla: str | None = None  # absorbed | latent | expand, for models with multi-head latent attention

    @property
    def source(self) -> str:
        """hub | folder | gguf | random"""
        if self.random:
            return "random"
        if self.id is not None:
            return "hub"
        return "gguf" if self.path is not None and is_gguf(Path(self.path)) else "folder"


def model_spec(node: Mapping[str, Any]) -> ModelSpec:
    """Check the `model` node (a plain mapping).

    A given `id` or `path` takes the place of the node's `fetched`.
    Raises UserError: unknown keys, not exactly one source, an unknown dtype, ill-typed load_kwargs.
    """
    given = {str(key): value for key, value in node.items() if value is not None}
    check_keys(given)
    check_load_kwargs(given)
    source = pick_source(given)
    if source in ("id", "path"):
        given.pop("fetched", None)
    if source == "path":
        path = Path(given["path"])
        name = path.stem if is_gguf(path) else path.name
    else:
        name = f"random-{given['random'].get('model_type')}" if source == "random" else given[source]
    return ModelSpec(**{"name": name, **given})


def check_keys(given: dict[str, Any]) -> None:
    """Refuse unknown keys and values of the wrong kind; turn what should be text into text, in place."""
    allowed = [f.name for f in fields(ModelSpec)]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise UserError(f"unknown model key {', '.join(unknown)}: choose from {', '.join(allowed)}")
    for key in ("load_kwargs", "random"):
        if not isinstance(given.get(key, {}), Mapping):
            raise UserError(f"model.{key}={given[key]!r} must be a mapping, as in model.{key}='{{key: value}}'")
    if not isinstance(given.get("trust_remote_code", False), bool):
        raise UserError(f"model.trust_remote_code={given['trust_remote_code']!r} must be true or false")
    heads = given.get("kv_heads", 1)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise UserError(f"model.kv_heads={heads!r} must be a whole number of at least 1")
    for key in ("name", "id", "path", "fetched", "revision"):
        if key in given and not isinstance(given[key], str | PurePath):
            raise UserError(
                f"model.{key} was read as the {type(given[key]).__name__} {given[key]!r}, and what was typed is lost: "
                f"quote it, as in model.{key}='\"1.10\"'"
            )
    for key in ("name", "id", "path", "fetched", "revision", "dtype", "device", "note", "mla"):
        if key in given:
            given[key] = str(given[key])
    if given.get("dtype", "auto") not in DTYPES:
        raise UserError(f"model.dtype={given['dtype']} is not known: choose from {', '.join(DTYPES)}")
    if given.get("mla", LAYOUTS[0]) not in LAYOUTS:
        raise UserError(f"model.mla={given['mla']} is not known: choose from {', '.join(LAYOUTS)}")


def check_load_kwargs(given: dict[str, Any]) -> None:
    """Raise UserError for load_kwargs that repeat a key of the node."""
    load_kwargs = given.get("load_kwargs", {})
    for key in ("dtype", "torch_dtype", "trust_remote_code", "revision"):
        if key in load_kwargs:
            own = f"model.{key.removeprefix('torch_')}"
            raise UserError(f"model.load_kwargs.{key} has a key of its own: write {own}={load_kwargs[key]}")
    if "device_map" in load_kwargs and given.get("device", "auto") != "auto":
        raise UserError("model.device and model.load_kwargs.device_map are both given: give one of them")


def pick_source(given: dict[str, Any]) -> str:
    """The key that names the checkpoint: id, path, fetched or random. Raises UserError for none or two."""
    sources = [key for key in ("id", "path", "random", "fetched") if given.get(key)]
    if not sources:
        raise UserError("no model is named: write model.id=ORGANISATION/NAME or model.path=FOLDER_OR_GGUF")
    if "id" in sources and "path" in sources:
        raise UserError(f"model.id={given['id']} and model.path={given['path']} are both given: give one of them")
    if "random" in sources and len(sources) > 1:
        other = next(key for key in sources if key != "random")
        raise UserError(f"model.{other} is given beside random weights: write model=hub model.{other}=...")
    return sources[0]


def checkpoint(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Where `from_pretrained` finds the checkpoint, and the arguments that say so.

    Raises UserError for a fetch not done, a path that does not exist, a GGUF file that is not whole.
    """
    arguments: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
    if spec.id is not None:
        if Path(spec.id).exists():
            raise UserError(f"model.id={spec.id} is a path here: write model.path={spec.id}")
        if spec.revision is not None:
            arguments["revision"] = spec.revision
        if not hub_reachable():
            arguments["local_files_only"] = True
        return spec.id, arguments
    path = local_path(spec)
    if is_gguf(path):
        check_gguf(path)
        return str(path.parent), arguments | {"gguf_file": path.name}
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is no model folder: it has no config.json (model.path takes a folder or a .gguf file)")
    if not weights_files(path):
        raise UserError(f"{path} holds no weights: *.safetensors or pytorch_model*.bin must stand beside config.json")
    for file in weights_files(path):
        check_weights_file(file)
    return str(path), arguments


def check_weights_file(file: Path) -> None:
    """Raise UserError for git-lfs's note of where the weights are, and for a .bin that torch did not write."""
    with file.open("rb") as opened:
        start = opened.read(len(POINTER))
    if start == POINTER:
        raise UserError(f"{file} is a git-lfs pointer, not the weights: type git lfs pull in its folder")
    if file.suffix == ".bin" and not start.startswith(TORCH_FILES):
        raise UserError(f"{file} is no weights file of torch's: it is damaged or truncated; download it again")


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file; the ending may be in capitals."""
    return path.suffix.lower() == ".gguf"


def local_path(spec: ModelSpec) -> Path:
    if spec.path is None:
        return fetched_folder("model", spec.fetched or spec.name)
    path = Path(spec.path).expanduser()
    if not path.exists():
        raise UserError(f"model.path={spec.path} does not exist: give a model folder or a .gguf file")
    if path.is_file() and not is_gguf(path):
        raise UserError(f"model.path={spec.path} is a file but no .gguf: give a model folder or a .gguf file")
    return path


UNREADABLE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
    RuntimeError,
    EOFError,
    ArithmeticError,
    AssertionError,
    UnpicklingError,
    BadZipFile,
)
"""Exceptions of transformers, torch and the hub for a checkpoint that they cannot read or build."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is torch's that memory does not suffice, which is no fault of the checkpoint."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


@contextmanager
def one_line_errors(spec: ModelSpec, part: str = "") -> Iterator[None]:
    """Inside the block, errors of transformers and the hub about a checkpoint become a UserError of one line."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except (*UNREADABLE, StrictDataclassError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        given = f"model.id={spec.id}" if spec.id is not None else spec.name
        if spec.path is not None:
            given = f"model.path={spec.path}"
        raise UserError(f"cannot load {part}{given}: {advice(spec, error)}") from error


def advice(spec: ModelSpec, error: Exception) -> str:
    """What to do about a failed load, in one line; else the first 300 characters of the library's message."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "mismatch" in text:
        return (
            f"its weights have other shapes than config.json says ({text[:200]}); give the config that belongs to them"
        )
    if "automatic conversion of the weights" in text:
        return (
            "transformers cannot convert its weights, whose shapes do not fit config.json's quantization_config; "
            "give a checkpoint in 16 bits"
        )
    if isinstance(error, UnpicklingError | EOFError | BadZipFile) or any(sign in text for sign in BROKEN_PICKLE):
        return f"its weights file is damaged or truncated ({text[:100]}); download it again"
    if "trust_remote_code" in text:
        return "it runs code of its own; if you trust it, add model.trust_remote_code=true"
    if "unexpected keyword argument" in text and spec.load_kwargs:
        return f"model.load_kwargs holds a key that from_pretrained does not know ({text.split()[-1]})"
    if spec.id is not None and not hub_reachable():
        return (
            "it is not in the local hub cache and the hub cannot be reached; where there is a network type "
            f"hf download {spec.id}, or use the offline model: {fetch_command('smollm2-135m')}"
        )
    if spec.id is not None and "not a valid model identifier" in text:
        return "the hub has no model of that name (or it is private: hf auth login)"
    return text[:300]

"""Loading the text to measure on: fetched essays, a hub data set, a local file or folder, or random tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.hub import hub_or_cache
from kvbench.offline import fetch_command, fetched_folder, fetched_path

BOS_RULES = ("auto", "none", "first")
DATASET_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


UNREADABLE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    StopIteration,
    EOFError,
)
"""Exceptions of `datasets` and the hub for a data set that they cannot read."""


@dataclass(frozen=True)
class DataSpec:
    """The `data` node of a config. A given `id` or `path` takes the place of the node's `fetched`."""

    name: str
    id: str | None = None  # a data set on the hub
    path: str | None = None  # a text file, a .parquet/.json/.jsonl/.csv, or a folder in the hub's layout
    fetched: str | None = None  # a name that kvbench.fetch knows; its .txt and .py files are joined in sorted order
    texts: tuple[str, ...] | None = None  # several such names: windows lie in each of them, none across two
    config: str | None = None  # of the data set
    split: str | None = None  # default: test, or the only one there is
    column: str = "text"
    joiner: str = "\n\n"  # between rows and between files
    limit: int | None = None  # stop reading documents once this many characters are there
    random_tokens: int | None = None  # no text at all: this many tokens drawn from `seed`
    seed: int = 0
    bos: str = "auto"  # see `bos_tokens`


@dataclass(frozen=True)
class Text:
    """One long text, or several: `parts`, whose names are joined by + in `name`; `text` is empty then.

    `fingerprint` is its sha256. Random tokens have no text: `random_tokens` of them from `seed`.
    """

    name: str
    text: str
    fingerprint: str
    random_tokens: int = 0
    seed: int = 0
    parts: tuple[Text, ...] = ()

    @property
    def each(self) -> tuple[Text, ...]:
        """The texts that this one consists of: itself, if it is one."""
        return self.parts or (self,)


def load_text(node: Mapping[str, Any]) -> Text:
    """Read the text that the `data` node names.

    Raises UserError: a fetch not done, a file that cannot be read, a data set that cannot be reached, a
    column, split or config it does not have, no text in it.
    """
    spec = data_spec(node)
    if spec.texts is not None:
        if missing := [name for name in spec.texts if fetched_path(name) is None]:
            names = " ".join(missing)
            raise UserError(f"texts of data={spec.name} are not on this machine: type {fetch_command(names)}")
        parts = tuple(load_text({"fetched": name, "limit": spec.limit, "joiner": spec.joiner}) for name in spec.texts)
        digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode()).hexdigest()
        return Text(spec.name, "", digest, parts=parts)
    if spec.random_tokens is not None:
        digest = hashlib.sha256(f"random {spec.random_tokens} {spec.seed}".encode()).hexdigest()
        return Text(spec.name, "", digest, spec.random_tokens, spec.seed)
    if spec.path is not None:
        text = read_path(spec)
    else:
        text = read_hub(spec, spec.id) if spec.id is not None else read_fetched(spec)
    if not text.strip():
        raise UserError(f"data={spec.name} holds no text")
    return Text(spec.name, text, hashlib.sha256(text.encode()).hexdigest())


def data_spec(node: Mapping[str, Any]) -> DataSpec:
    given = {str(key): value for key, value in node.items() if value is not None}
    allowed = [f.name for f in fields(DataSpec)]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise UserError(f"unknown data key {', '.join(unknown)}: choose from {', '.join(allowed)}")
    for key in ("limit", "random_tokens"):
        value = given.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"data.{key}={value!r} must be a whole number of at least 1")
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"data.seed={seed!r} must be a whole number of at least 0")
    if given.get("bos", "auto") not in BOS_RULES:
        raise UserError(f"data.bos={given['bos']} is unknown: choose from {', '.join(BOS_RULES)}")
    if "id" in given and "path" in given:
        raise UserError(f"data.id={given['id']} and data.path={given['path']} are both given: give one of them")
    sources = ("path", "id", "texts", "fetched", "random_tokens")
    if not any(key in given for key in sources):
        raise UserError("no text is named: write data=essays, data=wikitext2, data=pg19 or data.path=FILE_OR_FOLDER")
    for key in ("name", "id", "path", "fetched", "config", "split", "column", "joiner"):
        if key in given:
            given[key] = str(given[key])
    source = next(key for key in sources if key in given)
    if source == "texts":
        given["texts"] = names_of_texts(given["texts"])
        given["name"] = "+".join(given["texts"])
    elif given.pop("texts", None) is not None:
        given.pop("name", None)  # data=mixed data.path=FILE: the file, under its own name
    if source in ("path", "id") and given.pop("random_tokens", None) is not None:
        given.pop("name", None)  # data=random data.path=FILE: the file, under its own name
    name = Path(given["path"]).name if source == "path" else given.get(source)
    return DataSpec(**{"name": "random" if source == "random_tokens" else name, **given})


def names_of_texts(value: object) -> tuple[str, ...]:
    """Names from a list of two or more different ones. Raises UserError for anything else."""
    names = tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(
            f"data.texts={value} must list two or more different texts that kvbench.fetch knows; "
            "type data.texts='[essays,code]', or data=essays for one"
        )
    return names


def read_fetched(spec: DataSpec) -> str:
    folder = fetched_folder("text", str(spec.fetched))
    files = sorted(file for file in folder.iterdir() if file.suffix in (".txt", ".py"))
    if not files:
        raise UserError(f"data.fetched={spec.fetched} is no text; type data.fetched=essays, for example")
    return read_files(files, spec)


def read_files(files: list[Path], spec: DataSpec) -> str:
    """Whole text files as they are, with `joiner` between them. Raises UserError for one that is no UTF-8 text."""
    return take((read_file(file) for file in files), spec)


def read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path={path} is not UTF-8 text (byte {error.start}): give a text file") from error
    except OSError as error:
        raise UserError(f"cannot read data.path={path}: {error.strerror}") from error


def read_path(spec: DataSpec) -> str:
    path = Path(str(spec.path)).expanduser()
    if not path.exists():
        raise UserError(f"data.path={spec.path} does not exist: give a text file or a data set folder")
    if path.is_dir():
        texts = sorted(path.rglob("*.txt"))
        rows = any(file.suffix in DATASET_FORMATS for file in path.rglob("*"))
        return read_files(texts, spec) if texts and not rows else read_dataset(spec, str(path))
    if path.suffix in DATASET_FORMATS:
        return read_dataset(spec, DATASET_FORMATS[path.suffix], data_files=str(path))
    text = read_file(path)
    return text if spec.limit is None else text[: spec.limit]


def read_hub(spec: DataSpec, repository: str) -> str:
    if not hub_or_cache():
        raise UserError(
            f"cannot load data.id={repository}: the hub cannot be reached; use data=essays or data.path=FILE "
            "(or set HF_HUB_OFFLINE=1 if the data set was downloaded before)"
        )
    return read_dataset(spec, repository)


def read_dataset(spec: DataSpec, where: str, **arguments: Any) -> str:
    """Join the rows of one split.

    Local files and limited reads are streamed: no copy of them is made. Other data sets of the hub are kept
    in its cache, where an offline machine finds them again.
    """
    with one_line_errors(f"data.path={spec.path}" if spec.path is not None else f"data.id={spec.id}"):
        from datasets import load_dataset

        streaming = spec.path is not None or spec.limit is not None
        splits = load_dataset(where, name=spec.config, streaming=streaming, **arguments)
        rows = splits[pick_split(spec, list(splits))]
        columns = rows.column_names
        if columns is not None and spec.column not in columns:
            raise UserError(f"data.column={spec.column} is not in data={spec.name}: choose from {', '.join(columns)}")
        return take((cell_text(row.get(spec.column), i, spec) for i, row in enumerate(rows)), spec)


def cell_text(cell: object, row: int, spec: DataSpec) -> str:
    """The text of a cell. Raises UserError, with the row's number, for an empty cell and for what is no text."""
    if isinstance(cell, str):
        return cell
    kind = "empty (null)" if cell is None else f"a {type(cell).__name__}"
    raise UserError(
        f"row {row} of data={spec.name} (counted from 0): column {spec.column} is {kind}, not text; give "
        "data.column=NAME of a column of text, or leave the row out"
    )


def pick_split(spec: DataSpec, splits: list[str]) -> str:
    if spec.split in splits:
        return str(spec.split)
    if spec.split is None and ("test" in splits or len(splits) == 1):
        return "test" if "test" in splits else splits[0]
    wanted = "data.split is not given" if spec.split is None else f"data.split={spec.split} is not there"
    raise UserError(f"{wanted} for data={spec.name}: choose from {', '.join(splits)}")


def take(documents: Iterable[str], spec: DataSpec) -> str:
    """Join whole documents until `limit` characters are there."""
    taken: list[str] = []
    characters = 0
    for document in documents:
        taken.append(document)
        characters += len(document)
        if spec.limit is not None and characters >= spec.limit:
            break
    return spec.joiner.join(taken)


@contextmanager
def one_line_errors(given: str) -> Iterator[None]:
    """Inside the block, errors of `datasets` and the hub about a data set become a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:300] or f"it holds no rows ({type(error).__name__})"
        raise UserError(f"cannot load {given}: {reason}") from error

"""The row: one measured number with every setting that it depends on; and rows as a table.

The columns are the fields of `Row` and are listed nowhere else.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

WEIGHTS = ("trained", "repeated", "pooled", "random")
"""Where a model's weights come from. trained: a checkpoint. repeated, pooled: a checkpoint whose KV heads were repeated
(same logits) or mean-pooled (not lossless). random: random numbers."""

FLAGS = {
    "better_than_full": "scores above the full cache beyond the interval",
    "uninformative": "the full cache itself scores zero here",
    "not_engaged": "nothing was evicted or quantised, so the number is the full cache's",
    "unsteady": "step times drifted or jumped while they were measured",
    "few_windows": "fewer than 10 windows: does not generalise to other text",
    "beyond_positions": "positions beyond those that the model was trained for",
    "not_finite": "logits were not finite",
    "not_computed": "left out, because what it is computed from does not allow it; the note says why",
    "sees_future": "the method knows the tokens to come: a bound to compare with, not a method to use",
    "unused_weights": "the checkpoint holds weights that the model has no place for",
    "untrusted": "the full cache differs from the model's own forward",
}
"""What a reader must know about a number before comparing it. Columns carry flags, notes are for people only."""

EXACT_METHODS = ("full", "recompute")
"""Methods that hold every token exactly, or none at all."""
EXACT_STORES = (None, "dense", "paged", *EXACT_METHODS)
"""Stores that hold numbers as the model made them; old rows name the method here."""

MEMORY_PARTS = ("dense", "codes", "scales", "residual", "basis", "scores", "positions", "state")
"""Parts of a cache's bytes; `held_bytes.PART` in the rows. They add up to `held_bytes`."""

ROW_STATUSES = ("ok", "oom", "failed", "interrupted", "skipped")


@dataclass(frozen=True)
class Row:
    """One measured number with the settings that it depends on. None: the setting does not apply to this number."""

    run: str | None = None  # name of the run folder; filled in by RunFolder.add
    model: str | None = None
    revision: str | None = None
    arch: str | None = None  # mha | gqa | mqa | mla | hybrid
    kv_heads: int | None = None
    converted: bool | None = None
    method: str | None = None
    store: str | None = None
    bits: int | None = None
    k_bits: int | None = None
    v_bits: int | None = None
    group: int | None = None
    residual: int | None = None
    budget: float | None = None  # as given: tokens (>= 1) or a share of the prompt (between 0 and 1)
    sinks: int | None = None
    window: int | None = None
    variant: str | None = None
    knobs: str | None = None  # JSON object: the knobs that have no column
    measure: str | None = None
    metric: str | None = None
    value: float | None = None
    unit: str | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    protocol: str | None = None
    question: str | None = None  # after | before
    dataset: str | None = None
    context: int | None = None
    depth: float | None = None
    batch: int | None = None
    dtype: str | None = None
    device: str | None = None
    kernel: str | None = None
    threads: int | None = None
    seed: int | None = None
    status: str = "ok"  # ok | oom | failed | interrupted | skipped
    note: str | None = None
    position: int | None = None  # where the first token of a bucket stands in its window; in `turns`: the turn, from 1
    stride: int | None = None  # tokens from the start of one window to the start of the next
    bos: str | None = None  # none | first (a window begins with it)
    tokenizer: str | None = None  # first 16 hex digits of the sha256 of the tokenizer's file
    weights: str | None = None  # one of WEIGHTS
    flags: str | None = None  # names of FLAGS, sorted, separated by spaces; read with `flags_of`
    gate: float | None = None  # largest difference of the full cache to the model's own forward, share of a logit
    prefill_chunk: int | None = None  # tokens of the prompt that were read at a time; None: all at once

    def __post_init__(self) -> None:
        if self.status not in ROW_STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(ROW_STATUSES)}")
        if self.weights is not None and self.weights not in WEIGHTS:
            raise ValueError(f"weights {self.weights!r} is not one of {', '.join(WEIGHTS)}")
        if unknown := sorted(flags_of(self) - set(FLAGS)):
            raise ValueError(f"flags {', '.join(unknown)} are not among {', '.join(FLAGS)}")


def is_exact(row: Row) -> bool:
    """Whether the row's method by design evicts and quantises nothing, so that `engaged` = 0 is no fault."""
    return row.method in EXACT_METHODS and row.store in EXACT_STORES


def flags_of(row: Row) -> frozenset[str]:
    """The flags of a row; empty where there are none."""
    return frozenset((row.flags or "").split())


def with_flags(row: Row, *names: str) -> Row:
    """The row with these flags as well. Raises ValueError for a name that is not in FLAGS."""
    return replace(row, flags=" ".join(sorted(flags_of(row).union(names))) or None)


GRAPH = ", graph"
"""What `kernel` ends in where a step was the replay of a captured CUDA graph."""

COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Row))

Role = Literal["folder", "identity", "follows", "knob", "setting", "place", "result"]
ROLES: dict[Role, tuple[str, ...]] = {
    "folder": ("run",),
    "identity": ("model", "revision", "arch", "kv_heads", "converted"),
    "follows": ("tokenizer", "weights"),
    "knob": (
        "method",
        "store",
        "bits",
        "k_bits",
        "v_bits",
        "group",
        "residual",
        "budget",
        "sinks",
        "window",
        "variant",
        "prefill_chunk",
        "knobs",
    ),
    "setting": (
        "protocol",
        "question",
        "dataset",
        "context",
        "batch",
        "dtype",
        "device",
        "kernel",
        "threads",
        "seed",
        "stride",
        "bos",
    ),
    "place": ("measure", "metric", "depth", "position"),
    "result": ("value", "unit", "low", "high", "n", "status", "note", "flags", "gate"),
}
"""What each column says. Every column has one role.

folder: where the row was written. identity: which model. follows: determined by the model, so it tells no two rows
apart. knob: which method. setting: how it was measured. place: which number of that method and setting this is.
result: the number and what became of it.
"""
KNOBS = ROLES["knob"]
"""What tells one compared method from another."""
IDENTITY = (*ROLES["identity"], *KNOBS, *ROLES["setting"])
"""Rows that agree in these columns belong to one line of a comparison; the columns of role `place` differ inside it."""


def _kind(hint: Any) -> type:
    """`int` from `int | None`."""
    members = typing.get_args(hint) or (hint,)
    return next(member for member in members if member is not types.NoneType)  # type: ignore[no-any-return]


KINDS: dict[str, type] = {name: _kind(hint) for name, hint in typing.get_type_hints(Row).items()}
ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_PANDAS = {
    pa.string(): pd.StringDtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.float64(): pd.Float64Dtype(),
    pa.bool_(): pd.BooleanDtype(),
}
SCHEMA = pa.schema([pa.field(name, ARROW[KINDS[name]]) for name in COLUMNS])


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Rows as an Arrow table of `SCHEMA`. Raises TypeError for a value of another kind than its column."""
    columns = []
    for name in COLUMNS:
        cells = [getattr(row, name) for row in rows]
        if KINDS[name] is float:  # budgets are ints as often as not, values may be numpy or torch scalars
            cells = [None if cell is None else float(cell) for cell in cells]
        try:
            columns.append(pa.array(cells, ARROW[KINDS[name]]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TypeError(f"column {name!r} holds {KINDS[name].__name__}: {error}") from error
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows in memory as the DataFrame that `load` would give after writing them."""
    return frame_of_table(table_of(list(rows)))


def to_rows(table: pa.Table) -> pa.Table:
    """The table with the columns of `SCHEMA`. Raises as `with_columns` does."""
    table = with_columns(table, SCHEMA)
    status = COLUMNS.index("status")
    return table.set_column(status, SCHEMA.field(status), pc.fill_null(table["status"], "ok"))


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of a schema, null where it lacks one: other versions wrote fewer columns, or more.

    Raises ArrowInvalid, ArrowNotImplementedError or KeyError where values are of another kind.
    """
    known = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in known else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def frame_of_table(table: pa.Table) -> pd.DataFrame:
    """A table of `SCHEMA` in nullable dtypes."""
    frame: pd.DataFrame = table.to_pandas(
        types_mapper=_PANDAS.get,
        use_threads=False,  # tables of some rows; and in a memory limit no thread can start
    )
    return frame


HUGE = 1e100
"""Values of at least this size count as undefined, as nan does: no axis and no table can hold them."""


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame as `kvbench.results.loading.load` returns it, with None for what is missing."""
    plain = frame[list(COLUMNS)].astype(object)
    records = plain.where(frame.notna(), None).to_dict("records")
    return [_sound(Row(**{str(name): value for name, value in record.items()})) for record in records]


def _sound(row: Row) -> Row:
    """The row with None for numbers that no table and no axis can hold, and for an interval with such a bound."""
    value = row.value if row.value is not None and abs(row.value) < HUGE else None
    bounds = [bound for bound in (row.low, row.high) if bound is not None and abs(bound) < HUGE]
    low, high = sorted(bounds) if len(bounds) == 2 else (None, None)
    if (value, low, high) == (row.value, row.low, row.high):
        return row
    return replace(row, value=value, low=low, high=high)

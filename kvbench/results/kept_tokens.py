"""Which tokens each head of each layer kept: kept.parquet, written where save_kept=true. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from kvbench.results.checks import skip
from kvbench.results.row import ARROW, KINDS, KNOBS, Row, with_columns
from kvbench.results.run_files import read_parquet

KEPT = "kept.parquet"
NAMED = ("run", "model", *KNOBS, "measure", "protocol", "question", "context")
"""Columns that say whose tokens these are, as in metrics.parquet."""
COUNTED = {"sample": 10**6, "layer": 10**4, "head": 10**4, "position": 10**8}
"""The other columns, with the largest value that a sound file can hold."""
SCHEMA = pa.schema(
    [*(pa.field(name, ARROW[KINDS[name]]) for name in NAMED), *(pa.field(name, pa.int32()) for name in COUNTED)]
)


@dataclass(frozen=True)
class Kept:
    """What a method holds at the end of one sample.

    row: the columns in `NAMED`. sample: number of the window, or of the prompt at its length, from 0. layers: for each
    layer that the method applies to the positions that each KV head keeps, ascending.
    """

    row: Row
    sample: int
    layers: Mapping[int, Sequence[Sequence[int]]]


def to_table(kept: Iterable[Kept], run: str) -> pa.Table:
    """One row a kept token."""
    tables = []
    for one in kept:
        heads = [
            (layer, head, list(positions))
            for layer, of_layer in one.layers.items()
            for head, positions in enumerate(of_layer)
        ]
        position = [p for _, _, positions in heads for p in positions]
        named = {name: run if name == "run" else getattr(one.row, name) for name in NAMED}
        counted = {
            "sample": [one.sample] * len(position),
            "layer": [layer for layer, _, positions in heads for _ in positions],
            "head": [head for _, head, positions in heads for _ in positions],
            "position": position,
        }
        columns = {
            name: pa.repeat(pa.scalar(value, SCHEMA.field(name).type), len(position)) for name, value in named.items()
        }
        tables.append(pa.table({**columns, **counted}, schema=SCHEMA))
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def read_kept(runs: Iterable[Path]) -> pd.DataFrame:
    """The kept tokens of run folders, empty where none were saved. Of runs that measured one method alike, the last.

    Damaged files are skipped with a warning.
    """
    frames = [table.to_pandas() for run in runs if (table := _read(run / KEPT)) is not None]
    if not frames:
        return pd.DataFrame(columns=list(SCHEMA.names))
    tokens: pd.DataFrame = pd.concat(frames, ignore_index=True)
    same = [name for name in NAMED if name != "run"]
    last = tokens.groupby(same, dropna=False, sort=False)["run"].transform("last")
    return tokens.loc[tokens["run"] == last]


def _read(file: Path) -> pa.Table | None:
    """The table of one kept.parquet in the columns of SCHEMA; None if it is absent or damaged."""
    table = read_parquet(file)
    if table is None:
        return None
    try:
        table = with_columns(table, SCHEMA)
        wrong = [name for name, most in COUNTED.items() if not _lies_in(table[name], most)]
    except (pa.ArrowException, KeyError, ValueError) as error:
        skip(file, f"a column holds values of another kind ({error})")
        return None
    if wrong:
        skip(file, f"{wrong[0]} is not a number from 0 to {COUNTED[wrong[0]]:,} everywhere")
        return None
    return table


def _lies_in(column: pa.ChunkedArray, most: int) -> bool:
    lowest, highest = (pc.min(column).as_py(), pc.max(column).as_py()) if len(column) else (0, 0)
    return column.null_count == 0 and 0 <= lowest and highest <= most

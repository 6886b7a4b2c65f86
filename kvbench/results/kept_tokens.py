"""Which tokens each head of each layer kept: kept.parquet, written where save_kept=true. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.errors import UserError
from kvbench.results.row import ARROW, KINDS, KNOBS, Row

KEPT = "kept.parquet"
NAMED = ("run", "model", *KNOBS, "measure", "protocol", "question", "context")
"""Columns that say whose tokens these are, as in metrics.parquet."""
COUNTED = ("sample", "layer", "head", "position")
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
    """The kept tokens of run folders; of a method that several measured alike, the last one's. Empty where none was
    saved. Raises UserError for a file that cannot be read."""
    frames = []
    for file in (run / KEPT for run in runs):
        if not file.exists():
            continue
        try:
            # Folders written by other versions may lack a column or have one more.
            frames.append(pq.read_table(file).to_pandas().reindex(columns=list(SCHEMA.names)))
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{str(file)!r} is not a readable parquet file; remove it or restore it") from error
    if not frames:
        return pd.DataFrame(columns=list(SCHEMA.names))
    tokens: pd.DataFrame = pd.concat(frames, ignore_index=True)
    same = [name for name in NAMED if name != "run"]
    last = tokens.groupby(same, dropna=False, sort=False)["run"].transform("last")
    return tokens.loc[tokens["run"] == last]

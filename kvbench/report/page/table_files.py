"""A table as CSV, Parquet and Markdown; as LaTeX: page/latex.py."""

from __future__ import annotations

import csv
import io

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.report.page.latex import to_latex
from kvbench.report.tables.table import Column, Table


def written_forms(table: Table) -> dict[str, str | bytes]:
    """A table as files: the ending of each and its content."""
    return {"csv": to_csv(table), "parquet": to_parquet(table), "md": to_markdown(table), "tex": to_latex(table)}


def to_csv(table: Table) -> str:
    """The records as CSV, without empty columns."""
    keys = dict.fromkeys(key for record in table.records for key in record)
    header = [key for key in keys if any(record.get(key) is not None for record in table.records)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.records)
    return buffer.getvalue()


def to_markdown(table: Table) -> str:
    """A pipe table with padded columns, so that its source is readable too."""
    columns = [[_escaped(cell) for cell in (column.header, *_marked(column))] for column in table.columns]
    widths = [max(3, *map(len, cells)) for cells in columns]
    padded = []
    for column, cells, width in zip(table.columns, columns, widths, strict=True):
        rule = "-" * width if column.left else "-" * (width - 1) + ":"
        cells.insert(1, rule)
        padded.append([cell.ljust(width) if column.left else cell.rjust(width) for cell in cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*padded, strict=True))


def _marked(column: Column) -> list[str]:
    return [f"**{cell}**" if index in column.best else cell for index, cell in enumerate(column.full)]


def to_parquet(table: Table) -> bytes:
    """The records as a parquet file, with the columns of the CSV."""
    buffer = pa.BufferOutputStream()
    frame = pd.DataFrame.from_records(table.records).dropna(axis="columns", how="all")
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), buffer)
    content: bytes = buffer.getvalue().to_pybytes()
    return content


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")

"""Which texts a perplexity was measured on: rows over all texts of a run, and rows of one of them.

A run over several texts names all of them in `dataset` (`essays+bible+code`) and also writes rows of each text alone
(`dataset` = `code`). No table and no comparison mixes the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.report.compare.comparison import Line, config_of
from kvbench.results.row import Row

JOINED = "+"


def texts_of(dataset: str | None) -> tuple[str, ...]:
    """`essays+bible` -> (`essays`, `bible`)"""
    return tuple(filter(None, (dataset or "").split(JOINED)))


def is_code(text: str) -> bool:
    """The text is source code, by its name."""
    return "code" in text.lower()


def split_by_text(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows over all texts of their run, and the rows of one text of a run over several."""
    places = {(row.run, row.measure, row.dataset) for row in rows if row.dataset and JOINED in row.dataset}
    single = {(run, measure, text) for run, measure, dataset in places for text in texts_of(dataset)}
    one = [(row.run, row.measure, row.dataset) in single for row in rows]
    return (
        [row for row, is_one in zip(rows, one, strict=True) if not is_one],
        [row for row, is_one in zip(rows, one, strict=True) if is_one],
    )


def main_dataset(lines: Iterable[Line]) -> str | None:
    """The data set on which most methods were measured; of several the one over most texts, then the first."""
    methods: dict[str | None, set[object]] = {}
    for line in lines:
        methods.setdefault(line.row.dataset, set()).add(config_of(line.row))
    return max(methods, key=lambda dataset: (len(methods[dataset]), len(texts_of(dataset))), default=None)

"""A table that says which error of the cache orders methods as the KL of their predictions does."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.compare.comparison import Line
from kvbench.report.compare.names import short_model
from kvbench.report.compare.predictors import Predictor, predictors, settings_of
from kvbench.report.tables.headlines import headlines_of
from kvbench.report.tables.table import Column, Table, text_column

HOW = (
    "Spearman's rank correlation of each error with the KL of the predictions over the methods; +1 or −1: the error "
    "orders the methods as their KL does; 0: it says nothing about them. Brackets: 95%, Bonett and Wright"
)


def error_predictors_table(lines: Sequence[Line], origin: Sequence[str] = ()) -> Table | None:
    """One line for each error and setting; None where no setting has enough methods.

    origin: caption parts that say where the rows come from.
    """
    found = [(group[0], one) for group in settings_of(lines) for one in predictors(group)]
    if not found:
        return None
    names = {headline.metric: headline.title for headline in headlines_of("error", list(lines), None)}
    values = [one.spearman for _, one in found]
    columns = [
        text_column("model", "model", [short_model(line.row.model) for line, _ in found], whole=True),
        text_column("context", "context", [f"{line.row.context:,}" for line, _ in found]),
        text_column("error", "error", [names.get(one.metric, one.metric) for _, one in found], whole=True),
        Column(
            "spearman",
            "Spearman with KL",
            [_with_interval(one) for _, one in found],
            [two_digits(value) for value in values],
            numbers=values,
        ),
        text_column("methods", "methods", [str(one.n) for _, one in found]),
    ]
    varying = [column for column in columns if column.key not in ("model", "context") or len(set(column.full)) > 1]
    records = [
        {
            "model": line.row.model,
            "context": line.row.context,
            "error": one.metric,
            "spearman": one.spearman,
            "low": one.low,
            "high": one.high,
            "methods": one.n,
        }
        for line, one in found
    ]
    title = "Errors that predict the KL of the predictions"
    return Table("error_predictors", title, [HOW, *origin], tuple(varying), records, terminal=False)


def two_digits(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _with_interval(one: Predictor) -> str:
    return f"{two_digits(one.spearman)} [{two_digits(one.low)}, {two_digits(one.high)}]"

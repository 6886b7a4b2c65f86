"""Times over the full cache's: only within one run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.compare.comparison import lines_of
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.time_ratios import NOT_BESIDE, RATIO, missing_ratios, with_time_ratios
from kvbench.report.tables.method_tables import overview
from kvbench.results.row import Row
from tests.report.synthetic import column, keys, table
from tests.shared.rows import BASE, rows


def timed(method: str, run: str, value: float, **changes: object) -> Row:
    base = replace(BASE, method=method, store="dense", measure="latency", metric="tpot_p50_ms", context=512, run=run)
    return replace(base, **{"value": value, "unit": "ms", **changes})  # type: ignore[arg-type]


def ratios(made: list[Row]) -> dict[tuple[str | None, str | None], float | None]:
    return {(row.method, row.run): row.value for row in with_time_ratios(made) if row.metric == RATIO}


def test_a_method_is_compared_with_the_full_cache_of_its_own_run() -> None:
    """The machine was twice as slow in the second run: compared across runs, h2o would be slower than full."""
    made = [timed("full", "a", 10.0), timed("full", "b", 20.0), timed("h2o", "b", 16.0), timed("tova", "c", 12.0)]
    assert ratios(made) == {("full", "a"): 1, ("full", "b"): 1, ("h2o", "b"): 0.8}
    # The later full cache is shown; what was measured in the first run keeps its own reference.
    assert ratios([timed("h2o", "a", 12.0), *made])["h2o", "a"] == pytest.approx(1.2)


@pytest.mark.parametrize("change", [{"context": 1024}, {"batch": 4}, {"device": "other"}, {"threads": 1}])
def test_another_setting_is_no_reference(change: dict[str, object]) -> None:
    made = [timed("full", "a", 10.0), timed("h2o", "a", 12.0, **change)]
    assert ("h2o", "a") not in ratios(made)


def test_a_measured_ratio_stays_and_is_not_made_again() -> None:
    measured = timed("h2o", "a", 1.5, metric=RATIO, unit="x", low=1.4, high=1.6)
    made = with_time_ratios([timed("full", "a", 10.0), timed("h2o", "a", 12.0), measured])
    found = [row for row in made if row.metric == RATIO and row.method == "h2o"]
    assert found == [measured]


def test_tables_show_the_ratio_or_why_there_is_none() -> None:
    made = [timed("full", "a", 10.0), timed("h2o", "a", 8.0), timed("tova", "b", 9.0)]
    found = table(made, "latency")
    assert column(found, RATIO) == ["1.00x", "0.80x", "–"] and column(found, "tpot_p50_ms") == ["10.0", "8.00", "9.00"]
    assert NOT_BESIDE in found.caption
    assert NOT_BESIDE not in table(made[:2], "latency").caption
    assert missing_ratios(lines_of(with_time_ratios(made[2:]), "latency")) == [NOT_BESIDE]
    head = overview(groups_of(made))
    assert head is not None and column(head, RATIO) == ["1.00x", "0.80x", "–"] and NOT_BESIDE in head.caption


def test_a_slope_that_was_not_computed_is_a_dash_with_a_reason() -> None:
    made = [
        replace(row, value=None, flags="not_computed", note="no slope: ...")
        if row.metric == "slope_ms_per_1k" and row.method == "h2o"
        else row
        for row in rows(measures=["latency"])
    ]
    found = table(made, "latency")
    slopes = dict(zip(column(found, "method"), column(found, "slope_ms_per_1k"), strict=True))
    assert slopes["h2o"] == "–" and slopes["full"] == "6.00" and "slope_ms_per_1k" in keys(found)
    assert any(part.startswith("slope –: fewer than two contexts") for part in found.caption)

"""Tables as CSV and Parquet: numbers unrounded, their bounds in columns of their own, no number inside a text."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.page.table_files import to_csv, to_parquet, written_forms
from kvbench.report.tables.changes import changes, changes_table
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_pairs import method_pairs_table
from kvbench.report.tables.method_tables import overview, traits_table
from kvbench.report.tables.published import Number, Published, published_table
from kvbench.report.tables.table import Table
from kvbench.results.row import IDENTITY, KINDS
from tests.report.synthetic import FULL, OTHER, cache, judged_groups, rival_samples, sweep, table
from tests.shared.rows import rows

WORDS = {
    *(name for name in IDENTITY if KINDS[name] is str),
    *("method_shown", "decode", "status", "runs", "converted", "verdict", "source", "metric", "measure", "other"),
    *("what", "old_status", "new_status", "shrinks", "retraining", "history", "size_bounded", "typical_saving"),
    *("differ", "informative"),
}
"""Columns that hold words or yes and no."""
ROUNDED = re.compile(r"±|\[[^\"]*\d[^\"]*\]|^[-+]?[\d.,]+ ?(x|%|ms|[KMG]iB)$")


def all_tables() -> list[Table]:
    made = sweep()
    groups = judged_groups(FULL + cache("full", 10, 0.001, **OTHER) + cache("h2o", 4, 0.2, budget=100.0))
    evidence = evidence_of(rival_samples(12, {"h2o": 0.1, "tova": 0.3}))
    later = [replace(row, value=row.value * 1.1) if row.value else row for row in made]
    published = Published("a paper", {}, [Number(22.4, {"method": "full", "metric": "ppl"})])
    found = [
        *build_tables(made),
        overview(groups),
        traits_table(groups),
        method_pairs_table(evidence.families),
        changes_table(changes(made, later)[0], made),
        published_table(published, made),
    ]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("one", all_tables(), ids=lambda one: one.name)
def test_every_cell_of_a_number_is_a_number(one: Table) -> None:
    records = list(csv.DictReader(io.StringIO(to_csv(one))))
    assert records
    numbers = 0
    for record in records:
        for name, cell in record.items():
            assert not (name != "knobs" and ROUNDED.search(cell)), (name, cell)
            if name not in WORDS and cell:
                assert math.isfinite(float(cell)), (name, cell)
                numbers += 1
    assert numbers > 0
    stored = pq.read_table(io.BytesIO(to_parquet(one)))
    for field in stored.schema:
        assert field.name in WORDS or pa.types.is_floating(field.type) or pa.types.is_integer(field.type), field


def test_numbers_are_unrounded_and_bounds_have_columns() -> None:
    loss = 0.123456789012345
    made = [
        replace(row, value=loss, low=loss / 3, high=loss * 3) if row.metric == "nll_minus_full" else row
        for row in rows(measures=["perplexity"])
    ]
    for record in csv.DictReader(io.StringIO(to_csv(table(made, "perplexity")))):
        assert float(record["nll_minus_full"]) == loss
        assert (float(record["nll_minus_full_low"]), float(record["nll_minus_full_high"])) == (loss / 3, loss * 3)
    old, new = rows(measures=["perplexity"]), [replace(row, value=(row.value or 0) + 1 / 3) for row in made]
    found = csv.DictReader(io.StringIO(to_csv(changes_table(changes(old, new)[0], [*old, *new]))))
    assert any(float(record["new"]) == loss + 1 / 3 for record in found if record["new"])
    groups = judged_groups(FULL + cache("full", 40 / 3, loss, **OTHER))
    traits = traits_table(groups)
    assert traits is not None
    (record,) = csv.DictReader(io.StringIO(to_csv(traits)))
    assert (float(record["nll_minus_full"]), float(record["times_smaller"])) == (loss, pytest.approx(3))


def test_a_metric_that_left_slack_out_is_in_no_file() -> None:
    for one in all_tables():
        assert "ratio" not in next(csv.reader(io.StringIO(to_csv(one))))


def test_a_table_is_written_in_four_forms() -> None:
    assert set(written_forms(table(rows(), "memory"))) == {"csv", "parquet", "md", "tex"}

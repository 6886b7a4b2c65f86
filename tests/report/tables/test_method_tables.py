"""Overview and traits: one line for each method over all measures."""

from __future__ import annotations

from dataclasses import replace

from kvbench.report.advice.summary import summary
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview, traits_table
from tests.report.synthetic import FULL, ONE, OTHER, cache, judged_groups, latents, windows_of
from tests.shared.rows import METHODS, rows


def test_architectures_stand_in_one_table_with_sizes_first_and_where_weights_are_from() -> None:
    """Sizes by token, and each lot of weights by its kind; the smallest is marked in each architecture by itself."""
    less = cache("full", 20, 0.001, **ONE)
    sizes = [
        replace(row, metric="bytes_per_token", value=1e5)
        for row in [*FULL, *less]
        if (row.measure, row.metric) == ("memory", "held_bytes")
    ]
    assert len(sizes) == 2
    heads = [replace(row, kv_heads=9, arch="mha", converted=True, weights="repeated") for row in FULL]
    pooled = [replace(row, kv_heads=1, arch="mqa", converted=True, weights="pooled") for row in FULL]
    table = overview(groups_of([*FULL, *sizes, *less, *heads, *pooled, *latents()]))
    assert table is not None
    cells = {column.key: column.full for column in table.columns}
    assert cells["weights"] == ["trained"] * 2 + ["heads repeated", "heads mean-pooled"] + ["random"] * 4
    assert cells["kv_heads"] == ["3", "3", "9", "1", "16", "16", "1", "1"] and "converted" not in cells
    keys = [column.key for column in table.columns]
    assert keys.index("held_bytes") < keys.index("bytes_per_token") < keys.index("ppl") < keys.index("kl")
    held = next(column for column in table.columns if column.key == "held_bytes")
    assert "measured" not in cells and held.best == frozenset()  # of one method each there is no better one


def test_summary_overview_and_traits_carry_the_same_numbers() -> None:
    groups = judged_groups(FULL + cache("full", 10, 0.001, **OTHER) + cache("h2o", 4, 0.2, hits=3, budget=100.0))
    text = " ".join(summary(groups))
    assert "full+int4 in 10.0 MiB (2.00x smaller than 16-bit)" in text and "h2o in 4.00 MiB (5.00x smaller" in text
    table = overview(groups)
    assert table is not None and table.columns[0].full == ["full", "full+int4", "h2o"]
    held = next(column for column in table.columns if column.key == "held_bytes")
    assert held.full == ["40.0", "10.0", "4.00"] and held.best == {2}
    loss = next(column for column in table.columns if column.key == "nll_minus_full")
    assert loss.best == set()  # no two methods of one budget
    traits = traits_table(groups)
    assert traits is not None
    cells = {column.key: column.full for column in traits.columns}
    assert cells["x smaller than 16-bit"] == ["2.00x", "5.00x"] and cells["history"] == ["kept", "lost"]
    assert cells["size bounded"] == ["no", "yes"] and cells["shrinks"] == ["bits", "tokens"]


def test_the_best_of_the_overview_is_one_for_all_batch_sizes_of_quality() -> None:
    """Two methods measured at other batch sizes, each the better one within its own batch."""
    batches = [
        replace(row, batch=batch)
        for batch, name, held, loss in ((8, "h2o", 4.0, 0.2), (8, "tova", 8.0, 0.3), (2, "knorm", 16.0, 0.1))
        for row in cache(name, held, loss, budget=100.0)
    ]
    rows = [*FULL, *batches]
    table = overview(judged_groups(rows), None, evidence_of(windows_of(rows)))
    assert table is not None and table.columns[0].full == ["full", "h2o", "tova", "knorm"]
    loss = next(column for column in table.columns if column.key == "nll_minus_full")
    assert loss.best == {3} and any(part.startswith("bold ΔNLL") for part in table.caption)


def test_times_smaller_is_the_same_in_the_memory_table_and_in_the_overview() -> None:
    made = rows(METHODS[:4], ["perplexity", "memory"], contexts=[512])
    tables = [overview(groups_of(made)), *build_tables(made)]
    shown = [column.full for table in tables if table for column in table.columns if column.header == "x smaller"]
    assert len(shown) == 2 and shown[0] == shown[1] == ["1.00x", "3.03x", "4.76x", "6.90x"]
    # Against 16 bits, in a float32 run: half of that, in the overview and in the tables of both measures.
    halves = [column.full for table in tables if table for column in table.columns if column.key == "x_smaller"]
    assert len(halves) == 3 and all(cells == ["0.50x", "1.52x", "2.38x", "3.45x"] for cells in halves)
    assert not any(column.key == "ratio" for table in tables if table for column in table.columns)

"""One table for each measure: its lines, columns and caption."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.table import Table
from kvbench.results.row import frame_of, rows_of
from tests.report.synthetic import OOM, column, keys, sweep, table, windows_of
from tests.shared.rows import BASE, METHODS, rows


def test_baseline_is_on_top_of_every_table() -> None:
    made = rows()
    shuffled = made[len(made) // 2 :] + made[: len(made) // 2]
    for found in build_tables(shuffled):
        assert column(found, "method")[0] == "full"


def test_constants_go_to_the_caption_and_varying_settings_to_columns() -> None:
    found = table(rows(), "perplexity")
    assert keys(found) == ["method", "ppl", "nll_minus_full", "kl", "top1", "x_smaller", "engaged", "kept_tokens"]
    assert {"model Toy-135M", "budget 256", "context 1,024", "positions 128"} <= set(found.caption)
    two_models = rows() + rows(base=replace(BASE, model="org/Other", arch="mha"))
    found = table(two_models, "perplexity")
    assert keys(found)[:2] == ["model", "method"]
    assert column(found, "model")[0] == "Toy-135M" and column(found, "method")[len(METHODS)] == "full"


def test_best_is_marked_among_caches_of_as_many_heads_only() -> None:
    heads = [
        replace(row, kv_heads=1, converted=True, value=row.value / 3 if row.unit == "bytes" else row.value)
        for row in rows(METHODS[:4], ["memory"], contexts=[512])
        if row.value is not None
    ]
    found = table([*rows(METHODS[:4], ["memory"], contexts=[512]), *heads], "memory")
    held = next(c for c in found.columns if c.key == "held_bytes")
    assert held.best == {3, 7} and column(found, "converted") == ["no"] * 4 + ["yes"] * 4


def best(found: Table, key: str) -> set[tuple[str, str]]:
    """Method and batch of the marked lines."""
    (marked,) = (one.best for one in found.columns if one.key == key)
    return {(column(found, "method")[index], column(found, "batch")[index]) for index in marked}


def test_quality_of_all_batches_competes_and_times_within_one_batch_only() -> None:
    """A batch is the windows or prompts run at a time: it changes no quality, and every time."""
    scores = {("h2o", 8): 0.5, ("tova", 8): 0.6, ("knorm", 2): 0.9, ("snapkv", 2): 0.3}
    base = replace(BASE, store="dense", budget=64.0, context=512, n=100)
    tasks = [
        replace(base, method=name, batch=batch, measure="tasks", metric="score", value=value, low=value, high=value)
        for (name, batch), value in scores.items()
    ]
    assert best(table(tasks, "tasks"), "score") == {("knorm", "2")}
    times = [replace(row, measure="latency", metric="tpot_p50_ms", unit="ms") for row in tasks]
    ratios = [replace(row, measure="latency", metric="tpot_to_full", unit="x") for row in tasks]
    shares = [replace(row, measure="latency", metric="bandwidth_share", unit="share") for row in tasks]
    found = table([*times, *ratios, *shares], "latency")
    assert best(found, "tpot_p50_ms") == best(found, "tpot_to_full") == {("h2o", "8"), ("snapkv", "2")}
    assert best(found, "bandwidth_share") == {("tova", "8"), ("knorm", "2")}


def test_throughput_at_the_largest_batch_competes_over_all_batches() -> None:
    rates = {("h2o", 64): 100.0, ("tova", 64): 90.0, ("knorm", 128): 150.0}
    base = replace(BASE, store="dense", budget=64.0, context=512, measure="latency", protocol="largest_batch")
    made = [
        replace(base, method=name, batch=batch, metric="tokens_per_s", unit="tokens/s", value=v, low=v - 1, high=v + 1)
        for (name, batch), v in rates.items()
    ]
    assert best(table(made, "latency"), "tokens_per_s") == {("knorm", "128")}


def test_windows_stand_in_the_caption_or_in_a_column_and_come_from_the_samples_of_older_rows() -> None:
    made = rows(METHODS[:4], ["perplexity"])
    counted = [replace(row, metric="windows", value=32.0, low=None, high=None) for row in made if row.metric == "ppl"]
    assert "windows 32" in table([*made, *counted], "perplexity").caption
    counted[-1] = replace(counted[-1], value=8.0)
    assert column(table([*made, *counted], "perplexity"), "windows") == ["32", "32", "32", "8"]
    old = next(
        one for one in build_tables(made, evidence=evidence_of(windows_of(made, 12))) if one.name == "perplexity"
    )
    assert "windows 12" in old.caption  # also of the full cache, which has no differences of its own
    assert "windows" not in " ".join(table(made, "perplexity").caption)


def test_budgets_of_a_method_stand_together() -> None:
    made = sweep()
    found = table([row for budget in (None, 256, 64, 512, 128) for row in made if row.budget == budget], "perplexity")
    assert column(found, "budget") == ["–", "–", *["64", "128", "256", "512"] * 2]


def test_budget_is_a_column_where_it_varies() -> None:
    found = table(sweep(), "perplexity")
    assert column(found, "budget") == ["–", "–", *["64", "128", "256", "512"] * 2]
    assert "bits" not in keys(found)


def test_intervals_stand_in_the_cells() -> None:
    found = table(rows(), "perplexity")
    assert column(found, "ppl")[0] == "22.31 [21.42, 23.43]"
    assert column(found, "nll_minus_full")[3] == "+0.069 [+0.059, +0.079]"
    assert "±" in next(c for c in found.columns if c.key == "ppl").compact[0]


def test_latency_and_memory_have_a_line_per_context_and_share_the_slope() -> None:
    found = table(rows(), "latency")
    assert len(column(found, "method")) == 3 * len(METHODS)
    assert column(found, "slope_ms_per_1k")[0] == column(found, "slope_ms_per_1k")[len(METHODS)] == "6.00"
    # A slope over contexts knows no context, kernel or batch of its own.
    made = [
        replace(row, kernel=None, batch=None) if row.metric == "slope_ms_per_1k" else row
        for row in rows(measures=["latency"])
    ]
    assert column(table(made, "latency"), "slope_ms_per_1k") == column(found, "slope_ms_per_1k")
    held = next(c for c in table(rows(), "memory").columns if c.key == "held_bytes")
    assert held.header == "held MiB" and held.full[0] == "22.5"
    assert "held_bytes.codes" in keys(table(rows(), "memory_parts"))


def test_a_later_run_replaces_what_an_earlier_one_measured() -> None:
    old = rows(measures=["perplexity"])
    new = [replace(row, run="later", value=30.0, low=29.0, high=31.0) for row in old if row.metric == "ppl"]
    found = table([*old, *new], "perplexity")
    assert column(found, "ppl")[0] == "30.00 [29.00, 31.00]"
    assert len(column(found, "ppl")) == len(METHODS)
    assert any("measured again" in part for part in found.caption)
    failed = replace(new[0], value=None, status="failed", note="lost")
    assert column(table([*old, *new, failed], "perplexity"), "ppl")[0] == "30.00 [29.00, 31.00]"


def test_failed_cells_stay_in_the_table() -> None:
    found = table([*rows(), OOM], "latency")
    assert column(found, "status").count("oom") == 1
    position = column(found, "status").index("oom")
    assert column(found, "tpot_p50_ms")[position] == "–"


def test_a_number_that_is_not_finite_is_called_that() -> None:
    """In rows as they are measured, and in rows that were read from a file, which hold neither inf nor nan."""
    for undefined in (math.inf, math.nan):
        made = [replace(row, value=undefined, low=None, high=None) if row.metric == "ppl" else row for row in rows()]
        found = table(rows_of(frame_of(made)), "perplexity")
        assert set(column(found, "ppl")) == {"not finite"}
        assert set(column(table(made, "perplexity"), "ppl")) == {"not finite"}


def test_an_unknown_measure_gets_a_table_of_its_own() -> None:
    made = [replace(BASE, method="full", measure="speed_of_light", metric="length_ratio", value=1.25)]
    assert column(table(made, "speed_of_light"), "length_ratio") == ["1.25"]


def test_bytes_read_a_second_are_a_column_of_latency() -> None:
    made = [
        replace(BASE, method="full", measure="latency", metric=metric, value=value, unit=unit)
        for metric, value, unit in (("tpot_p50_ms", 12.5, "ms"), ("bytes_per_s", 3 * 2**30, "bytes/s"))
    ]
    assert column(table(made, "latency"), "bytes_per_s") == ["3.00"]


def test_ten_thousand_rows_are_read_and_tabled(tmp_path: Path) -> None:
    seeds = [rows(base=replace(BASE, seed=seed, model=f"org/Model-{seed}")) for seed in range(20)]
    made = list(itertools.chain(*seeds))
    assert len(made) > 10_000
    tables = build_tables(made)
    assert len(column(next(found for found in tables if found.name == "latency"), "method")) == 20 * 3 * len(METHODS)


def test_perplexity_shows_decode_kept_tokens_while_scored_and_x_smaller_than_16_bit() -> None:
    made = [
        replace(row, knobs=f'{{"decode": "{mode}"}}') if row.method == name else row
        for row in rows(METHODS, ["perplexity"])
        for name, mode in (("h2o", "evict"),)
    ]
    again = [replace(row, knobs='{"decode": "append"}') for row in made if row.method == "h2o"]
    found = table([*made, *again], "perplexity")
    modes = dict(zip(column(found, "method"), column(found, "decode"), strict=True))
    assert modes["full"] == "–" and {"evict", "append"} <= set(column(found, "decode")) and "knobs" not in keys(found)
    header = next(one.header for one in found.columns if one.key == "x_smaller")
    assert header == "x smaller than 16-bit" and "kept_tokens" in keys(found)
    assert {record["decode"] for record in found.records} == {None, "evict", "append"}
    kept = [replace(row, metric="scored_kept_tokens", value=300.0) for row in [*made, *again] if row.metric == "ppl"]
    kept[0] = replace(kept[0], value=1088.0)
    found = table([*made, *again, *kept], "perplexity")
    assert "scored_kept_tokens" in keys(found) and "kept_tokens" not in keys(found)
    found = table([*made, *again, *kept[:-1]], "perplexity")
    assert {"scored_kept_tokens", "kept_tokens"} <= set(keys(found))
    old = [row for row in made if row.metric not in ("x_smaller", "scored_bytes")]
    assert "x_smaller" not in keys(table(old, "perplexity"))

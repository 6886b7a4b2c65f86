"""Every warning, from numbers and flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.compare.warnings import find_warnings, remarks
from kvbench.results.row import FLAGS, GRAPH, Row
from tests.report.synthetic import FULL, OOM, column, kinds, latents, table
from tests.shared.rows import BASE, METHODS, rows


def test_a_sound_comparison_has_no_warnings() -> None:
    assert kinds(rows()) == []


@pytest.mark.parametrize("engaged", [0.0, None])
def test_methods_that_did_not_engage_are_named(engaged: float | None) -> None:
    h2o = [method for method in METHODS if method[:2] in (("full", "dense"), ("h2o", "dense"))]
    made = [
        replace(row, value=engaged) if row.metric == "engaged" and row.method == "h2o" else row
        for row in rows(h2o, measures=["perplexity"])
    ]
    (warning,) = find_warnings(made)
    assert warning.kind == "did not engage" and warning.text.startswith("h2o, perplexity at context 1,024")


def test_hardly_engaged() -> None:
    made = [replace(row, value=0.1) if row.metric == "engaged" and row.value else row for row in rows()]
    assert set(kinds(made)) == {"hardly engaged"}


def test_better_than_full_only_beyond_the_interval() -> None:
    made = rows(measures=["perplexity"])
    better = [
        replace(row, value=-0.02, low=-0.03, high=-0.01)
        if row.metric == "nll_minus_full" and row.method == "kivi2"
        else row
        for row in made
    ]
    assert kinds(better) == ["better than full"]
    within = [replace(row, high=0.01) if row.value == -0.02 else row for row in better]
    assert kinds(within) == []


def test_more_needles_than_full_beyond_the_interval() -> None:
    made = [
        replace(row, value=0.3, low=0.2, high=0.4)
        if row.metric == "hit_rate" and row.method == "full"
        else replace(row, low=0.5, high=1.0)
        if row.metric == "hit_rate" and row.method == "kivi8"
        else row
        for row in rows(measures=["needle"], lengths=[1024])
    ]
    better = [warning.text for warning in find_warnings(made) if warning.kind == "better than full"]
    assert sum(text.startswith("kivi8, needle at context 1,024") for text in better) == 4  # three depths, and all
    assert not any(text.startswith("full,") for text in better)


def test_uninformative_needles_are_marked() -> None:
    made = [
        replace(row, value=0.25 if row.metric == "hit_rate" else 1.0)
        if row.measure == "needle"
        and row.method == "full"
        and (row.context, row.depth) == (2048, 0.5)
        and row.metric in ("hit_rate", "hits")
        else row
        for row in rows(measures=["needle"])
    ]
    assert kinds(made) == ["uninformative"]
    (warning,) = find_warnings([replace(row, protocol="niah_single_1") for row in made])
    assert warning.text.startswith("needle niah_single_1 at length 2048, depth 0.5: the full cache finds only 1/")
    grid = table(made, "needle_grid")
    marked = [cell for cell in column(grid, "depth_0.5") if cell.endswith("†")]
    assert len(marked) == len(METHODS)


def test_failures_missing_numbers_and_notes() -> None:
    made = rows(measures=["perplexity"])
    made = [replace(row, value=None) if row.metric == "kl" and row.method == "kivi2" else row for row in made]
    made.append(replace(OOM, note="line one\nline two"))
    made.append(replace(OOM, method="random", status="skipped", note=None))
    found = find_warnings(made)
    assert [warning.kind for warning in found] == ["not a number", "oom", "skipped"]
    assert found[1].text.endswith("line one line two") and found[2].text.endswith("no reason recorded")
    assert [warning.kind for warning in find_warnings([], {"run": {"status": "failed", "error": "boom"}})] == [
        "run failed"
    ]
    assert [warning.kind for warning in find_warnings([], {"run": {"status": "running"}})] == ["still running"]
    assert find_warnings([], {"run": {"status": "ok"}}) == []


def test_notes_are_warnings_unless_the_baseline_carries_them_too() -> None:
    made = [replace(row, note="4 windows") for row in rows(measures=["perplexity"])]
    assert kinds(made) == [] and len(remarks(made)) == 1
    made = [replace(row, note="float32 angles") if row.method == "streaming_llm" else row for row in rows()]
    (warning,) = find_warnings(made)
    assert warning.kind == "note" and warning.text.count("streaming_llm (") == 4


def test_eager_steps_beside_captured_ones_are_named() -> None:
    def timed(**kernels: str) -> list[Row]:
        made = rows(measures=["latency"], base=replace(BASE, device="cuda"))
        return [replace(row, kernel=kernels.get(str(row.method), "triton" + GRAPH)) for row in made]

    (warning,) = find_warnings(timed(h2o="reference", random="triton"))
    assert warning.kind == "eager beside captured" and warning.text.startswith("h2o, h2o+int4, random: ")
    assert "latency.graph=false" in warning.text
    assert find_warnings(timed()) == find_warnings([replace(row, kernel="triton") for row in timed()]) == []
    on_cpu = [replace(row, device="cpu", kernel="cpu-c++") for row in timed()]
    assert find_warnings([*timed(), *on_cpu]) == []
    assert "triton, graph" in column(table(timed(h2o="reference"), "latency"), "kernel")


def test_needle_without_a_baseline_says_so() -> None:
    made = [row for row in rows(measures=["needle"]) if row.method != "full"]
    assert kinds(made) == ["no baseline"]


def test_identical_warnings_of_several_methods_are_merged() -> None:
    made = rows(measures=["latency"], contexts=[512])
    steady = [
        replace(row, metric="steady", value=0.0, flags="unsteady", note="it drifted")
        for row in made
        if row.metric == "tpot_p50_ms"
    ]
    (warning,) = find_warnings([*made, *steady])
    assert warning.text.startswith("full, kivi8, kivi4, ") and warning.text.endswith(
        f"at context 512: {FLAGS['unsteady']}"
    )


def test_unsteady_times_name_the_model_where_there_are_several() -> None:
    shaky = replace(FULL[0], measure="latency", context=1024, metric="steady", value=0.0, flags="unsteady")
    (alone,) = [warning.text for warning in find_warnings([*FULL, shaky]) if warning.kind == "unsteady timing"]
    assert alone.endswith(f"latency at context 1,024: {FLAGS['unsteady']}")
    (several,) = [warning.text for warning in find_warnings([*latents(), shaky]) if warning.kind == "unsteady timing"]
    assert several.endswith(f"latency at context 1,024: Toy-135M with 3 KV heads, {FLAGS['unsteady']}")


def task_rows(flags: str | None, note: str | None) -> list[Row]:
    base = replace(BASE, measure="tasks", metric="score", protocol="hotpotqa", context=512, value=0.0)
    return [
        replace(base, method="full", store="dense", flags=flags, note=note),
        replace(base, method="h2o", store="dense", budget=64, flags=flags, note=note),
    ]


def test_flags_give_warnings_and_the_wording_of_notes_does_not() -> None:
    flagged = kinds(task_rows("better_than_full uninformative", None))
    assert sorted(set(flagged)) == ["better than full", "uninformative"]
    noted = task_rows(None, "uninformative: x; better than full beyond the interval; unsteady: y; random weights")
    assert kinds(noted) == [] and len(remarks(noted)) == 4  # printed as they are, among the remarks


def test_a_flag_without_a_warning_of_its_own_is_shown_with_its_meaning() -> None:
    (row,) = [row for row in rows(METHODS[:1], ["perplexity"]) if row.metric == "ppl"]
    (warning,) = find_warnings([replace(row, flags="not_finite")])
    assert warning.kind == "not finite" and warning.text.endswith(FLAGS["not_finite"])

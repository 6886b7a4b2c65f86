"""Samples of windows are paired with the full cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvbench.report.compare.window_samples import read_samples
from kvbench.report.figures.method_panels import loss_by_window
from tests.report.synthetic import run_of
from tests.shared.rows import BASE


def test_samples_are_paired_and_the_last_measurement_of_a_window_counts(tmp_path: Path) -> None:
    window = {"measure": "perplexity", "context": 64, "sha256": "a"}
    full = {"method": "full", "store": "dense", "knobs": {}, "nll": 3.0}
    for nll in (3.5, 3.25):
        run = run_of(tmp_path, [])
        h2o = {"method": "h2o", "store": "dense", "knobs": {"budget": 32, "seed": 0, "decode": "evict"}, "nll": nll}
        run.add_samples([window | {"methods": [full, h2o]}, {"measure": "needle"}])
    found = read_samples(sorted(path for path in tmp_path.iterdir()))
    assert [(sample.row.method, sample.row.budget) for sample in found] == [("h2o", 32.0)]
    assert found[0].difference in (0.5, 0.25)


def test_one_window_under_two_models_is_two_samples(tmp_path: Path) -> None:
    made = [replace(BASE, method="full", store="dense", measure="perplexity", metric="ppl", value=2.0)]
    for name, nll in (("org/A", 3.5), ("org/B", 3.25)):
        run = run_of(tmp_path, [replace(row, model=name) for row in made])
        scored = [{"method": method, "store": "dense", "nll": one} for method, one in (("full", 3.0), ("h2o", nll))]
        window = {"measure": "perplexity", "context": 64, "methods": scored}
        run.add_samples([window | {"sha256": place} for place in "ab"])
    found = read_samples(sorted(tmp_path.iterdir()))
    assert {(sample.row.model, sample.difference) for sample in found} == {("org/A", 0.5), ("org/B", 0.25)}
    plot = loss_by_window(found)
    assert plot is not None and plot.figure.get_suptitle() in ("A", "B")

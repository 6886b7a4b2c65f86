"""A report of 16 windows: verdicts, the best methods in bold, the table and the heat map of all pairs."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path

from kvbench.report.page.write import write_report
from kvbench.results.row import Row
from tests.report.synthetic import run_of
from tests.shared.rows import BASE, METHODS, rows

WINDOWS = 16
LOSSES = {"h2o": 0.1, "streaming_llm": 0.1002, "random": 0.7, "kivi8": 0.0001}


def nll_of(row: Row, window: int) -> float:
    noise = random.Random(f"{row.method} {window}").gauss(0, 0.002)
    return 3 + 0.1 * window + LOSSES[str(row.method)] + noise


def measured() -> list[Row]:
    dense = [method for method in METHODS if method[1] != "int4"]
    return [row for row in rows(dense, ["perplexity"]) if row.method in (*LOSSES, "full")]


def entry(row: Row, nll: float) -> dict[str, object]:
    names = ("bits", "group", "residual", "budget", "window", "variant", "sinks")
    knobs = {name: getattr(row, name) for name in names if getattr(row, name) is not None}
    return {"method": row.method, "store": row.store, "knobs": knobs, "nll": nll}


def test_verdicts_best_methods_and_pairs_reach_the_page_and_the_files(tmp_path: Path) -> None:
    made = measured()
    run = run_of(tmp_path, made)
    methods = {row.method: row for row in made if row.metric == "ppl"}
    full = replace(BASE, method="full", store="dense")
    for window in range(WINDOWS):
        scored = [entry(full, 3 + 0.1 * window)]
        scored += [entry(row, nll_of(row, window)) for name, row in methods.items() if name != "full"]
        where = {"measure": "perplexity", "context": 1024, "protocol": "prefill_decode", "sha256": str(window)}
        run.add_samples([where | {"methods": scored}])
    out = tmp_path / "report"
    page = write_report([run.path], out).read_text()
    with (out / "perplexity.csv").open() as file:
        verdicts = {line["method"]: line["verdict"] for line in csv.DictReader(file)}
    assert verdicts == {
        "full": "",
        "kivi8": "within_margin",
        "h2o": "worse",
        "streaming_llm": "worse",
        "random": "worse",
    }
    with (out / "method_pairs.csv").open() as file:
        pairs = {frozenset((line["method"], line["other"])): line["differ"] for line in csv.DictReader(file)}
    assert pairs[frozenset(("h2o", "streaming_llm"))] == "False" and pairs[frozenset(("h2o", "random"))] == "True"
    assert (out / "method_pairs.png").stat().st_size > 5_000
    text = (out / "report.md").read_text()
    assert "In NLL, of 4 methods 1 is shown within 0.01 nats of the full cache: 3 worse." in text
    assert "| Long chat | **kivi8** | all tokens | 1.52x |" in text
    table = text[text.index("### Perplexity") :]
    bold = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|") and "**" in line}
    assert {"h2o", "streaming_llm"} <= bold and "random" not in bold
    assert "Methods compared pairwise" in page and "cannot be told apart" in page and "0.01 nats" in page

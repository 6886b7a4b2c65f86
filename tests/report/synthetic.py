"""Synthetic reports for tests: rows, run folders and single methods with given numbers. None is measured."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.card import CardLine
from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.methods import Group, groups_of
from kvbench.report.compare.warnings import find_warnings
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.table import Table
from kvbench.results.folder import RunFolder
from kvbench.results.row import Row
from tests.shared.rows import BASE, METHODS, rows

OOM = replace(BASE, method="h2o", store="dense", budget=4096, measure="latency", status="oom", note="tried 2 GiB")


def table(made: Sequence[Row], name: str) -> Table:
    return next(found for found in build_tables(made) if found.name == name)


def column(found: Table, key: str) -> list[str]:
    return next(column.full for column in found.columns if column.key == key)


def keys(found: Table) -> list[str]:
    return [column.key for column in found.columns]


def kinds(made: Sequence[Row]) -> list[str]:
    return [warning.kind for warning in find_warnings(made)]


def sweep() -> list[Row]:
    """h2o and streaming_llm at four budgets, beside full and kivi4."""
    fixed = [method for method in METHODS if method[0] in ("full", "kivi4")]
    swept = [
        (name, "dense", {"budget": budget}, 22.4 + scale / budget, budget / 1024)
        for name, scale in (("h2o", 300), ("streaming_llm", 500))
        for budget in (64, 128, 256, 512)
    ]
    return rows([*fixed, *swept])


def run_of(where: Path, made: Sequence[Row], status: str = "ok") -> RunFolder:
    run = RunFolder.create(where, "test", {}, {"command": "python -m kvbench 'compare=[full,h2o]'", "packages": {}})
    if made:
        run.add(made)
    if status != "running":
        run.finish(status, error=None if status == "ok" else "it broke")
    return run


MIB = 2.0**20


def cache(
    method: str,
    held: float,
    loss: float,
    *,
    reach: float = 0.005,
    hits: int = 12,
    budget: float | None = None,
    store: str = "dense",
    **more: Any,
) -> list[Row]:
    """A method that holds `held` MiB of the full cache's 40 and lost `loss` nats, give or take `reach`."""
    start = replace(BASE, method=method, store=store, budget=budget, **more)
    full = method == "full" and store == "dense"
    seen = replace(start, measure="perplexity", context=1024, n=1024, protocol="prefill_decode", batch=1)
    bounds = {"low": loss - reach, "high": loss + reach} if not full else {"low": 0.0, "high": 0.0}
    found = [
        replace(seen, metric="nll_minus_full", value=loss, **bounds),
        replace(seen, metric="ppl", value=20 * math.exp(loss), low=19 * math.exp(loss), high=21 * math.exp(loss)),
        replace(seen, metric="kl", value=abs(loss) / 2 + 1e-6, low=abs(loss) / 2.1, high=abs(loss) / 1.9 + 2e-6),
        replace(seen, metric="engaged", value=0.0 if full else 0.99),
        replace(seen, metric="kept_tokens", value=budget or 1151.0),
    ]
    found.append(replace(seen, metric="scored_bytes", value=held * MIB, unit="bytes"))
    found.append(
        replace(start, measure="memory", context=2048, metric="held_bytes", value=2 * held * MIB, unit="bytes")
    )
    for depth in (0.1, 0.5, 0.9):
        there = replace(start, measure="needle", context=2048, question="after", depth=depth, n=4)
        part = min(4, max(0, hits - {0.1: 0, 0.5: 4, 0.9: 8}[depth]))
        found += [replace(there, metric="hits", value=float(part)), replace(there, metric="hit_rate", value=part / 4)]
    return found


FULL = cache("full", 40, 0)


ONE = {"store": "int8", "bits": 8}


OTHER = {"store": "int4", "bits": 4}


WINDOWS = 16
HALF = 0.5502 / 2
"""Half width of the 95% interval of WINDOWS differences that lie at +1/2 and -1/2: t(15) / (2 sqrt(15))."""


def windows_of(rows: Sequence[Row], windows: int = WINDOWS) -> list[WindowSample]:
    """Windows whose mean is each row's nll_minus_full and, if there are 16, whose interval is the row's."""
    found = []
    for row in rows:
        if row.metric == "nll_minus_full" and not is_baseline(row) and None not in (row.value, row.low, row.high):
            step = (row.high - row.low) / 4 / HALF  # type: ignore[operator]
            differences = [(row.value or 0.0) + step * (-1) ** place for place in range(windows)]
            found += [WindowSample(row, str(place), each) for place, each in enumerate(differences)]
    return found


def judged_groups(rows: Sequence[Row], windows: int = WINDOWS) -> list[Group]:
    """The groups of the rows, with a verdict for each method from `windows` windows."""
    return groups_of(rows, evidence_of(windows_of(rows, windows)))


def line_on(rows: Sequence[Row], key: str, windows: int = WINDOWS) -> CardLine:
    """The line of the answer card for one need, from windows made of the rows."""
    evidence = evidence_of(windows_of(rows, windows))
    card = answer_card(groups_of(rows, evidence), evidence)
    assert card is not None
    return next(line for line in card.lines if line.key == key)


def chosen(rows: Sequence[Row], key: str) -> str:
    return line_on(rows, key).setting


def latents() -> list[Row]:
    """A model of random weights in two MLA layouts, int4 beside the full cache of each."""
    made = []
    for layout, heads, mib in (("expand", 16, 40.0), ("absorbed", 1, 4.0)):
        columns = {"model": "org/Latent", "arch": "mla", "kv_heads": heads, "knobs": f'{{"mla": "{layout}"}}'}
        for own in (cache("full", mib, 0.0), cache("full", mib / 5, 0.0, store="int4", bits=4)):
            made += [replace(row, weights="random", **columns) for row in own]
    return made


def samples() -> list[WindowSample]:
    rule = [replace(BASE, method=name, store="dense", budget=256.0, context=1024) for name in ("h2o", "random", "tova")]
    return [WindowSample(row, str(i), 0.01 * i * (1 + place)) for place, row in enumerate(rule) for i in range(6)]


def crowd() -> list[Row]:
    """Six keep rules at four budgets beside the fixed methods: more than one panel can hold."""
    fixed = [method for method in METHODS if method[0] in ("full", "kivi8", "kivi4", "kivi2")]
    names = ("h2o", "streaming_llm", "random", "tova", "snapkv", "expected_attention")
    swept = [
        (name, "dense", {"budget": budget}, 22.4 + 100 * (place + 1) / budget, budget / 1024)
        for place, name in enumerate(names)
        for budget in (64.0, 128.0, 256.0, 512.0)
    ]
    made = rows([*fixed, *swept], contexts=(512, 2048), lengths=(1024,))
    at = [row for row in made if row.metric == "kl" and row.value]
    return made + [replace(row, metric="kl_at", position=1024 + 16 * i) for row in at for i in range(8)]


def rival_samples(
    windows: int, losses: Mapping[str, float], budget: float = 256.0, seed: int = 0
) -> list[WindowSample]:
    """Windows of methods of one budget: a difference of the window that all share, and noise of 0.01 nats of each."""
    draw = random.Random(seed)
    shared = [draw.gauss(0, 0.05) for _ in range(windows)]
    base = replace(BASE, store="dense", budget=budget, context=1024, protocol="prefill_decode")
    return [
        WindowSample(replace(base, method=name), str(place), loss + common + draw.gauss(0, 0.01))
        for name, loss in losses.items()
        for place, common in enumerate(shared)
    ]

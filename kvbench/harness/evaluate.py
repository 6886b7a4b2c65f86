"""Every method on every task of lm-evaluation-harness, as rows of a run folder."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console

from kvbench.checks import check_switches
from kvbench.config import MethodConfig, did_you_mean
from kvbench.errors import EXIT_SOME_FAILED, UserError
from kvbench.files import to_json, write_atomic
from kvbench.harness.adapter import Counts, KVBenchLM
from kvbench.harness.settings import Asked
from kvbench.measures.context import MethodRun, failure
from kvbench.measures.result import engagement_rows
from kvbench.measures.statistics import bounded_interval, bounds, mean_interval, units_of, wilson
from kvbench.method_runs import instantiate, method_runs
from kvbench.models.load import load_model, model_spec
from kvbench.progress import Progress
from kvbench.report.tables.measure_tables import TerminalTable
from kvbench.report.tables.published import print_published, published_of
from kvbench.results import provenance
from kvbench.results.folder import RunFolder, check_writable
from kvbench.results.row import Row, frame_of, rows_of, with_flags
from kvbench.sweep.plan import node_of
from kvbench.texts.load import Text

RESULTS = "lm_eval.json"
"""In the run folder: what lm_eval itself says, by method and task."""


def evaluate(config: DictConfig, methods: list[MethodConfig], asked: Asked) -> int:
    """Measure, print the table, and write the run folder; returns 0, or 3 where a task failed.

    What can be refused is refused first, with a UserError and before anything is written.
    """
    check_switches(config)
    published = published_of(config.published)
    check_writable(config.results_dir)
    manager = manager_of(asked)
    made = [(method, instantiate(method)) for method in methods]
    loaded = load_model(model_spec(node_of(config, "model")))
    # A constructor that refuses does so before anything is measured.
    models = [KVBenchLM(loaded, method, config.kernel, asked.max_gen_toks, asked.held_back) for _, method in made]
    runs = method_runs(made, loaded, Text("", "", ""), config, Progress(), ())
    label = "lm-eval-" + "-".join(method.label for method in methods if not method.is_baseline)[:50]
    resolved = {
        "harness": vars(asked),
        "methods": [method.effective for method in methods],
        "model": node_of(config, "model"),
        "seed": config.seed,
        "kernel": config.kernel,
        "published": None if published is None else node_of(config, "published"),
    }
    folder = RunFolder.create(config.results_dir, label.rstrip("-"), resolved, provenance.collect())
    status = "interrupted"
    try:
        for task in asked.tasks:
            _task(folder, task, list(zip(runs, models, strict=True)), manager, asked)
        states = {row.status for row in folder.rows}
        status = "failed" if "failed" in states else "oom" if "oom" in states else "ok"
    except Exception as error:
        status = "failed"
        if isinstance(error, UserError) and not folder.rows:
            shutil.rmtree(folder.path)
        raise
    finally:
        if folder.path.exists():
            folder.finish(status)
    rows = rows_of(frame_of(folder.rows))  # as they are read from a run folder: a score may be undefined
    Console().print(TerminalTable(rows))
    print_published(published, rows)
    print(f"run folder: {folder.path}\nreport:     python -m kvbench.report {folder.path}")
    return 0 if status == "ok" else EXIT_SOME_FAILED


def manager_of(asked: Asked) -> Any:
    """lm_eval's index of tasks. Raises UserError for a name that it does not have."""
    from lm_eval.tasks import TaskManager

    if asked.include_path is not None:
        own = TaskManager(include_path=asked.include_path, include_defaults=False)
        if set(asked.tasks) <= set(own.all_tasks):
            return own  # the index of all tasks takes a while
    manager = TaskManager(include_path=asked.include_path)
    for task in asked.tasks:
        if task not in manager.all_tasks:
            near = did_you_mean(task, list(manager.all_tasks))
            raise UserError(
                f"tasks={task} is unknown to lm_eval{near}; lm-eval ls tasks lists them, and include_path= "
                "names a folder of your own"
            )
    return manager


def _task(folder: RunFolder, task: str, pairs: list[tuple[MethodRun, KVBenchLM]], manager: Any, asked: Asked) -> None:
    """One task, or a group of them, with every method, the full cache first."""
    import lm_eval

    full: dict[tuple[str, str], list[float]] = {}
    full_is_finite = True
    said: dict[str, Any] = {}
    for method, model in pairs:
        model.take()
        try:
            found = lm_eval.simple_evaluate(
                model,
                tasks=[task],
                num_fewshot=asked.num_fewshot,
                limit=asked.limit,
                task_manager=manager,
                apply_chat_template=asked.chat,
                bootstrap_iters=1000,
            )
        except UserError:
            raise
        except Exception as error:  # a data set that cannot be had, or memory: the other methods and tasks go on
            row = replace(method.row, measure="harness", dataset=task, **failure(error))
            print(f"kvbench: {row.status}: {method.label} {task}: {row.note}", file=sys.stderr)
            folder.add([row])
            continue
        counts = model.take()
        base = replace(
            method.row,
            measure="harness",
            protocol=_protocol(asked),
            note=_note(found, counts, asked),
            bos="first" if model.adds_bos else "none",
        )
        is_baseline = method is pairs[0][0]
        full_is_finite = full_is_finite and not (is_baseline and counts.not_finite)
        scores = score_rows(base, found, full, is_baseline)
        folder.add([*only_finite(scores, not counts.not_finite, full_is_finite), *_counted(base, task, counts)])
        folder.add_samples(_samples(method, found))
        said[method.label] = {key: found[key] for key in ("results", "versions", "n-shot", "n-samples")}
        write_atomic(folder.path / f"{task.replace('/', '_')}.{RESULTS}", to_json(said))
        if counts.predicted and not counts.engaged and not method.label.startswith("full"):
            print(
                f"kvbench: {method.label} {task}: compression never engaged; answers of one token come from the "
                "context's own logits (held_back=1 sends them through the cache)",
                file=sys.stderr,
            )


def score_rows(
    base: Row, found: dict[str, Any], full: dict[tuple[str, str], list[float]], is_baseline: bool
) -> Iterator[Row]:
    """A row for each metric of each task, and its paired difference to the full cache, whose values fill `full`."""
    for task, metrics in found["results"].items():
        n = found.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in metrics.items():
            metric, comma, used = name.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            metric = metric if used == "none" else f"{metric} ({used})"
            samples = [sample for sample in found["samples"].get(task, []) if sample.get("filter") == used]
            values = [sample.get(name.partition(",")[0]) for sample in samples]
            known = [float(one) for one in values if isinstance(one, bool | int | float | np.number)]
            complete = len(known) == len(values) > 0
            higher = found.get("higher_is_better", {}).get(task, {}).get(name.partition(",")[0])
            if is_baseline and complete:
                full[task, name] = known
            theirs = full.get((task, name), []) if complete else []
            paired = len(theirs) == len(known) > 0
            here = replace(base, dataset=task, metric=metric, value=float(value), unit="", n=n)
            if paired and higher and not any(theirs):
                here = with_flags(here, "uninformative")
            error = metrics.get(name.replace(",", "_stderr,"))
            yield replace(here, **_interval(known if complete else [], value, error))
            if paired and not is_baseline:
                yield _minus_full(replace(here, metric=f"{metric}_minus_full"), known, theirs, higher)


def only_finite(rows: Iterable[Row], finite: bool, full_is_finite: bool) -> Iterator[Row]:
    """The rows; without a value and flagged where logits of the method, or of the full cache that a difference is
    taken to, were not finite: a likelihood or an answer of such logits says nothing."""
    for row in rows:
        if finite and (full_is_finite or not (row.metric or "").endswith("_minus_full")):
            yield row
        else:
            yield with_flags(replace(row, value=math.nan, low=None, high=None), "not_finite")


def _minus_full(base: Row, known: list[float], full: list[float], higher_is_better: bool | None) -> Row:
    """The mean of paired differences, flagged where it is better beyond its interval."""
    units = units_of(np.subtract(known, full)[:, None])
    within = all(0 <= value <= 1 for value in (*known, *full))
    found = bounded_interval(units, -1.0, 1.0, base.seed or 0) if within else mean_interval(units, base.seed or 0)
    better = found is not None and (found[0] > 0 if higher_is_better else found[1] < 0)
    if better and higher_is_better is not None:
        base = with_flags(base, "better_than_full")
    return replace(base, value=units.mean, **bounds(found))


def _interval(values: list[float], value: float, error: Any) -> dict[str, Any]:
    """Wilson's where every document is right or wrong, else 1.96 standard errors of lm_eval to both sides."""
    if values and set(values) <= {0.0, 1.0} and abs(sum(values) / len(values) - value) < 1e-9:
        return bounds(wilson(int(sum(values)), len(values)))
    if not isinstance(error, int | float | np.number):
        return {}
    return bounds((float(value - 1.96 * error), float(value + 1.96 * error)))


def _counted(base: Row, task: str, counts: Counts) -> Iterator[Row]:
    here = replace(base, dataset=task, n=counts.predicted)
    if counts.predicted:
        yield from engagement_rows(here, counts.engaged / counts.predicted, sum(counts.kept) / len(counts.kept))


def _protocol(asked: Asked) -> str:
    return "lm_eval" + (f", held back {asked.held_back}" if asked.held_back else "") + (", chat" if asked.chat else "")


def _note(found: dict[str, Any], counts: Counts, asked: Asked) -> str:
    shots = sorted({str(shot) for shot in found.get("n-shot", {}).values()})
    versions = sorted({str(version) for version in found.get("versions", {}).values()})
    installed = provenance.package_version("lm_eval")
    parts = [f"lm_eval {installed}, task version {', '.join(versions)}, {', '.join(shots)} shots"]
    if asked.limit is not None:
        parts.append(f"limit {asked.limit}")
    if counts.cut:
        parts.append(f"{counts.cut} contexts lost their beginning, too long for the model")
    return "; ".join(parts)


def _samples(method: MethodRun, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, samples in found["samples"].items():
        for sample in samples:
            yield {
                "measure": "harness",
                "task": task,
                "method": method.row.method,
                "store": method.row.store,
                "knobs": method.knobs,
                "doc": sample["doc_id"],
                "filter": sample.get("filter"),
                "sha256": sample.get("prompt_hash"),
                "answers": sample["filtered_resps"],
                **{metric: sample.get(metric) for metric in sample.get("metrics", [])},
            }

"""Runs one experiment: load the model, measure every cell that is not measured yet, write rows, print the table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, check_model
from kvbench.cache.calibrate import calibrate
from kvbench.checks import check_calibration_text, check_measures_fit, check_methods, check_switches, small_prompts
from kvbench.config import MethodConfig
from kvbench.errors import EXIT_SOME_FAILED, NO_SPACE, UserError
from kvbench.gate import gate
from kvbench.measures.context import RunContext
from kvbench.measures.measure import Measure
from kvbench.measures.target import Target
from kvbench.method_runs import device_name, instantiate, method_runs
from kvbench.models.checkpoint import ModelSpec, model_spec
from kvbench.models.load import LoadedModel, describe, load_model, load_tokenizer, pick_device, pick_dtype, revision_of
from kvbench.models.shape import ModelShape
from kvbench.progress import Progress
from kvbench.report.compare.origins import origins_of
from kvbench.report.compare.window_samples import read_windows
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.tables.measure_tables import TerminalTable
from kvbench.report.tables.published import Published, print_published, published_of
from kvbench.results import provenance
from kvbench.results.folder import RunFolder, check_writable
from kvbench.results.ledger import DONE, record_rows
from kvbench.results.recorded_config import read_config, recorded_headlines
from kvbench.results.row import Row, with_flags
from kvbench.sweep.cells import Cell, Facts, cell_of, common_of, parts_of, with_key
from kvbench.sweep.job import Work, measure
from kvbench.sweep.plan import Job, measures_of, node_of
from kvbench.texts.load import data_spec, load_text
from kvbench.texts.tokens import bos_tokens, stretches, tokenize


def run(config: DictConfig, methods: list[MethodConfig], job: Job) -> int:
    """Measure every cell that is not measured yet and write the run folder; returns 0, or 3 where a cell failed.

    Everything that can be refused is refused first, with a UserError and before anything is written. Where all cells
    are done already, no model is loaded and no folder made.
    """
    progress, measures = Progress(), measures_of(config)
    check_switches(config)
    published = published_of(config.published)
    check_writable(job.folder)
    pairs = [(method, instantiate(method)) for method in methods]
    target = target_of(config)
    check(measures, [method for _, method in pairs], target, config.kernel)
    prepared = {one.name: one.prepare(target) for one in measures}
    work = work_of(config, methods, measures, target, job)
    left = work.left()
    if not left:
        return conclude(work, None, published)
    context = load(config, pairs, target, prepared, progress)
    for line in small_prompts({one.label: one.method for one in context.methods}, measures):
        progress.say(f"warning: {line}")
    return measure_and_write(work, context, left, _label(methods), _resolved(config, methods, measures), published)


def target_of(config: DictConfig) -> Target:
    """Model and text of a config, without the weights. Raises UserError for what is missing or unsupported."""
    spec, text = model_spec(node_of(config, "model")), load_text(node_of(config, "data"))
    shape, tokenizer = describe(spec), load_tokenizer(spec)
    tokens = tokenize(text, tokenizer, shape.vocab_size)
    bos = bos_tokens(data_spec(node_of(config, "data")).bos, tokenizer)
    parts = stretches(text, tokenizer, shape.vocab_size)
    return Target(spec, shape, text, tokens, parts, tokenizer, bos, config.seed)


def check(measures: list[Measure], methods: list[Method], target: Target, kernel: str) -> None:
    """Raise UserError where measures, methods, text and model do not fit each other."""
    check_measures_fit(measures, target)
    check_methods(methods, measures, target.shape)
    if any(method.store.calibrates for method in methods) and not target.spec.random:
        check_calibration_text(measures, target)
    if target.shape.mla == "absorbed" and kernel == "triton":
        raise UserError("kernel=triton does not read absorbed latents; type kernel=reference, or model.mla=latent")


def work_of(config: DictConfig, methods: list[MethodConfig], measures: list[Measure], target: Target, job: Job) -> Work:
    """The cells of the run, with their resume keys."""
    device = pick_device(target.spec.device)
    facts = Facts(
        _weights(target.spec, target.shape),
        f"{target.text.fingerprint} bos={target.bos}",
        str(pick_dtype(target.spec.dtype, device)),
        device_name(device),
        str(config.kernel),
        torch.get_num_threads(),
    )
    common = common_of(config)
    parts = [
        (part, [with_key(cell_of(method, part, common), facts) for method in methods]) for part in parts_of(measures)
    ]
    return Work(job, parts, facts.device)


def load(
    config: DictConfig,
    pairs: list[tuple[MethodConfig, Method]],
    target: Target,
    prepared: dict[str, Any],
    progress: Progress,
) -> RunContext:
    """Load the model and calibrate what needs it. Raises UserError where a method does not fit the loaded model."""
    loaded = load_model(target.spec)
    if loaded.remark:
        progress.say(f"note: {loaded.name}: {loaded.remark}")
    for _, method in pairs:
        check_model(loaded.model, method.rule, method.store)
    passed = prove(loaded, config.kernel, config.trust, progress)
    ready = [(method_config, calibrate(method, loaded)) for method_config, method in pairs]
    runs = method_runs(ready, loaded, target.text, config, progress, target.bos)
    return RunContext(
        loaded=loaded,
        methods=[replace(one, row=passed(one.row)) for one in runs],
        tokens=target.tokens,
        stretches=target.stretches,
        progress=progress,
        kernel=config.kernel,
        save_tokens=config.save_tokens,
        save_kept=config.save_kept,
        seed=config.seed,
        spec=target.spec,
        bos=target.bos,
        prepared=prepared,
    )


def prove(loaded: LoadedModel, kernel: str, trust: bool, progress: Progress) -> Callable[[Row], Row]:
    """Run the gate and print its line; returns what it adds to every row: its difference, or the flag `untrusted`.

    Raises UserError where the full cache differs from the model's own forward, unless `trust` is False.
    """
    try:
        found = gate(loaded, kernel)
    except UserError as error:
        if trust:
            raise UserError(f"{error}; trust=false measures it and flags every row") from error
        progress.say(f"warning: {error}")
        return lambda row: with_flags(row, "untrusted")
    progress.say(found.line)
    return lambda row: replace(row, gate=found.difference)


def measure_and_write(
    work: Work, context: RunContext, left: list[Cell], label: str, resolved: dict[str, Any], published: Published | None
) -> int:
    """Make the run folder, measure, print the table; returns the exit code."""
    cells = [cell.record() | {"device": work.device} for cell in left]
    try:
        folder = RunFolder.create(work.job.folder, label, resolved, provenance.collect(work.job.command), cells=cells)
        with kvbench_attention(context.loaded.model):
            measure(work, context, folder)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        print(
            f"kvbench: {work.job.folder} is full ({error.strerror}); what was written before is complete; make room "
            "and type the same command again",
            file=sys.stderr,
        )
        return EXIT_SOME_FAILED
    return conclude(work, folder, published)


def conclude(work: Work, folder: RunFolder | None, published: Published | None = None) -> int:
    """Print the table of all cells of the job, whoever measured them, and where they are; returns the exit code."""
    records = work.records()
    results = [record for record in records if record is not None and record.status in (*DONE, "failed")]
    if rows := [row for record in results for row in record_rows(record)]:
        runs = list(dict.fromkeys(record.run for record in results))
        headlines = recorded_headlines(map(read_config, runs))
        Console().print(TerminalTable(rows, headlines, evidence_of(read_windows(runs)), origins_of(runs)))
        print_published(published, rows)
    bad = 0
    for cell, record in zip(work.cells, records, strict=True):
        status = "missing" if record is None else record.status
        if status == "ok":
            continue
        bad += 1
        note = "" if record is None else record.content.get("note") or ""
        if status in ("running", "waiting") and record is not None:
            note = f"another process measures it, in {record.run}"
        print(f"kvbench: {status}: {cell.name}{': ' if note else ''}{note}", file=sys.stderr)
    own = None if folder is None else folder.path.resolve()
    earlier = sorted({str(record.run) for record in results if record.run.resolve() != own})
    if folder is None:
        print(
            f"all {len(records)} cells were measured before; rerun=all measures them again, "
            "rerun=failed what ran out of memory"
        )
    elif earlier:
        print("some cells were measured before; rerun=all measures them again")
    for path in earlier:
        print(f"measured in: {path}")
    if folder is not None:
        print(f"run folder: {folder.path}")
    print(f"report:     python -m kvbench.report {shlex.quote(str(folder.path if folder else work.job.results))}")
    return EXIT_SOME_FAILED if bad else 0


def _weights(spec: ModelSpec, shape: ModelShape) -> str:
    """What tells these weights from others: the revision, the KV heads that they were converted to, MLA's layout."""
    layout = f" mla={shape.mla}" if shape.mla else ""
    return revision_of(spec) + (f" kv_heads={shape.kv_heads}" if shape.converted else "") + layout


def _label(methods: list[MethodConfig]) -> str:
    others = [method.label for method in methods if not method.is_baseline] or ["full"]
    return "-".join(others[:4]) + ("-and-more" if len(others) > 4 else "")


def _resolved(config: DictConfig, methods: list[MethodConfig], measures: list[Measure]) -> dict[str, Any]:
    """The run's config: its methods as they were composed, the measures' settings, and how their numbers are shown."""
    names = [measure.name for measure in measures]
    keep = ("seed", "kernel", "threads", "save_tokens", "save_kept", "model", "data", "published", *names)
    nodes = OmegaConf.to_container(config, resolve=True)
    if not isinstance(nodes, dict):
        raise TypeError("the config is no mapping")
    return {
        "measure": names,
        "methods": [method.effective for method in methods],
        **{key: nodes[key] for key in keep},
        "headlines": {one.name: [headline.record() for headline in one.headlines] for one in measures},
    }

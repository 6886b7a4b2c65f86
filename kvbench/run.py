"""One experiment: load, prefill, build caches, measure, write rows. The only place where the steps meet."""

import errno
import json
import os
import sys
from dataclasses import replace
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, OmegaConf

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, check_model, decode_kernel
from kvbench.cache.calibrate import calibrate
from kvbench.cache.rule import check_budget, is_whole
from kvbench.config import MethodConfig, chosen_measures
from kvbench.errors import EXIT_SOME_FAILED, UserError
from kvbench.kernels import KERNELS
from kvbench.measures.context import Bench, Entry
from kvbench.measures.fidelity.continuations import fidelity
from kvbench.measures.latency.decode_times import latency
from kvbench.measures.limits import check_calibration_text, check_lengths, check_methods, small_prompts
from kvbench.measures.memory.cache_bytes import memory
from kvbench.measures.needle.answers import needle
from kvbench.measures.paging.shared_prefixes import paging
from kvbench.measures.perplexity.windows import perplexity
from kvbench.measures.settings import KINDS, Needle, Tasks, read_settings
from kvbench.measures.tasks.answers import tasks
from kvbench.models.load import (
    LoadedModel,
    ModelSpec,
    describe,
    load_model,
    load_tokenizer,
    model_spec,
    pick_device,
    pick_dtype,
    revision_of,
    tokenizer_hash,
)
from kvbench.models.shape import ModelShape
from kvbench.progress import Progress
from kvbench.report.published import Published, published_of
from kvbench.results import provenance
from kvbench.results.folder import RunFolder, check_writable
from kvbench.results.row import Row
from kvbench.sweep.cells import Cell, Facts, cell_of, common_of, parts_of, with_key
from kvbench.sweep.job import Measures, Work, conclude, measure
from kvbench.sweep.plan import Job, node_of
from kvbench.texts.load import Text, bos_token, data_spec, load_text, tokenize
from kvbench.texts.prompts import check_prompts
from kvbench.texts.task_sets import check_tasks, files_fingerprint

MEASURES: Measures = {
    "perplexity": perplexity,
    "needle": needle,
    "tasks": tasks,
    "fidelity": fidelity,
    "memory": memory,
    "latency": latency,
    "paging": paging,
}


def run(config: DictConfig, methods: list[MethodConfig], job: Job) -> int:
    """Measure every cell that is not measured yet and write the run folder; returns 0, or 3 where a cell failed.

    Everything that can be refused is refused first, with a UserError and before anything is written. Where all cells
    are done already, no model is loaded and no folder made.
    """
    progress = Progress()
    measures = chosen_measures(config)
    settings = {name: read_settings(KINDS[name], name, node_of(config, name)) for name in measures}
    check_switches(config)
    published = published_of(config.published)
    check_writable(job.folder)
    entries = [(method, instantiate(method)) for method in methods]
    spec, text = model_spec(node_of(config, "model")), load_text(node_of(config, "data"))
    shape, tokenizer = describe(spec), load_tokenizer(spec)
    tokens = tokenize(text, tokenizer, shape.vocab_size)
    bos = bos_token(data_spec(node_of(config, "data")).bos, tokenizer)
    check_lengths(settings, len(tokens), text, shape, spec)
    check_methods([method for _, method in entries], settings, shape)
    if any(method.store.calibrates for _, method in entries) and not spec.random:
        check_calibration_text(settings.get("perplexity"), text, len(tokens))
    if shape.mla == "absorbed" and config.kernel == "triton":
        raise UserError("kernel=triton does not read absorbed latents; type kernel=reference, or model.mla=latent")
    prompts, samples = {}, {}
    if isinstance(asked := settings.get("needle"), Needle):
        prompts = check_prompts(tokenizer, tokens, config.seed, asked, shape.max_positions, bos)
    if isinstance(asked := settings.get("tasks"), Tasks):
        samples = check_tasks(asked, shape.max_positions, tokenizer, bos)
    device = pick_device(spec.device)
    files = f"{files_fingerprint(asked)} bos={bos}" if isinstance(asked, Tasks) else ""
    facts = Facts(
        _weights(spec, shape),
        f"{text.fingerprint} bos={bos}",
        str(pick_dtype(spec.dtype, device)),
        _device_name(device),
        str(config.kernel),
        torch.get_num_threads(),
        files,
    )
    common = common_of(config)
    work = Work(
        job,
        [(part, [with_key(cell_of(method, part, common), facts) for method in methods]) for part in parts_of(settings)],
        facts.device,
    )
    left = work.left()
    if not left:
        return conclude(work, None, published)
    loaded = load_model(spec)
    if loaded.remark:
        progress.say(f"note: {loaded.name}: {loaded.remark}")
    for _, method in entries:
        check_model(loaded.model, method.rule, method.store)
    entries = [(method_config, calibrate(method, loaded)) for method_config, method in entries]
    bench = Bench(
        loaded,
        entries_of(entries, loaded, text, config, progress, bos),
        tokens,
        progress,
        config.kernel,
        config.save_tokens,
        config.save_kept,
        config.seed,
        spec,
        bos,
        prompts,
        samples,
    )
    for line in small_prompts({entry.label: entry.method for entry in bench.entries}, settings):
        progress.say(f"warning: {line}")
    return _measure(work, bench, left, _label(methods), _resolved(config, methods), published)


def _measure(
    work: Work, bench: Bench, left: list[Cell], label: str, resolved: dict[str, Any], published: Published | None
) -> int:
    try:
        folder = RunFolder.create(
            work.job.folder,
            label,
            resolved,
            provenance.collect(work.job.command),
            cells=[cell.record() | {"device": work.device} for cell in left],
        )
        with kvbench_attention(bench.loaded.model):
            measure(work, bench, folder, MEASURES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"kvbench: {work.job.folder} is full ({error.strerror}); what was written before is whole: make room and "
            "type the same command again",
            file=sys.stderr,
        )
        return EXIT_SOME_FAILED
    return conclude(work, folder, published)


def _weights(spec: ModelSpec, shape: ModelShape) -> str:
    """What tells these weights from others: the revision, the KV heads that it was converted to, MLA's layout."""
    layout = f" mla={shape.mla}" if shape.mla else ""
    return revision_of(spec) + (f" kv_heads={shape.kv_heads}" if shape.converted else "") + layout


def instantiate(config: MethodConfig) -> Method:
    """The method of a resolved config. Raises UserError for knobs that its rule or store refuses."""
    method = Method(config.name, hydra.utils.instantiate(config.rule), hydra.utils.instantiate(config.slots))
    method.check_combination()
    return method


def entries_of(
    methods: list[tuple[MethodConfig, Method]],
    loaded: LoadedModel,
    text: Text,
    config: DictConfig,
    progress: Progress,
    bos: int | None,
) -> list[Entry]:
    base = Row(
        model=loaded.name,
        revision=loaded.revision,
        arch=loaded.arch,
        kv_heads=loaded.kv_heads,
        converted=loaded.converted,
        dataset=text.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=_device_name(loaded.device),
        threads=torch.get_num_threads(),
        seed=config.seed,
        bos="none" if bos is None else "first",
        tokenizer=tokenizer_hash(loaded.tokenizer),
    )
    labels: dict[str, int] = {}
    entries = []
    for method_config, method in methods:
        labels[method_config.label] = labels.get(method_config.label, 0) + 1
        repeat = labels[method_config.label]
        label = method_config.label if repeat == 1 else f"{method_config.label} #{repeat}"
        knobs = {key: value for key, value in method_config.columns.items() if value is not None}
        # The column is the run's seed; a method of the list may have been given one of its own.
        own_seed = {"seed": knobs["seed"]} if knobs.get("seed", config.seed) != config.seed else {}
        layout = {"mla": loaded.mla} if loaded.mla else {}
        others = _json(method_config.others | own_seed | layout)
        decode = decode_kernel(method, loaded.model, loaded.dtype, config.kernel)
        kernel = "sdpa" if method.rule.needs_ids or method.store.brings_cache else decode.name
        if reason := getattr(decode, "reason", ""):
            progress.say(f"note: {label} decodes on the {decode.name} kernel: {reason}")
        row = replace(
            base,
            method=method_config.name,
            store=method_config.store,
            kernel=kernel,
            knobs=others,
            **{key: value for key, value in knobs.items() if key != "seed"},
        )
        entries.append(Entry(method, label, row, knobs | method_config.others))
    return entries


def _json(others: dict[str, Any]) -> str | None:
    given = {key: value for key, value in others.items() if value is not None}
    return json.dumps(given, sort_keys=True) if given else None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu_name()


def check_switches(config: DictConfig) -> None:
    """Set the thread count. Raises UserError for a switch that is none, and for a budget that is none, read or not."""
    if config.budget is not None:
        check_budget(config.budget)
    if config.kernel not in KERNELS:
        raise UserError(f"kernel={config.kernel} is unknown; choose from {', '.join(KERNELS)}")
    for key in ("save_tokens", "save_kept"):
        if not isinstance(config[key], bool):
            raise UserError(f"{key}={config[key]} is not true or false")
    for key, lowest, highest in (("seed", 0, 2**32 - 1), ("threads", 1, os.cpu_count() or 1)):
        value = lowest if key == "threads" and config.threads is None else config[key]
        if not is_whole(value) or not lowest <= value <= highest:
            raise UserError(f"{key}={value} is not a whole number from {lowest} to {highest}; type {key}=1")
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _label(methods: list[MethodConfig]) -> str:
    others = [method.label for method in methods if not method.is_baseline] or ["full"]
    return "-".join(others[:4]) + ("-and-more" if len(others) > 4 else "")


def _resolved(config: DictConfig, methods: list[MethodConfig]) -> dict[str, Any]:
    """The run's config with the methods as they were composed and the settings of what was measured."""
    keep = (
        "seed",
        "kernel",
        "threads",
        "save_tokens",
        "save_kept",
        "model",
        "data",
        "published",
        *chosen_measures(config),
    )
    nodes = OmegaConf.to_container(config, resolve=True)
    assert isinstance(nodes, dict)
    return {
        "measure": chosen_measures(config),
        "methods": [method.effective for method in methods],
        **{key: nodes[key] for key in keep},
    }

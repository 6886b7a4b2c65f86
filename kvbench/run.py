"""One experiment: load, prefill, build caches, measure, write rows. The only place where the steps meet."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvbench import provenance
from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method
from kvbench.cache.rotary import rotate_back
from kvbench.cache.rule import is_whole
from kvbench.config import MethodConfig, check_measures
from kvbench.data import Text, load_text, tokenize
from kvbench.errors import UserError
from kvbench.measure.bench import Bench, Entry, Finding
from kvbench.measure.latency import latency
from kvbench.measure.memory import memory
from kvbench.measure.needle import needle
from kvbench.measure.perplexity import perplexity
from kvbench.model import LoadedModel, ModelSpec, describe, load_model, load_tokenizer, model_spec
from kvbench.progress import Progress
from kvbench.report.tables import terminal_table
from kvbench.results import Row, RunFolder, check_writable, frame_of, resume_key
from kvbench.settings import Latency, Memory, Needle, Perplexity, read_settings
from kvbench.shape import ModelShape

MEASURES: dict[str, tuple[type[Any], Callable[[Bench, Any], Iterator[Finding]]]] = {
    "perplexity": (Perplexity, perplexity),
    "needle": (Needle, needle),
    "memory": (Memory, memory),
    "latency": (Latency, latency),
}

KERNELS = ("auto", "reference", "cpu")
EXIT_SOME_FAILED = 3


def run(config: DictConfig, methods: list[MethodConfig]) -> int:
    """Measure every method and write the run folder; returns 0, or 3 where a cell failed.

    Everything that can be refused is refused first, with a UserError and before anything is written.
    """
    progress = Progress()
    settings = {name: read_settings(MEASURES[name][0], name, _node(config, name)) for name in check_measures(config.measure)}
    check_writable(config.results_dir)
    _check_switches(config)
    entries = [(method, instantiate(method)) for method in methods]
    spec, text = model_spec(_node(config, "model")), load_text(_node(config, "data"))
    shape = describe(spec)
    tokens = tokenize(text, load_tokenizer(spec), shape.vocab_size)
    check_lengths(settings, len(tokens), text, shape, spec)
    check_methods([method for _, method in entries], settings, shape)
    loaded = load_model(spec)
    for _, method in entries:
        if method.rule.sinks_in_place:
            rotate_back(loaded.model, 0)
    bench = Bench(loaded, _entries(entries, loaded, text, config), tokens, progress,
                  config.kernel, config.save_tokens, config.seed)  # fmt: skip
    folder = RunFolder.create(config.results_dir, _label(methods), _resolved(config, methods), provenance.collect(),
                              _key(config, methods, loaded, text))  # fmt: skip
    with _recording(folder), kvbench_attention(loaded.model):
        for name, setting in settings.items():
            for finding in MEASURES[name][1](bench, setting):
                _write(folder, finding)
            _write(folder, Finding([row for _, row in bench.failures if row.measure == name]))
    return _finish(folder, bench)


def instantiate(config: MethodConfig) -> Method:
    """The method of a resolved config. Raises UserError for knobs that its rule or store refuses."""
    method = Method(config.name, hydra.utils.instantiate(config.rule), hydra.utils.instantiate(config.slots))
    method.check_combination()
    return method


def check_lengths(settings: dict[str, Any], tokens: int, text: Text, shape: ModelShape, spec: ModelSpec) -> None:
    """Raise UserError for a context longer than the text or than the model's positions, or a needle without words."""
    for key, needed in _needed(settings):
        if needed > tokens:
            raise UserError(f"{key} needs {needed} tokens and data={text.name} has {tokens}; type a smaller {key}")
        if shape.max_positions is not None and needed > shape.max_positions:
            raise UserError(f"{key} needs {needed} positions and {spec.name} has {shape.max_positions}; type a smaller {key}")
    if "needle" in settings and spec.random:
        raise UserError(f"needle needs words and {spec.name} has random weights; type measure='[memory,latency]'")


def _needed(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, setting in settings.items():
        if isinstance(setting, Perplexity):
            yield "perplexity.context + perplexity.tokens", setting.longest
        elif isinstance(setting, Needle):
            yield "needle.lengths", max(setting.lengths) + 32  # question and answer come on top
        elif isinstance(setting, Memory):
            yield "memory.contexts", max(setting.contexts) + setting.tokens
        elif isinstance(setting, Latency):
            yield "latency.contexts", max(setting.contexts) + setting.steps + setting.warmup
        else:
            raise TypeError(f"{name} has no length")


def check_methods(methods: list[Method], settings: dict[str, Any], shape: ModelShape) -> None:
    """Raise UserError where a store does not fit the heads, or a budget does not fit a measured prompt."""
    prompts = {length for setting in settings.values() for length in _prompts(setting)}
    for method in methods:
        method.store.check(shape.head_dim, shape.head_dim)
        for prompt in sorted(prompts):
            method.rule.tokens(prompt)


def _prompts(setting: Any) -> list[int]:
    if isinstance(setting, Perplexity):
        return [setting.context]
    lengths: list[int] = setting.lengths if isinstance(setting, Needle) else setting.contexts
    return lengths


def _entries(
    methods: list[tuple[MethodConfig, Method]], loaded: LoadedModel, text: Text, config: DictConfig
) -> list[Entry]:
    base = Row(
        model=loaded.name, revision=loaded.revision, arch=loaded.arch, kv_heads=loaded.kv_heads, converted=False,
        dataset=text.name, dtype=str(loaded.dtype).removeprefix("torch."), device=_device_name(loaded.device),
        threads=torch.get_num_threads(), seed=config.seed,
    )  # fmt: skip
    labels: dict[str, int] = {}
    entries = []
    for method_config, method in methods:
        labels[method_config.label] = labels.get(method_config.label, 0) + 1
        repeat = labels[method_config.label]
        label = method_config.label if repeat == 1 else f"{method_config.label} #{repeat}"
        knobs = {key: value for key, value in method_config.columns.items() if value is not None}
        others = _json(method_config.others)
        row = replace(base, method=method_config.name, store=method_config.store, knobs=others,
                      **{key: value for key, value in knobs.items() if key != "seed"})  # fmt: skip
        entries.append(Entry(method, label, row, knobs | method_config.others))
    return entries


def _json(others: dict[str, Any]) -> str | None:
    return json.dumps(others, sort_keys=True) if others else None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu_name()


def _check_switches(config: DictConfig) -> None:
    """Set the thread count. Raises UserError for a switch that is none."""
    if config.kernel not in KERNELS:
        raise UserError(f"kernel={config.kernel} is unknown; choose from {', '.join(KERNELS)}")
    if not isinstance(config.save_tokens, bool):
        raise UserError(f"save_tokens={config.save_tokens} is not true or false")
    for key, lowest in (("seed", 0), ("threads", 1)):
        value = config[key] if config[key] is not None else lowest
        if not is_whole(value) or value < lowest:
            raise UserError(f"{key}={value} is not a whole number of at least {lowest}; type {key}=2, for example")
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _node(config: DictConfig, name: str) -> dict[str, Any]:
    node = OmegaConf.to_container(config[name], resolve=True)
    if not isinstance(node, dict):
        raise UserError(f"{name}={node} is not a group of settings; type {name}.KEY=VALUE")
    return {str(key): value for key, value in node.items()}


def _label(methods: list[MethodConfig]) -> str:
    others = [method.label for method in methods if not method.is_baseline] or ["full"]
    return "-".join(others[:4]) + ("-and-more" if len(others) > 4 else "")


def _resolved(config: DictConfig, methods: list[MethodConfig]) -> dict[str, Any]:
    """The run's config with the methods as they were composed and the settings of what was measured."""
    keep = ("seed", "kernel", "threads", "save_tokens", "model", "data", *check_measures(config.measure))
    nodes = OmegaConf.to_container(config, resolve=True)
    assert isinstance(nodes, dict)
    return {"measure": check_measures(config.measure), "methods": [method.effective for method in methods],
            **{key: nodes[key] for key in keep}}  # fmt: skip


def _key(config: DictConfig, methods: list[MethodConfig], loaded: LoadedModel, text: Text) -> str:
    timed = {"memory", "latency"} & set(check_measures(config.measure))
    resolved = _resolved(config, methods)
    effective = {key: value for key, value in resolved.items() if key not in ("model", "data", "threads", "kernel")}
    return resume_key(
        model_revision=loaded.revision, config=effective, data_fingerprint=text.fingerprint,
        protocol="first_light", dtype=str(loaded.dtype),
        device_name=_device_name(loaded.device) if timed else None, kernel=str(config.kernel) if timed else None,
        threads=torch.get_num_threads() if timed else None,
    )  # fmt: skip


def _write(folder: RunFolder, finding: Finding) -> None:
    if finding.rows:
        folder.add(finding.rows)
    if finding.samples:
        folder.add_samples(finding.samples)


@contextmanager
def _recording(folder: RunFolder) -> Iterator[None]:
    """Whatever ends the run, its folder says so. SIGTERM ends it like Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        folder.finish("interrupted")
        print(f"kvbench: interrupted; what was measured is in {folder.path}", file=sys.stderr)
        raise
    except Exception as error:
        folder.finish("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _finish(folder: RunFolder, bench: Bench) -> int:
    failures = [row for _, row in bench.failures]
    status = "ok" if not failures else "oom" if all(row.status == "oom" for row in failures) else "failed"
    folder.finish(status, error="\n".join(bench.tracebacks) or None)
    if folder.rows:
        Console().print(terminal_table(frame_of(folder.rows)))
    for row in failures:
        print(f"kvbench: {row.status}: {row.method} {row.measure}: {row.note}", file=sys.stderr)
    print(f"run folder: {folder.path}")
    print(f"report:     python -m kvbench.report {folder.path}")
    return EXIT_SOME_FAILED if failures else 0

"""From a run folder's settings to a loaded model, its text, and the methods as today's source composes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.checks import check_switches
from kvbench.config import KNOBS, OTHER_KNOBS, ConfigSources, MethodConfig, known_measures, method_config
from kvbench.config.error_lines import one_line
from kvbench.errors import UserError
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.measure import Measure
from kvbench.method_runs import instantiate
from kvbench.progress import Progress
from kvbench.results.provenance import source_hash
from kvbench.run import check, load, target_of
from kvbench.sweep.plan import measures_of
from kvbench.verify.recorded import Claim, Recorded


@dataclass(frozen=True)
class Rebuilt:
    """measures: with the folder's settings. context: the model, the text, and the methods of the folder. methods: for
    each form in which the folder names a method the method itself. unlike: one line for each form that config.yaml does
    not bear out."""

    measures: list[Measure]
    context: RunContext
    methods: dict[Claim, MethodRun]
    unlike: list[str]


def rebuild(recorded: Recorded, sources: ConfigSources, progress: Progress) -> Rebuilt:
    """Load what the folder's settings name. Raises UserError where the model, the text or a measure is not here."""
    config = config_of(recorded, sources)
    composed, unlike = compose_claims(recorded, sources)
    methods = {json.dumps(one.effective, sort_keys=True): one for one in composed.values()}
    ordered = sorted(methods.values(), key=lambda one: not one.is_baseline)
    if not ordered or not ordered[0].is_baseline:
        ordered.insert(0, method_config(sources.composed(["method=full", "store=dense"]), sources))
    check_switches(config)
    measures = measures_of(config)
    pairs = [(one, instantiate(one)) for one in ordered]
    target = target_of(config)
    check(measures, [method for _, method in pairs], target, config.kernel)
    prepared = {one.name: one.prepare(target) for one in measures}
    context = load(config, pairs, target, prepared, progress)
    by_effective = {
        json.dumps(one.effective, sort_keys=True): run for one, run in zip(ordered, context.methods, strict=True)
    }
    runs = {claim: by_effective[json.dumps(one.effective, sort_keys=True)] for claim, one in composed.items()}
    return Rebuilt(measures, context, runs, unlike)


def config_of(recorded: Recorded, sources: ConfigSources) -> DictConfig:
    """Today's config with the folder's settings; settings that did not exist then have their defaults."""
    config = sources.composed([])
    known = known_measures(config)
    names = recorded.config["measure"]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"the folder has measure {unknown[0]}, which is unknown here; --config-dir DIR adds measures")
    first = recorded.rows[0]
    try:
        for key in ("seed", "kernel", "save_kept"):
            if recorded.config.get(key) is not None:
                config[key] = recorded.config[key]
        config.threads = first.threads or recorded.config.get("threads")
        config.measure = list(names)
        config.model = OmegaConf.create(recorded.config["model"])
        if first.dtype:
            config.model["dtype"] = first.dtype
        for key in ("data", *names):
            config[key] = OmegaConf.merge(config[key], OmegaConf.create(recorded.config.get(key) or {}))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"config.yaml of {str(recorded.run)!r} cannot be used: {one_line(error)}") from error
    config.save_kept = config.save_tokens = False
    return config


def compose_claims(recorded: Recorded, sources: ConfigSources) -> tuple[dict[Claim, MethodConfig], list[str]]:
    """Each form in which the folder names a method, composed from its knobs; and a line for each that differs from
    config.yaml. Of another version of the source only the settings that both versions know are compared."""
    strict = recorded.provenance.get("source_hash") == source_hash()
    nodes = [node for node in recorded.config["methods"] if isinstance(node, dict)]
    found, unlike = {}, []
    for claim in recorded.claims:
        name, store, knobs = claim
        try:
            found[claim] = composed = composed_claim(name, store, json.loads(knobs), sources)
        except (UserError, HydraException, OmegaConfBaseException) as error:
            unlike.append(f"{name} {store} {knobs} cannot be composed: {one_line(error, sources)}")
            continue
        if not any(_within(node, composed.effective, strict) for node in nodes):
            unlike.append(
                f"{composed.label} {_words(json.loads(knobs))}: config.yaml lists no method with these settings"
            )
    return found, unlike


def composed_claim(name: str, store: str, knobs: Mapping[str, Any], sources: ConfigSources) -> MethodConfig:
    """The method that a name, a store and knobs stand for."""
    declared = (*KNOBS, *OTHER_KNOBS, *sources.knobs)
    words = [f"method={name}", *([f"store={store}"] if store not in ("dense", name) else [])]
    words += [f"{key}={_text(value)}" for key, value in knobs.items() if key in declared]
    config = sources.composed(words)
    for key, value in knobs.items():  # settings below the nodes, which have no knob
        for node in (config.method.get("rule"), config.store.get("slots")):
            if key not in declared and node is not None and key in node:
                node[key] = value
    return method_config(config, sources)


def _text(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("\n...\n").strip()


def _words(knobs: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in knobs.items())


def _within(old: Any, new: Any, strict: bool) -> bool:
    """Whether what `old` says stands in `new` too: settings that did not exist then may be added. strict: all of it; if
    not, settings that do not exist any more are passed over."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            _within(value, new.get(key), strict) for key, value in old.items() if strict or key in new
        )
    return bool(old == new)

"""From Hydra's config to the methods of a run: composing `compare`, reading knobs, refusing contradictions.

No torch here: a wrong name is answered before anything slow is imported.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from kvbench.composing import composed
from kvbench.errors import UserError

KNOBS = ("budget", "bits", "k_bits", "v_bits", "group", "residual", "sinks", "window", "variant", "seed")
"""Root keys that methods and stores read by interpolation; each is a column of the row."""

OTHER_KNOBS = ("decode", "pool", "inner", "k_axis", "v_axis", "rank", "energy", "protect_first", "protect_last")
"""Root keys likewise, kept in the row's `knobs`."""

PLAIN_KEYS = (*KNOBS, *OTHER_KNOBS)
"""Root keys on which no choice of a config group depends."""

GROUPS = ("method", "store", "model", "data")
"""Config groups of which a run has one choice each."""

ARCHITECTURES = {
    "mha": "model=llama2-7b (as many KV heads as query heads), or model=smollm2-135m model.kv_heads=9",
    "gqa": "model=smollm2-135m (3 KV heads for 9 query heads)",
    "mqa": "model=gemma3-270m (1 KV head)",
    "mla": "model=deepseek-v2-lite (a latent)",
}

MEASURES = {
    "perplexity": "NLL, KL and top-1 against the full cache, token by token through the compressed cache",
    "needle": "a number hidden in a long text: found or not, by length and depth",
    "tasks": "LongBench and RULER as published, scored by their own metrics",
    "fidelity": "how long free generation stays with the full cache's, and whether it gets longer",
    "memory": "bytes really held, by part, and the peaks of prefill and decode",
    "latency": "prefill, compression and decode ms a token, over contexts",
    "paging": "requests of mixed lengths in blocks of a pool, and what a shared prefix saves (store=paged)",
}

OmegaConf.register_new_resolver("default", lambda value, other: other if value is None else value, replace=True)


@dataclass(frozen=True)
class MethodConfig:
    """One method of a run, resolved: what to instantiate, and the knobs that its rows carry.

    rule, slots: nodes with a `_target_`. columns: knobs that are columns of the row. others: the remaining ones.
    """

    name: str
    store: str
    rule: dict[str, Any]
    slots: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        return self.name == "full" and self.store == "dense"

    @property
    def label(self) -> str:
        """As `compare` takes it: h2o, h2o+int4."""
        return self.name if self.store in ("dense", self.name) else f"{self.name}+{self.store}"

    @property
    def effective(self) -> dict[str, Any]:
        """What can change the method's numbers, and nothing else."""
        return {"name": self.name, "store": self.store, "rule": self.rule, "slots": self.slots}


def method_configs(config: DictConfig, overrides: list[str]) -> list[MethodConfig]:
    """The methods of a run, the full cache first.

    `overrides` are the task's own, as typed. Must be called where Hydra is initialised (its task, or a context).
    Raises UserError for contradictions; Hydra's errors for unknown names pass through.
    """
    if config.compare is None:
        found = [method_config(config)]
    else:
        found = [method_config(entry) for entry in _compose_entries(config.compare, overrides)]
    if not any(method.is_baseline for method in found):
        # What was said about another method's own settings is none of the baseline's.
        common = [override for override in _without(overrides, "compare") if _root(override) not in ("method", "store")]
        found.insert(0, method_config(composed([*common, "method=full", "store=dense"], PLAIN_KEYS)))
    found.sort(key=lambda method: not method.is_baseline)
    return list({json.dumps(method.effective, sort_keys=True): method for method in found}.values())


def _compose_entries(compare: Any, overrides: list[str]) -> Iterator[DictConfig]:
    entries = [compare] if isinstance(compare, str) else list(compare) if isinstance(compare, ListConfig) else []
    if not entries or not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise UserError(f"compare={compare} lists no methods; type compare='[full,h2o,h2o+int4]'")
    given = {_key(override) for override in overrides}
    if "store" in given:
        raise UserError("compare=... with store=... is ambiguous; write h2o+int4 in the list instead")
    if "method" in given:
        raise UserError("compare=... with method=... is ambiguous; put the method into the list")
    common = _without(overrides, "compare")
    for entry in entries:
        yield composed([*common, *entry_overrides(entry)], PLAIN_KEYS)


def entry_overrides(entry: str) -> list[str]:
    """`h2o` -> [method=h2o]; `h2o+int4` -> [method=h2o, store=int4]; `method=h2o budget=256` -> its words."""
    if "=" in entry:
        words = entry.split()
        knobs = ("method", "store", *KNOBS, *OTHER_KNOBS)
        others = [_key(word) for word in words if _root(word) not in knobs]
        if others:
            raise UserError(
                f"compare entry '{entry}' sets {others[0]}{did_you_mean(others[0], list(knobs))}; an entry "
                f"takes method, store and their knobs ({', '.join(knobs[2:])}), all else stands outside "
                "the list"
            )
        if not any(word.startswith("method=") for word in words):
            raise UserError(f"compare entry '{entry}' names no method; write 'method=h2o {entry}', for example")
        keys = [_key(word) for word in words]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise UserError(
                f"compare entry '{entry}' gives {twice[0]} twice; type an entry for each, as in "
                'compare=\'["method=h2o budget=256","method=h2o budget=512"]\''
            )
        return words
    method, _, store = entry.strip().partition("+")
    if not re.fullmatch(r"[\w.-]+", method) or (("+" in entry) and not re.fullmatch(r"[\w.-]+", store)):
        raise UserError(
            f"compare entry '{entry}' is not METHOD, METHOD+STORE or a list of overrides; "
            "type compare='[full,h2o,h2o+int4]', for example"
        )
    return [f"method={method}", *([f"store={store}"] if store else [])]


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _root(override: str) -> str:
    return _key(override).split(".", 1)[0]


def _without(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if _key(override) not in keys]


def method_config(config: DictConfig) -> MethodConfig:
    """The one method that a composed config describes. Raises UserError where its parts contradict each other."""
    name, store = config.method.name, config.store.name
    fixed_store = OmegaConf.select(config, "method.fixed.store")
    if fixed_store is not None and store != fixed_store:
        raise UserError(f"method={name} brings its own store ({fixed_store}); leave store={store} away")
    _check_fixed(config, store, config.store)
    rule, slots = config.method.rule, config.store.slots
    columns: dict[str, Any] = {}
    others: dict[str, Any] = {}
    nodes = [rule, slots]
    for node, group, part in ((rule, "method", "rule"), (slots, "store", "slots")):
        if (wrapped := node.get("inner")) is not None:
            others["inner"] = wrapped
            node.inner = _wrapped(config, group, wrapped)[part]
            nodes.append(node.inner)
    for node in nodes:
        resolved = OmegaConf.to_container(node, resolve=True)
        assert isinstance(resolved, dict)
        for key, raw in (OmegaConf.to_container(node, resolve=False) or {}).items():  # type: ignore[union-attr]
            knob = next(iter(re.findall(r"\$\{(\w+)\}", str(raw))), None)
            if key in ("_target_", "inner"):
                continue
            target, at = (columns, knob) if knob in KNOBS else (others, str(key))
            if target is columns or resolved[key] is not None:  # the row's `knobs` hold what is set
                target[str(at)] = resolved[key]
            if key in ("k_bits", "v_bits"):
                columns[str(key)] = resolved[key]
    if "k_bits" in columns:
        same = columns["k_bits"] == columns.get("v_bits")
        columns["bits"] = columns["k_bits"] if same else None
    return MethodConfig(name, store, _plain(rule), _plain(slots), columns, others)


def _wrapped(config: DictConfig, group: str, name: Any) -> DictConfig:
    """What a wrapper, config[group], goes around: the method or store of that name, which reads the run's own knobs."""
    part, kind, example = ("rule", "keep rule", "snapkv") if group == "method" else ("slots", "store", "int4")
    unknown = f"inner={name} is no {group}; type inner={example}, or another that --help lists"
    if not isinstance(name, str):
        raise UserError(unknown)
    try:
        found: DictConfig = composed([f"{group}={name}"])[group]
    except HydraException as error:
        raise UserError(unknown) from error
    if "inner" in found[part] or (group == "method" and "fixed" in found):
        raise UserError(
            f"inner={name} is no plain {kind} and cannot go into {config[group].name}; "
            f"type inner={example}, for example"
        )
    _check_fixed(config, name, found)
    return found


def _check_fixed(config: DictConfig, store: str, node: DictConfig) -> None:
    """Raise UserError where a knob contradicts what a store's name says."""
    for knob, value in node.get("fixed", {}).items():
        if knob in KNOBS and config[knob] is not None and config[knob] != value:
            family = store.rstrip("0123456789")
            raise UserError(
                f"{knob}={config[knob]} contradicts {store}, which is {value} bits; "
                f"leave {knob} away, or choose another of the {family} family"
            )


def _plain(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def check_measures(measures: Any) -> list[str]:
    """`measure` as a list of known names. Raises UserError otherwise."""
    names = list(measures or []) if isinstance(measures, list | ListConfig | None) else [measures]
    for name in names:
        if str(name) not in MEASURES:
            raise UserError(
                f"measure={name} is unknown{did_you_mean(str(name), MEASURES)}; choose from {', '.join(MEASURES)}"
            )
    if not names:
        raise UserError(f"measure=[] measures nothing; choose from {', '.join(MEASURES)}")
    return list(dict.fromkeys(names))


def did_you_mean(word: str, known: Mapping[str, Any] | list[str]) -> str:
    """` (did you mean h2o?)`, or nothing where nothing is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""

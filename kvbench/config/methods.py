"""The methods of a run from its config: each entry of `compare`, the knobs that it reads, and contradictions.

No torch here: a wrong name is answered before anything slow is imported.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from kvbench.config.knobs import KNOBS, OTHER_KNOBS, PREFILL_CHUNK, did_you_mean
from kvbench.config.sources import BUILT_IN, ConfigSources
from kvbench.errors import UserError

OmegaConf.register_new_resolver("default", lambda value, other: other if value is None else value, replace=True)


@dataclass(frozen=True)
class MethodConfig:
    """One method of a run, resolved: what to instantiate, and the knobs that its rows carry.

    rule, slots: nodes with a `_target_`. columns: knobs that are columns of the row. others: the remaining ones.
    prefill_chunk: tokens of the prompt that are read at a time; None: the prompt in one piece.
    """

    name: str
    store: str
    rule: dict[str, Any]
    slots: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    prefill_chunk: Any = None

    @property
    def is_baseline(self) -> bool:
        return self.name == "full" and self.store == "dense" and self.prefill_chunk is None

    @property
    def label(self) -> str:
        """As `compare` takes it: h2o, h2o+int4."""
        return self.name if self.store in ("dense", self.name) else f"{self.name}+{self.store}"

    @property
    def effective(self) -> dict[str, Any]:
        """What can change the method's numbers, and nothing else."""
        chunk = {} if self.prefill_chunk is None else {"prefill_chunk": self.prefill_chunk}
        return {"name": self.name, "store": self.store, "rule": self.rule, "slots": self.slots, **chunk}


def method_configs(config: DictConfig, overrides: list[str]) -> list[MethodConfig]:
    """The methods of a run, the full cache first.

    `overrides` are the job's own, as typed, with `hydra.searchpath=` among them where configs come from outside.
    Raises UserError for contradictions; Hydra's errors for unknown names pass through.
    """
    sources = ConfigSources.of(overrides)
    if config.compare is None:
        found = [method_config(config, sources)]
    else:
        entries = _compose_entries(config.compare, overrides, sources)
        found = [method_config(entry, sources) for entry in entries]
    if not any(method.is_baseline for method in found):
        # A setting below method or store belongs to the method beside the baseline, which reads prompts in one piece.
        kept = _without(overrides, "compare", PREFILL_CHUNK)
        common = [override for override in kept if _root(override) not in ("method", "store")]
        found.insert(0, method_config(sources.composed([*common, "method=full", "store=dense"]), sources))
    found.sort(key=lambda method: not method.is_baseline)
    return list({json.dumps(method.effective, sort_keys=True): method for method in found}.values())


def _compose_entries(compare: Any, overrides: list[str], sources: ConfigSources) -> Iterator[DictConfig]:
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
        yield sources.composed([*common, *entry_overrides(entry, sources.knobs)])


def entry_overrides(entry: str, declared: Iterable[str] = ()) -> list[str]:
    """`h2o` -> [method=h2o]; `h2o+int4` -> [method=h2o, store=int4]; `method=h2o budget=256` -> its words.

    declared: knobs beside those of config.yaml. Raises UserError for an entry that is none of the three forms.
    """
    if "=" in entry:
        words = entry.split()
        knobs = ("method", "store", *KNOBS, *OTHER_KNOBS, *declared)
        others = [_key(word) for word in words if _root(word) not in knobs and _key(word) != PREFILL_CHUNK]
        if others:
            raise UserError(
                f"compare entry '{entry}' sets {others[0]}{did_you_mean(others[0], list(knobs))}; an entry "
                f"takes method, store and their knobs ({', '.join((*knobs[2:], PREFILL_CHUNK))}), all else stands "
                "outside the list"
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


def method_config(config: DictConfig, sources: ConfigSources = BUILT_IN) -> MethodConfig:
    """The one method that a composed config describes.

    Raises UserError where its parts contradict each other or are no configs of a method and a store.
    """
    rule, slots = _class_node(config, "method", "rule"), _class_node(config, "store", "slots")
    name, store = config.method.name, config.store.name
    fixed_store = OmegaConf.select(config, "method.fixed.store")
    if fixed_store is not None and store != fixed_store:
        raise UserError(f"method={name} brings its own store ({fixed_store}); leave store={store} away")
    _check_fixed(config, store, config.store)
    columns: dict[str, Any] = {}
    others: dict[str, Any] = {}
    nodes = [rule, slots]
    for node, group, part in ((rule, "method", "rule"), (slots, "store", "slots")):
        if (wrapped := node.get("inner")) is not None:
            others["inner"] = wrapped
            node.inner = _wrapped(config, group, wrapped, sources)[part]
            nodes.append(node.inner)
    for node in nodes:
        _read_knobs(node, sources, columns, others)
    if "k_bits" in columns:
        same = columns["k_bits"] == columns.get("v_bits")
        columns["bits"] = columns["k_bits"] if same else None
    chunk = OmegaConf.select(config, PREFILL_CHUNK)
    if chunk is not None:
        columns["prefill_chunk"] = chunk
    return MethodConfig(name, store, _plain(rule), _plain(slots), columns, others, chunk)


def _read_knobs(node: DictConfig, sources: ConfigSources, columns: dict[str, Any], others: dict[str, Any]) -> None:
    """Add the values of a node to the knobs: a column's under its name, others under the name that is typed."""
    written = _plain(node, resolve=False)
    for key, value in _plain(node).items():
        if key in ("_target_", "inner"):
            continue
        knob = next(iter(re.findall(r"\$\{(\w+)\}", str(written[key]))), None)
        if knob in KNOBS:
            columns[knob] = value
        elif value is not None:  # the row's `knobs` hold what is set
            others[knob if knob in sources.knobs else key] = value
        if key in ("k_bits", "v_bits"):
            columns[key] = value


def _class_node(config: DictConfig, group: str, part: str) -> DictConfig:
    """config[group][part], which names the class to make. Raises UserError where another value stands there."""
    node = config[group]
    found = node.get(part) if isinstance(node, DictConfig) else None
    if not isinstance(node, DictConfig) or not isinstance(node.get("name"), str):
        raise UserError(f"{group}={node} is no config with a name; type {group}=NAME, as --help lists them")
    if not isinstance(found, DictConfig) or not isinstance(found.get("_target_"), str):
        raise UserError(
            f"{group}.{part}={found} names no class; leave {group}.{part} away, or set one of its keys "
            f"({group}.{part}.KEY=VALUE)"
        )
    return found


def _wrapped(config: DictConfig, group: str, name: Any, sources: ConfigSources) -> DictConfig:
    """What a wrapper, config[group], goes around: the method or store of that name, which reads the run's own knobs."""
    part, kind, example = ("rule", "keep rule", "snapkv") if group == "method" else ("slots", "store", "int4")
    unknown = f"inner={name} is no {group}; type inner={example}, or another that --help lists"
    if not isinstance(name, str):
        raise UserError(unknown)
    try:
        composed = sources.composed([f"{group}={name}"])
    except HydraException as error:
        raise UserError(unknown) from error
    found: DictConfig = composed[group]
    if "inner" in found[part] or (group == "method" and "fixed" in found):
        raise UserError(
            f"inner={name} is no plain {kind} and cannot go into {config[group].name}; "
            f"type inner={example}, for example"
        )
    _check_fixed(config, name, found)
    with open_dict(config):  # its own knobs, where the wrapper's file does not declare them
        for key in sources.knobs:
            if key in composed and key not in config:
                config[key] = composed[key]
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


def _plain(node: DictConfig, resolve: bool = True) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}

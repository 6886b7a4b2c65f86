"""The measures of a run: `measure=[...]`, and the root nodes that describe measures."""

from typing import Any

from omegaconf import DictConfig, ListConfig

from kvbench.config.knobs import GROUPS, did_you_mean
from kvbench.errors import UserError


def known_measures(config: DictConfig) -> list[str]:
    """The measures of a composed config: root nodes that name a class."""
    nodes = {str(key): config[key] for key in config if key not in GROUPS}
    return sorted(key for key, node in nodes.items() if isinstance(node, DictConfig) and "_target_" in node)


def chosen_measures(config: DictConfig) -> list[str]:
    """`measure` as a list of names. Raises UserError where it lists none or an unknown one."""
    known = known_measures(config)
    given: Any = config.measure
    if isinstance(given, DictConfig):
        raise UserError(f"measure={given} is not a list; type measure='[{known[0]}]', or several of {', '.join(known)}")
    choices = f"choose from {', '.join(known)}"
    names = list(given or []) if isinstance(given, ListConfig | list | None) else [given]
    for name in names:
        if str(name) not in known:
            raise UserError(
                f"measure={name} is unknown{did_you_mean(str(name), known)}; choose from {', '.join(known)}"
            )
    if not names:
        raise UserError(f"measure=[] measures nothing; {choices}")
    return list(dict.fromkeys(names))

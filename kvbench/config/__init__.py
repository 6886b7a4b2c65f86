"""The configs of kvbench: where they come from, how they are composed, and the methods and measures that they name."""

from kvbench.config.knobs import GROUPS, KNOBS, OTHER_KNOBS, did_you_mean
from kvbench.config.measures import chosen_measures, known_measures
from kvbench.config.methods import MethodConfig, entry_overrides, method_config, method_configs
from kvbench.config.sources import ConfigSources, take_sources

__all__ = [
    "GROUPS",
    "KNOBS",
    "OTHER_KNOBS",
    "ConfigSources",
    "MethodConfig",
    "chosen_measures",
    "did_you_mean",
    "entry_overrides",
    "known_measures",
    "method_config",
    "method_configs",
    "take_sources",
]

"""The names of the config as Python objects, for prompts of your own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cache.build import Method
from kvbench.config import ConfigSources, entry_overrides, method_config, take_sources
from kvbench.config.error_lines import unknown_key, user_error
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.method_runs import instantiate
from kvbench.models.load import LoadedModel, model_spec
from kvbench.models.load import load_model as load_spec


def load_method(entry: str, *, config_dir: str | Path | None = None, **knobs: Any) -> Method:
    """A method as `compare` names it: `load_method("h2o+int4", budget=256)`, `load_method("kivi", bits=2)`.

    config_dir: a folder with methods and stores of your own (`config_dir/method/mine.yaml`). knobs: those of
    config.yaml and of that folder's files. Raises UserError for unknown names and for values that are refused.
    """
    sources = _sources(config_dir)
    try:
        words = entry_overrides(entry, sources.knobs)
        words += [f"store={knobs.pop('store')}"] if knobs.get("store") is not None else []
        given = _without_none(knobs)
        config = sources.composed([*words, *(f"{key}=null" for key in given if key in sources.knobs)])
        return instantiate(method_config(_with_values(config, given, sources), sources))
    except (HydraException, OmegaConfBaseException) as error:
        raise user_error(error, sources) from error


def load_model(name: str = "smollm2-135m", *, config_dir: str | Path | None = None, **settings: Any) -> LoadedModel:
    """A model of `conf/model/` with settings of its node: `load_model("hub", id="Qwen/Qwen3-0.6B")`.

    config_dir: a folder with models of your own (`config_dir/model/mine.yaml`). Values are taken as they are, whatever
    characters they hold. Raises UserError for an unknown name, and for what is missing, damaged or unsupported.
    """
    sources = _sources(config_dir)
    try:
        node = OmegaConf.to_container(sources.composed([f"model={name}"]).model, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise user_error(error, sources) from error
    if not isinstance(node, dict):
        raise UserError(f"model={name} is no mapping of settings")
    if unknown := sorted(set(settings) - set(node)):
        raise UserError(unknown_key(f"model.{unknown[0]}", sources))
    given = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    return load_spec(model_spec({str(key): value for key, value in node.items()} | _without_none(given)))


def _sources(config_dir: str | Path | None) -> ConfigSources:
    words: Sequence[str] = [] if config_dir is None else ["--config-dir", str(config_dir)]
    return take_sources(words)[0] if words else BUILT_IN


def _with_values(config: DictConfig, values: dict[str, Any], sources: ConfigSources) -> DictConfig:
    """The config with Python values in place of its own. Raises UserError for a key that it does not have."""
    for key, value in values.items():
        if key not in config:
            raise UserError(unknown_key(key, sources))
        config[key] = value
    return config


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}

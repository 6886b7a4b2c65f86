"""The names of the config as Python objects, for prompts of your own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from kvbench.cache.build import Method
from kvbench.config import entry_overrides, method_config
from kvbench.method_runs import instantiate
from kvbench.models.load import LoadedModel, model_spec
from kvbench.models.load import load_model as load_spec


def load_method(entry: str, **knobs: Any) -> Method:
    """A method as `compare` names it: `load_method("h2o+int4", budget=256)`, `load_method("kivi", bits=2)`.

    Raises UserError for knobs that it refuses; Hydra's errors for unknown names pass through.
    """
    with _hydra():
        return instantiate(method_config(compose("config", [*entry_overrides(entry), *_overrides(knobs)])))


def load_model(name: str = "smollm2-135m", **settings: Any) -> LoadedModel:
    """A model of `conf/model/` with settings of its node: `load_model("hub", id="Qwen/Qwen3-0.6B")`.

    Raises UserError for what is missing, damaged or unsupported.
    """
    with _hydra():
        config = compose("config", [f"model={name}", *(f"model.{override}" for override in _overrides(settings))])
    node = OmegaConf.to_container(config.model, resolve=True)
    if not isinstance(node, dict):
        raise TypeError("the model node is no mapping")
    return load_spec(model_spec({str(key): value for key, value in node.items()}))


def _overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


def _hydra() -> AbstractContextManager[None]:
    """A block in which configs can be composed, within a run of Hydra or outside."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_module("kvbench.conf", version_base="1.3")

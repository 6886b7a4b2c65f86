"""The names of the config as Python objects, for prompts of your own."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cache.build import Method
from kvbench.config import entry_overrides, method_config
from kvbench.errors import UserError
from kvbench.method_runs import instantiate
from kvbench.models.load import LoadedModel, model_spec
from kvbench.models.load import load_model as load_spec


def load_method(entry: str, **knobs: Any) -> Method:
    """A method as `compare` names it: `load_method("h2o+int4", budget=256)`, `load_method("kivi", bits=2)`.

    Raises UserError for an unknown name or knob, and for values that the method refuses.
    """
    with _composing():
        groups = [f"{key}={knobs.pop(key)}" for key in ("store", "read") if isinstance(knobs.get(key), str)]
        config = compose("config", [*entry_overrides(entry), *groups])
        for key, value in knobs.items():
            if key not in config:
                raise UserError(f"load_method({entry!r}, {key}=...): there is no setting {key}")
            OmegaConf.update(config, key, value)
        return instantiate(method_config(config))


def load_model(name: str = "smollm2-135m", **settings: Any) -> LoadedModel:
    """A model of `conf/model/` with settings of its node: `load_model("hub", id="Qwen/Qwen3-0.6B")`.

    Values are taken as they are, whatever characters they hold. Raises UserError for an unknown name, and for what is
    missing, damaged or unsupported.
    """
    with _composing():
        config = compose("config", [f"model={name}"])
    node = OmegaConf.to_container(config.model, resolve=True)
    if not isinstance(node, dict):
        raise TypeError("the model node is no mapping")
    given = {key: value for key, value in settings.items() if value is not None}
    return load_spec(model_spec({str(key): value for key, value in node.items()} | given))


@contextmanager
def _composing() -> Iterator[None]:
    """A block in which configs can be composed, within a run of Hydra or outside; its errors are UserErrors."""
    inside = GlobalHydra.instance().is_initialized()
    try:
        with nullcontext() if inside else initialize_config_module("kvbench.conf", version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(" ".join(str(error).split())) from error

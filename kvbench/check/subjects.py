"""Which methods a check tries: those that the words name, and of these the ones that fit the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from kvbench.config import ConfigSources, MethodConfig, entry_overrides, method_config
from kvbench.config.error_lines import one_line
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.models.shape import mla_layout

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.check.identities import Subject
    from kvbench.models.load import LoadedModel

BUDGETS = (96, 288)
"""Budgets for methods that are given none: the first that the rule takes."""

GROUPS = (32, 16, 8)
"""Sizes of a KIVI group, of which the first that divides the head size is used."""


def entries_of(
    config: DictConfig, words: list[str], sources: ConfigSources, everything: bool = False
) -> Iterator[list[str]]:
    """The overrides of each method to check: those that the words name, else those of conf/check.yaml, or every method
    and full in every store."""
    keys = [word.split("=")[0] for word in words]
    common = [word for word in words if word.split("=")[0] not in ("compare", "method", "store")]
    if config.compare is not None:
        if "method" in keys or "store" in keys:
            raise UserError("compare=... with method= or store= is ambiguous; put both into the list, as h2o+int4")
        entries = [entry_overrides(str(entry), sources.knobs) for entry in config.compare]
    elif "method" in keys or "store" in keys:
        entries = [[word for word in words if word.split("=")[0] in ("method", "store")]]
    elif not everything:
        entries = [entry_overrides(entry) for entry in default_entries()]
    else:
        # hf_ caches come from transformers: kvbench measures them and promises nothing about them.
        methods, stores = sources.files("method"), sources.files("store")
        entries = [[f"method={name}"] for name in methods if not name.startswith("hf_")]
        entries += [["method=full", f"store={name}"] for name in stores if not name.startswith(("kivi", "hf_"))]
    for entry in entries:
        overrides = [*common, *entry]
        yield [*overrides, *(default_budget(overrides, sources) if wants_budget(overrides, sources) else [])]


def default_entries() -> list[str]:
    """The methods of conf/check.yaml, as `compare` takes them."""
    return [str(entry) for entry in yaml.safe_load(resources.files("kvbench.conf").joinpath("check.yaml").read_text())]


def default_budget(overrides: list[str], sources: ConfigSources) -> list[str]:
    """The smaller of BUDGETS that the method takes."""
    try:
        subject_of(overrides, sources).make(BUDGETS[0])
    except (UserError, HydraException):
        return [f"budget={BUDGETS[1]}"]
    return [f"budget={BUDGETS[0]}"]


def wants_budget(overrides: list[str], sources: ConfigSources) -> bool:
    """Whether the method reads a budget, and none is given."""
    config = sources.composed(overrides)
    return config.budget is None and "${budget}" in str(OmegaConf.to_container(config.method, resolve=False))


def subject_of(overrides: list[str], sources: ConfigSources = BUILT_IN) -> Subject:
    """The method of the overrides, which can be built again and again."""
    from kvbench.check.identities import Subject
    from kvbench.method_runs import instantiate

    @cache  # a config takes longer to compose than some identities to check
    def composed(budget: int | None) -> MethodConfig:
        with_budget = [*overrides, *([] if budget is None else [f"budget={budget}"])]
        return method_config(sources.composed(with_budget), sources)

    return Subject(composed(None).label, lambda budget: instantiate(composed(budget)))


def calibrated(subject: Subject, loaded: LoadedModel) -> Subject:
    """The subject with a store that is calibrated on the model."""
    from kvbench.cache.calibrate import calibrate

    return replace(subject, make=lambda budget: calibrate(subject.make(budget), loaded))


def fitting(subjects: Sequence[Subject], loaded: LoadedModel) -> tuple[list[Subject], dict[str, str]]:
    """The subjects that the model can run, and by label the reason why each other one cannot.

    Raises UserError where none is left.
    """
    fits, refused = [], {}
    for subject in subjects:
        try:
            check_fits(subject.make(None), loaded)
        except (UserError, HydraException) as error:
            refused[subject.label] = one_line(error)
        else:
            fits.append(subject)
    if not fits:
        label, reason = next(iter(refused.items()))
        raise UserError(f"{label} does not fit {loaded.name}: {reason}")
    return fits, refused


def check_fits(method: Method, loaded: LoadedModel) -> None:
    """Raise UserError where the method's rule or store cannot be used with the model."""
    from kvbench.cache.build import check_model

    method.check_combination(loaded.mla)
    method.store.check(loaded.head_dim, loaded.value_dim)
    check_model(loaded.model, method.rule, method.store)


def unquantised(loaded: LoadedModel, tokens: int) -> Method | None:
    """KIVI with a full-precision residual for all `tokens`.

    None where the model's cache has no heads, or heads that no group divides.
    """
    if mla_layout(loaded.model.config) not in (None, "expand"):
        return None
    for group in GROUPS:
        method = subject_of(["method=kivi", f"group={group}", f"residual={tokens // group * group + group}"]).make(None)
        try:
            check_fits(method, loaded)
        except UserError:
            continue
        return method
    return None

"""What `kvbench.plan` says a cache takes is what a cache takes, on every family that is measured."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.size import cache_bytes, planned_of
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.load import load_model, model_spec
from scripts.families_table import settings_of
from tests.models.test_every_family import SOME, needs_its_transformers, written

pytestmark = pytest.mark.engine

PROMPT, NEW = 48, 16
METHODS = (Method("full", Full(), DenseStore()), Method("absolute", StreamingLLM(20, variant="absolute"), DenseStore()))


def measured(kind: str) -> list[str]:
    """One line for each method whose cache is more than 1% from the plan; [] for a family without a plan."""
    loaded = load_model(model_spec({"name": kind, "random": settings_of(kind), "device": "cpu"}))
    ids = torch.randint(3, 97, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    try:
        planned = planned_of(loaded, loaded.model.config.get_text_config(), loaded.dtype)
    except UserError:
        return []  # its states have no known size, and the plan says so
    wrong = []
    for method in METHODS:
        cache = build_cache(loaded.model, method, ids, NEW)
        told, held = cache_bytes(method, planned, 2, PROMPT, NEW), held_bytes(cache.buffers()).held
        if abs(held - told) > 0.01 * told:
            wrong.append(f"{kind} {method.name}: {held:,} bytes held, {told:,} planned")
    return wrong


@pytest.mark.parametrize("kind", [*SOME, "mimo_v2_flash"])
def test_the_plan_agrees_with_the_bytes_held(kind: str) -> None:
    needs_its_transformers()
    if written()[kind][0] == "exact":
        assert measured(kind) == []


@pytest.mark.slow
def test_the_plan_agrees_on_every_family() -> None:
    needs_its_transformers()
    wrong = [line for kind, (result, _) in written().items() if result == "exact" for line in measured(kind)]
    assert wrong == []

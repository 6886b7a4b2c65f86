"""Rotary frequencies that change with the length of a text: where, and what a run is refused for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvbench.checks import check_measures_fit
from kvbench.errors import UserError
from kvbench.measures.memory import Memory
from kvbench.models.frequencies import FrequencyChange, frequency_change
from kvbench.models.load import describe, model_spec

SIXTEEN = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
} | SIXTEEN
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope", "change"),
    [(LONGROPE, FrequencyChange("longrope", 128)), (DYNAMIC, FrequencyChange("dynamic", 512)), (YARN, None)],
)
def test_where_frequencies_change(rope: dict[str, Any], change: FrequencyChange | None) -> None:
    settings = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512, "rope_parameters": rope}
    assert frequency_change(AutoConfig.for_model("llama", **settings)) == change
    assert describe(model_spec({"random": {"model_type": "llama", **settings}})).frequency_change == change


@pytest.mark.parametrize(
    ("kind", "seen", "fed", "between"),
    [
        ("longrope", 100, 28, False),
        ("longrope", 100, 29, True),
        ("longrope", 128, 1, True),
        ("longrope", 129, 900, False),
        ("dynamic", 129, 1, True),
        ("dynamic", 100, 28, False),
        ("dynamic", 0, 900, False),
    ],
)
def test_what_lies_between(kind: str, seen: int, fed: int, between: bool) -> None:
    assert FrequencyChange(kind, 128).lies_between(seen, fed) is between


def test_a_run_is_refused_before_weights_are_loaded() -> None:
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": LONGROPE,
    }
    spec = model_spec({"name": "m", "random": {"model_type": "llama", **settings}})
    target: Any = SimpleNamespace(
        spec=spec,
        shape=describe(spec),
        tokens=torch.zeros(1000),
        lengths=[1000],
        text=SimpleNamespace(name="random"),
        bos=(),
    )
    check_measures_fit([Memory(contexts=[100], tokens=28), Memory(contexts=[200], tokens=28)], target)
    with pytest.raises(UserError, match="m has longrope rotary frequencies, which change beyond 128 tokens, and 120"):
        check_measures_fit([Memory(contexts=[120], tokens=28)], target)

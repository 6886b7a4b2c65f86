"""load_method and load_model raise one kind of error, whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench import load_method, load_model
from kvbench.errors import UserError


@pytest.mark.parametrize(
    ("entry", "knobs", "says"),
    [
        ("snapkv", {"budget": 4}, "type budget="),
        ("h2o", {}, "H2O needs a budget: type budget=256"),
        ("h20", {"budget": 4}, "method=h20 is unknown (did you mean h2o?)"),
        ("h2o+int5", {"budget": 4}, "store=int5 is unknown"),
        ("h2o", {"budgt": 4}, "budgt is no setting (did you mean budget?)"),
        ("kivi4", {"bits": 8}, "bits=8 contradicts kivi4"),
        ("h2o+", {}, "is not METHOD, METHOD+STORE"),
    ],
)
def test_a_method_that_cannot_be_made_is_a_user_error(entry: str, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_method(entry, **knobs)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_store_is_a_knob_like_others() -> None:
    assert load_method("h2o", budget=8, store="int4") == load_method("h2o+int4", budget=8)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("smollm", {}, "model=smollm is unknown (did you mean smollm2-135m?)"),
        ("hub", {"pth": "x"}, "model.pth is no setting (did you mean model.path?)"),
        ("hub", {"path": "/no where/it's=here"}, "model.path=/no where/it's=here does not exist"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_user_error(name: str, settings: dict[str, Any], says: str) -> None:
    """Values from Python need no quotes of the command line."""
    with pytest.raises(UserError) as refusal:
        load_model(name, **settings)
    assert says in str(refusal.value)

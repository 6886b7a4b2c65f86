"""Ids that are no prompt of the model: refused before anything runs, in one line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.forward import check_prompt
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.methods.full import Full
from tests.shared.families import exact_llama, random_ids

pytestmark = pytest.mark.engine

FULL = Method("full", Full(), DenseStore())


@pytest.fixture
def model() -> PreTrainedModel:
    """97 tokens, with a pad token of its own."""
    model = exact_llama(4, 2)
    model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id = 3, 1, [2, 5]
    return model


def refused(model: PreTrainedModel, prompt: object) -> str:
    """The line that `prefill` and `build_cache` both refuse the prompt with."""
    lines = []
    for call in (lambda: prefill(model, prompt), lambda: build_cache(model, FULL, prompt)):  # type: ignore[arg-type]
        with pytest.raises(UserError) as error:
            call()
        lines.append(str(error.value))
    assert lines[0] == lines[1] and "\n" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    "prompt", [[[1, 2]], BatchEncoding({"input_ids": torch.ones(1, 4, dtype=torch.int64)}), "text"]
)
def test_what_is_no_tensor_is_named_with_what_to_type(model: PreTrainedModel, prompt: object) -> None:
    line = refused(model, prompt)
    assert line.startswith(f"ids is a {type(prompt).__name__};") and "input_ids" in line


@pytest.mark.parametrize(("token", "named"), [(97, "97"), (10_000, "10000"), (-1, "-1"), (-100, "-100")])
def test_tokens_outside_the_vocabulary(model: PreTrainedModel, token: int, named: str) -> None:
    ids = torch.full((2, 8), 7)
    ids[1, 4] = token
    assert f"the token {named}, and this model's tokens are 0 to 96" in refused(model, ids)


def padded() -> Tensor:
    ids = torch.full((2, 8), 7)
    ids[1, :3] = 3
    return ids


def test_rows_that_begin_with_the_pad_token(model: PreTrainedModel) -> None:
    assert refused(model, padded()).startswith("row 1 of ids begins with the pad token 3, ")


def test_a_pad_token_elsewhere_is_a_token(model: PreTrainedModel) -> None:
    check_prompt(model, padded().flip(1))
    check_prompt(model, random_ids(2, 12).clamp(min=4))


@pytest.mark.parametrize(("name", "value"), [("bos_token_id", 3), ("eos_token_id", 3), ("eos_token_id", [2, 3])])
def test_a_pad_token_that_begins_or_ends_texts_is_taken(model: PreTrainedModel, name: str, value: object) -> None:
    setattr(model.config, name, value)
    check_prompt(model, padded())


def test_a_model_without_a_pad_token(model: PreTrainedModel) -> None:
    model.config.pad_token_id = None
    check_prompt(model, padded())

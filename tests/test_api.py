"""kvbench.load_model and load_method: objects as they are, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.api import load_method, load_model
from kvbench.errors import UserError
from tests.shared.models import random_llama


@pytest.mark.parametrize("name", ["modèle ü", "a = b", "it's [1,2] {x: y}", '"quoted" \\ ${x}'])
def test_a_path_of_any_characters_loads(tmp_path: Path, smollm2_folder: Path, name: str) -> None:
    folder = tmp_path / name
    random_llama(2, 1, 16, vocab=49152, dtype=torch.float32).save_pretrained(folder)
    for file in smollm2_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_model("hub", path=str(folder), device="cpu").name == name
    assert load_model("hub", path=folder, device="cpu").source == "folder"


def test_names_and_knobs_that_cannot_be_used_are_one_line() -> None:
    for call, why in (
        (lambda: load_model("nowhere"), "nowhere"),
        (lambda: load_model("hub", pth="x"), "model.pth is no setting"),
        (lambda: load_method("h3o", budget=8), "h3o"),
        (lambda: load_method("h2o", bugdet=8), "bugdet"),
        (lambda: load_method("snapkv", budget=4), "budget=4"),
    ):
        with pytest.raises(UserError, match=why) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_knobs_reach_the_method() -> None:
    assert load_method("h2o+int4", budget=0.25).rule.budget == 0.25
    assert type(load_method("h2o", budget=8, store="int8").store).__name__ == "PerToken"

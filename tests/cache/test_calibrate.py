"""Calibration: on which tokens, kept where, and never on what is scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.cache import calibrate as calibrate_module
from kvbench.cache.build import Method
from kvbench.cache.calibrate import calibrate, calibration_ids, calibration_slice, check_calibration
from kvbench.cache.store import DenseStore
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.measures.perplexity import Perplexity
from kvbench.methods.full import Full
from kvbench.methods.lowrank import LowRank
from kvbench.models.load import LoadedModel, load_model, model_spec
from kvbench.results.loading import load
from kvbench.texts.load import load_text
from kvbench.texts.tokens import tokenize
from tests.shared.text import light

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
METHOD = Method("lowrank", Full(), LowRank())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with the real one's text in it."""
    real = calibrate_module.cache_folder()
    for name in ("essays", "smollm2-135m"):
        if (real / name).is_dir():
            (tmp_path / name).symlink_to(real / name)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    return tmp_path


def tiny(seed: int = 0) -> LoadedModel:
    return load_model(model_spec({"random": TINY | {"seed": seed}, "device": "cpu"}))


def test_what_was_found_is_kept_for_these_weights_only(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = calibrate(METHOD, tiny()).store
    assert isinstance(first, LowRank) and len(list((own_cache / "calibration").iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(calibrate_module, "bases_of", None)  # a second time nothing is computed
        again = calibrate(METHOD, tiny()).store
        with pytest.raises(TypeError):
            calibrate(METHOD, tiny(seed=1))
    assert isinstance(again, LowRank)
    for ours, theirs in zip(first.bases, again.bases, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours.keys, theirs.keys)
    calibrate(METHOD, tiny(seed=1))
    assert len(list((own_cache / "calibration").iterdir())) == 2


def test_a_damaged_file_is_made_anew(own_cache: Path) -> None:
    calibrate(METHOD, tiny())
    (file,) = (own_cache / "calibration").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    calibrate(METHOD, tiny())
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(own_cache: Path) -> None:
    own_cache.mkdir(exist_ok=True)
    (own_cache / "calibration").write_text("a file where the folder would be")
    assert calibrate(METHOD, tiny()).store.for_layer(0)


def test_other_stores_are_left_alone(own_cache: Path) -> None:
    other = Method("full", Full(), DenseStore())
    assert calibrate(other, tiny()) is other
    assert not (own_cache / "calibration").exists()


def test_random_weights_see_random_tokens_in_rows_that_fit() -> None:
    ids = calibration_ids(tiny())
    assert ids.shape == (8, 128) and ids.max() < 64
    assert torch.equal(ids, calibration_ids(tiny(seed=1)))


def test_a_model_sees_a_fixed_slice_of_the_essays(smollm2: LoadedModel) -> None:
    tokens = tokenize(load_text({"fetched": "essays"}), smollm2.tokenizer)
    ids, (first, stop) = calibration_ids(smollm2), calibration_slice(len(tokens))
    assert ids.shape == (8, 512) and stop - first == 4096 and stop < len(tokens)
    assert torch.equal(ids.flatten(), tokens[first:stop])
    for windows in (1, 2, 3, 4, 8):  # the default is 2
        settings = Perplexity(3072, 128, windows, 8)
        spans = [(o + 3072, o + 3200) for o in settings.offsets([len(tokens)])]
        check_calibration(len(tokens), spans, windows)


def test_windows_that_would_score_it_are_refused() -> None:
    first, stop = calibration_slice(100_000)
    for begin, end in ((first - 10, first + 1), (stop - 1, stop + 10), (first + 5, first + 6), (0, 100_000)):
        with pytest.raises(UserError, match="perplexity.windows=7 would score .* type another number"):
            check_calibration(100_000, [(0, 5), (begin, end)], "perplexity.windows=7")
    check_calibration(100_000, [(first - 10, first), (stop, stop + 10)], "perplexity.windows=2")


def test_the_command_line_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=random-tiny", "data=random", "measure=[memory]", "memory.contexts=[64]", "memory.tokens=2"]
    with light():
        assert (
            main(
                [
                    *words,
                    'compare=["method=full store=lowrank rank=0.25","method=h2o store=lowrank bits=4"]',
                    "budget=16",
                ]
            )
            == 0
        )
    frame = load("results")
    parts = frame[frame["metric"].str.startswith("held_bytes")]
    basis = parts[parts["metric"] == "held_bytes.basis"]
    assert sorted(basis["value"]) == [2 * 2 * 4 * 2 * 32 * rank for rank in (8, 16)]
    kept = frame[(frame["metric"] == "kept_tokens") & (frame["store"] == "lowrank")]
    assert dict(zip(kept["method"], kept["value"], strict=True)) == {"full": 66.0, "h2o": 16.0}
    assert frame[frame["store"] == "lowrank"]["knobs"].str.contains("rank").any()

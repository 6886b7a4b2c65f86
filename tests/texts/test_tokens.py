"""Several texts: where each lies among the tokens, and windows and rows of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.errors import UserError
from kvbench.measures.perplexity.windows import score_windows
from kvbench.results.row import flags_of
from kvbench.texts.load import Text, data_spec, load_text
from kvbench.texts.tokens import Stretch, spread, stretches, tokenize
from tests.shared.scoring import CONTEXT, MODEL, TEXT, TOKENS, bench, settings
from tests.shared.text import character_tokenizer, methods, rows_of, value

PARTS = (Text("a", "one two", "1"), Text("b", "three", "2"), Text("c", "four five six", "3"))


def test_texts_lie_one_behind_the_other() -> None:
    tokenizer = character_tokenizer()
    text = Text("a+b+c", "", "0", parts=PARTS)
    ids = tokenize(text, tokenizer)
    found = stretches(text, tokenizer)
    assert [(one.name, one.start, one.stop) for one in found] == [("a", 0, 7), ("b", 7, 12), ("c", 12, 25)]
    for part, one in zip(PARTS, found, strict=True):
        assert torch.equal(ids[one.start : one.stop], tokenize(part, tokenizer))


def test_every_text_has_an_equal_share_and_no_window_crosses() -> None:
    lengths, longest = [1_000, 300, 2_000], 50
    for count in range(3, 14):
        offsets = spread(lengths, count, longest)
        assert len(offsets) == count
        begins = [0, 1_000, 1_300]
        shares = []
        for begin, length in zip(begins, lengths, strict=True):
            inside = [offset for offset in offsets if begin <= offset < begin + length]
            assert all(offset + longest <= begin + length for offset in inside)
            shares.append(len(inside))
        assert max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)


def test_rows_of_one_text_are_those_of_a_run_on_it_alone() -> None:
    parts = (Stretch("a", 0, 900), Stretch("b", 900, 2_000))
    asked = settings(windows=5, batch=1)
    pooled = rows_of(score_windows(bench(methods("full", "h2o"), stretches=parts), asked))
    for part, windows in zip(parts, (3, 2), strict=True):
        alone = bench(methods("full", "h2o"))
        alone = type(alone)(alone.loaded, alone.methods, TEXT[part.start : part.stop], alone.progress)
        expected = rows_of(score_windows(alone, settings(windows=windows, batch=1)))
        for metric in ("nll", "kl", "nll_minus_full", "top1"):
            assert value(pooled, "h2o", metric, dataset=part.name) == value(expected, "h2o", metric)
    both = [value(pooled, "h2o", "nll", dataset=name) for name in ("a", "b")]
    assert value(pooled, "h2o", "nll", dataset=None) == pytest.approx((3 * both[0] + 2 * both[1]) / 5)


def test_samples_name_their_text_and_count_offsets_in_it() -> None:
    parts = (Stretch("a", 0, 900), Stretch("b", 900, 2_000))
    (finding,) = score_windows(bench(methods("full"), stretches=parts), settings(windows=4))
    longest = CONTEXT + TOKENS
    assert [(sample["text"], sample["offset"]) for sample in finding.samples] == [
        ("a", 0),
        ("a", 900 - longest),
        ("b", 0),
        ("b", 1_100 - longest),
    ]
    assert all("few_windows" in flags_of(row) for row in finding.rows)
    assert MODEL.config.vocab_size == 97


def test_a_list_of_texts_is_read_and_named(essays_folder: Path, tmp_path: Path) -> None:
    del essays_folder
    spec = data_spec({"texts": ["essays", "code"], "name": None})
    assert spec.name == "essays+code"
    file = tmp_path / "mine.txt"
    file.write_text("words of mine")
    mine = load_text({"texts": ["essays", "code"], "path": str(file), "name": None})
    assert (mine.name, mine.text, mine.parts) == ("mine.txt", "words of mine", ())


@pytest.mark.parametrize("given", [["essays"], "essays", ["essays", "essays"], []])
def test_what_is_no_list_of_texts_is_refused(given: object) -> None:
    with pytest.raises(UserError, match="must list two or more different texts"):
        data_spec({"texts": given})


def test_texts_that_are_not_here_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="type python -m kvbench.fetch essays code$"):
        load_text({"texts": ["essays", "code"]})

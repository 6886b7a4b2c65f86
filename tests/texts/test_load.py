"""kvbench.texts.load: each source gives its text, or one line that says why not."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvbench.errors import UserError
from kvbench.hub import hub_reachable
from kvbench.models.load import load_tokenizer, model_spec
from kvbench.texts.load import Text, load_text
from kvbench.texts.tokens import tokenize


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A data set folder in the hub's layout: parquet shards, and a README that names two configs."""
    folder = tmp_path / "books"
    for config, split, rows in [
        ("short", "train", ["t0"]),
        ("short", "test", ["one", "two", "three"]),
        ("long", "validation", ["x" * 50, "y" * 50]),
    ]:
        (folder / config).mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame({"title": [f"no {i}" for i in range(len(rows))], "text": rows})
        frame.to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: short\n  data_files:\n"
        "  - split: train\n    path: short/train-*\n"
        "  - split: test\n    path: short/test-*\n"
        "- config_name: long\n  data_files:\n"
        "  - split: validation\n    path: long/validation-*\n"
        "---\n# Books\n"
    )
    return folder


def test_essays_are_joined_in_sorted_order(essays_folder: Path) -> None:
    text = load_text({"fetched": "essays", "name": None})
    files = sorted(essays_folder.glob("*.txt"))
    assert text.name == "essays" and len(files) == 49
    assert text.text == "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    assert text.fingerprint == hashlib.sha256(text.text.encode()).hexdigest()
    assert text.fingerprint.startswith("1074bce916d9354f")


def test_a_text_file(tmp_path: Path) -> None:
    file = tmp_path / "my.notes.txt"
    file.write_text("naïve\ncafé", encoding="utf-8")
    node = {"fetched": "essays", "path": str(file)}
    assert load_text(node).text == "naïve\ncafé"
    assert load_text(node).name == "my.notes.txt"
    assert load_text({**node, "limit": 3}).text == "naï"


def test_a_dataset_folder(dataset: Path) -> None:
    node = {"path": str(dataset), "config": "short"}
    assert load_text(node).text == "one\n\ntwo\n\nthree"
    assert load_text({**node, "split": "train"}).text == "t0"
    assert load_text({**node, "column": "title", "joiner": ", "}).text == "no 0, no 1, no 2"
    assert load_text({**node, "limit": 5}).text == "one\n\ntwo"
    assert load_text({"path": str(dataset), "config": "long"}).text == "x" * 50 + "\n\n" + "y" * 50


def test_single_files_of_the_kinds_datasets_reads(dataset: Path, tmp_path: Path) -> None:
    assert load_text({"path": str(next(dataset.glob("short/test-*")))}).text == "one\n\ntwo\n\nthree"
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"body": "a"}\n{"body": "b"}\n')
    assert load_text({"path": str(lines), "column": "body"}).text == "a\n\nb"


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"config": "short", "column": "body"}, r"data\.column=body .* choose from title, text"),
        ({"config": "short", "split": "dev"}, r"data\.split=dev is not there .* choose from train, test"),
        ({"config": "medium"}, "medium"),
        ({}, "short.*long"),
    ],
)
def test_a_dataset_folder_asked_for_what_it_lacks(dataset: Path, node: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        load_text({"path": str(dataset), **node})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({}, "no text is named"),
        ({"path": "/nowhere/text"}, "does not exist"),
        ({"id": "a/b", "path": "c"}, "both given"),
        ({"pth": "c"}, "unknown data key pth"),
        ({"fetched": "essays", "limit": 0}, "whole number of at least 1"),
        ({"random_tokens": True}, "whole number of at least 1"),
    ],
)
def test_a_node_that_cannot_be_used(node: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        load_text(node)


def test_a_folder_of_text_files_is_read_as_they_are_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("two\n\n  lines")
    (tmp_path / "a.txt").write_text("one\n line\n")
    (tmp_path / "README.md").write_text("not read")
    assert load_text({"path": str(tmp_path)}).text == "one\n line\n\n\ntwo\n\n  lines"
    assert load_text({"path": str(tmp_path), "joiner": "|"}).text == "one\n line\n|two\n\n  lines"


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (["one", None, "three"], r"row 1 of .* \(counted from 0\): column text is empty \(null\), not text"),
        ([["a", "b"], ["c"]], "row 0 of .*: column text is a list, not text"),
        ([{"a": 1}], "row 0 of .*: column text is a dict, not text"),
        ([1, 2], "row 0 of .*: column text is a int, not text"),
    ],
)
def test_cells_that_are_no_text_are_refused_with_their_rows_number(tmp_path: Path, cells: list[Any], why: str) -> None:
    pd.DataFrame({"text": cells}).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=why):
        load_text({"path": str(tmp_path / "rows.parquet")})


def test_a_file_of_no_rows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl") as refused:
        load_text({"path": str(tmp_path / "empty.jsonl")})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("seed", ["abc", -1, 1.5, True, 2**70])
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any) -> None:
    with pytest.raises(UserError, match=r"data\.seed=.* must be a whole number of at least 0"):
        load_text({"random_tokens": 10, "seed": seed})


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused() -> None:
    class Tokenizer:
        bos_token, eos_token, chat_template = None, "2", "{{ '<user>' }}"

        def __init__(self, ids: list[int], *extra: str) -> None:
            self.ids, self.extra = ids, extra

        def __len__(self) -> int:
            return 50 + len(self.extra)

        def get_vocab(self) -> dict[str, int]:
            return {str(i): i for i in range(50)} | {token: 50 + i for i, token in enumerate(self.extra)}

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": self.ids}

        def convert_ids_to_tokens(self, number: int) -> str:
            return self.extra[number - 50]

    text = Text("essays", "words", "0")
    with pytest.raises(UserError, match=r"token '<user>' has id 50 and the model's embedding 50 rows"):
        tokenize(text, Tokenizer([1, 2], "<user>"), 50)
    with pytest.raises(UserError, match=r"token '<b>' has id 51 and the model's embedding 50 rows"):
        tokenize(text, Tokenizer([1, 51], "<a>", "<b>"), 50)
    assert tokenize(text, Tokenizer([1, 2], "<pad>"), 50).tolist() == [1, 2]


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 2\)"):
        load_text({"path": str(tmp_path / "binary")})
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(UserError, match="holds no text"):
        load_text({"path": str(tmp_path / "blank")})
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"torn\.parquet"):
        load_text({"path": str(tmp_path / "torn.parquet")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        load_text({"path": str(tmp_path / "empty")})


def test_a_fetch_not_done_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"python -m kvbench\.fetch essays$"):
        load_text({"fetched": "essays"})


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_reachable.cache_clear()
    yield
    hub_reachable.cache_clear()


def test_the_hub_out_of_reach_is_one_line_at_once(unreachable_hub: None) -> None:
    with pytest.raises(UserError, match="hub cannot be reached; use data=essays") as refused:
        load_text({"id": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"})
    assert "\n" not in str(refused.value)


def test_tokens_are_the_whole_text_without_special_tokens(
    smollm2_folder: Path, essays_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(model_spec({"fetched": "smollm2-135m"}))
    tokenizer.model_max_length = 100  # so that a warning about length would be due
    text = load_text({"path": str(essays_folder / "worked.txt")})
    with caplog.at_level(logging.WARNING):
        ids = tokenize(text, tokenizer)
    assert not caplog.records
    assert ids.dtype == torch.long and ids.ndim == 1 and len(ids) > 10_000
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text.text
    assert tokenize(text, tokenizer) is ids


def test_random_tokens_follow_the_seed() -> None:
    node = {"name": "random", "random_tokens": 1000, "seed": 3}
    text = load_text(node)
    ids = tokenize(text, None, vocab_size=50)
    assert ids.shape == (1000,) and ids.dtype == torch.long
    assert 0 <= ids.min() and ids.max() == 49
    assert torch.equal(ids, tokenize(load_text(node), None, vocab_size=50))
    other = load_text({**node, "seed": 4})
    assert other.fingerprint != text.fingerprint
    assert not torch.equal(ids, tokenize(other, None, vocab_size=50))


def test_a_real_text_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match="data=random"):
        tokenize(Text("essays", "words", "0"), None, vocab_size=50)


def test_a_path_takes_the_place_of_random_tokens(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("some words")
    text = load_text({"name": "random", "random_tokens": 100, "path": str(file)})
    assert (text.name, text.text, text.random_tokens) == ("words.txt", "some words", 0)

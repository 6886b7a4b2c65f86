"""A local checkpoint's revision changes with every file that can change a prompt, an answer or a number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbench.models import fingerprint
from kvbench.models.fingerprint import file_hash, weights_fingerprint


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files with the names of a model folder's; the weights hold three MiB."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.17.0"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return folder


def test_one_byte_in_the_middle_of_the_weights_changes_it_also_where_the_time_is_set_back(checkpoint: Path) -> None:
    weights, before = checkpoint / "model.safetensors", weights_fingerprint(checkpoint)
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(3 * 2**19)
        file.write(b"x")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_fingerprint(checkpoint) != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}!"),
        ("generation_config.json", json.dumps({"eos_token_id": [2, 3]})),
        ("tokenizer.json", "{ }"),
        ("special_tokens_map.json", "{}"),
        ("config.json", json.dumps({"model_type": "qwen3"})),
    ],
)
def test_an_edited_file_changes_it(checkpoint: Path, name: str, content: str) -> None:
    before = weights_fingerprint(checkpoint)
    (checkpoint / name).write_text(content)
    assert weights_fingerprint(checkpoint) != before


def test_the_library_that_wrote_the_config_and_files_beside_do_not(checkpoint: Path) -> None:
    before = weights_fingerprint(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"transformers_version": "5.24.0"}))
    (checkpoint / "README.md").write_text("a model")
    assert weights_fingerprint(checkpoint) == before


def test_a_large_file_is_read_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file_hash(checkpoint / "model.safetensors")

    def unread(*_: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(fingerprint.hashlib, "file_digest", unread)
    assert file_hash(checkpoint / "model.safetensors") == first


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file" / "cache"))
    assert len(weights_fingerprint(checkpoint)) == 12

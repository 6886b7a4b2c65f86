"""Complete files, walking folders, and JSON of any kind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.files import find_files, parse_json, read_json, write_atomic, writing_to


def test_find_files_goes_deep_and_enters_no_hidden_folder_and_no_link(tmp_path: Path) -> None:
    for name in ("b/x.json", "a/deep/x.json", "x.json", ".hidden/x.json", "a/.new_1/x.json", "a/y.json", "a/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert find_files(tmp_path, "x.json") == [tmp_path / name for name in ("a/deep/x.json", "b/x.json", "x.json")]
    assert find_files(tmp_path, "x.json", "y.json")[1] == tmp_path / "a" / "y.json"
    assert find_files(tmp_path / "nowhere", "x.json") == []
    assert find_files(tmp_path / ".hidden", "x.json") == [tmp_path / ".hidden" / "x.json"]  # asked for by name


def test_a_folder_that_vanishes_between_listing_and_entering_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("")
    scan = os.scandir

    def vanishing(path: str | Path) -> object:
        if Path(path).name == "a":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert find_files(tmp_path, "x.json") == [tmp_path / "b" / "x.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, number: int) -> None:
    with pytest.raises(UserError, match="report folder") as refused, writing_to(tmp_path, "report folder"):
        raise OSError(number, os.strerror(number))
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def test_other_faults_keep_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing_to(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "gone")


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_atomic(tmp_path / "file", "old")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "file", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 5000])
def test_json_that_is_no_object_is_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert read_json(tmp_path / "x.json") == {}
    with pytest.raises(ValueError):
        parse_json(content)

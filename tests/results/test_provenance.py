"""The record of code, packages and machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvbench.results import provenance


def test_source_hash_sees_methods_and_not_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, methods = tmp_path / "kvbench", tmp_path / "methods"
    for path in (package / "run.py", package / "report" / "page.py", package / "cache" / "k.cpp", methods / "h2o.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setattr(provenance, "_methods_folder", lambda: methods)
    before = provenance.source_hash()

    def changed(path: Path, text: str) -> bool:
        old = path.read_text() if path.exists() else None
        path.write_text(text)
        after = provenance.source_hash()
        path.unlink() if old is None else path.write_text(old)
        return after != before

    assert not changed(package / "report" / "page.py", "2\n")
    assert not changed(tmp_path / "README.md", "2\n")
    assert not changed(package / "run.py", "1\r\n")  # line ends of another system
    assert changed(package / "run.py", "2\n")
    assert changed(package / "cache" / "k.cpp", "2\n")
    assert changed(methods / "h2o.py", "2\n")
    assert changed(methods / "new.py", "")


def test_source_hash_is_the_same_from_an_installed_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for package, methods in (("a/kvbench", "a/methods"), ("b/kvbench", "b/kvbench/methods")):
        for path in (tmp_path / package / "run.py", tmp_path / methods / "h2o.py"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1\n")
        monkeypatch.setattr(provenance, "PACKAGE", tmp_path / package)
        monkeypatch.setattr(provenance, "_methods_folder", lambda folder=tmp_path / methods: folder)
        hashes.append(provenance.source_hash())
    assert hashes[0] == hashes[1]


def test_git_state_follows_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    source = tmp_path / "kvbench" / "run.py"
    source.parent.mkdir()
    source.write_text("1\n")
    monkeypatch.setattr(provenance, "PACKAGE", source.parent)
    assert provenance.git_state() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = provenance.git_state()
    assert clean is not None and clean["commit"] and not clean["dirty"] and clean["diff_sha256"] is None
    source.write_text("2\n")
    edited = provenance.git_state()
    source.with_name("new.py").write_text("3\n")
    added = provenance.git_state()
    assert edited is not None and added is not None and edited["dirty"] and added["dirty"]
    assert edited["diff_sha256"] != added["diff_sha256"]
    # Installed into somebody else's repository: its commit says nothing about this code.
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "venv" / "site-packages" / "kvbench")
    assert provenance.git_state() is None


def test_provenance_is_json_and_names_what_matters() -> None:
    known = provenance.collect(["python", "-m", "kvbench", "compare=[full,h2o]"])
    assert json.loads(json.dumps(known)) == known
    assert known["command"] == "python -m kvbench 'compare=[full,h2o]'"
    assert known["packages"]["torch"] and known["packages"]["transformers"]
    assert known["cpu"]["name"] and known["memory_bytes"] > 0

"""kvbench.fetch:

whole or absent, one line for every refusal. pip runs for real, on a small wheel made here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from kvbench import offline
from kvbench.cli import downloads as fetch_module
from kvbench.cli.downloads import fetch
from kvbench.cli.fetch import main
from kvbench.errors import UserError
from kvbench.models.gguf import check_gguf
from kvbench.offline import Recipe, cache_folder, fetched_path


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe `tiny` for a wheel with two texts that pip finds in a folder, and an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "kvbench_tiny_texts-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/texts/a.txt", "first\n")
        archive.writestr("tiny/texts/b.txt", "second\n")
        archive.writestr("tiny/code.py", "")
        archive.writestr(
            "kvbench_tiny_texts-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: kvbench-tiny-texts\nVersion: 1.0\n",
        )
        archive.writestr("kvbench_tiny_texts-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("kvbench_tiny_texts-1.0.dist-info/RECORD", "")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    made = Recipe("kvbench-tiny-texts", "1.0", sha, 1, "tiny/texts/", ".txt", 2)
    monkeypatch.setitem(offline.RECIPES, "tiny", made)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return made


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock") if folder.exists() else []


def test_fetch_unpacks_flat_and_second_call_needs_no_pip(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched_path("tiny") is None
    folder = fetch("tiny")
    assert folder == cache_folder() / "tiny" == fetched_path("tiny")
    assert (folder / "a.txt").read_text() == "first\n"
    assert entries(folder) == ["a.txt", "b.txt", "manifest.json"]
    assert entries(cache_folder()) == ["tiny"]
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert fetch("tiny") == folder


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "short file", "missing file", "other recipe"])
def test_a_folder_that_is_not_whole_is_fetched_again(recipe: Recipe, damage: str) -> None:
    folder = fetch("tiny")
    manifest = folder / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "short file":
        (folder / "a.txt").write_text("fir")
    elif damage == "missing file":
        (folder / "a.txt").unlink()
    else:
        content = json.loads(manifest.read_text())
        content["recipe"]["version"] = "0.9"
        manifest.write_text(json.dumps(content))
    (cache_folder() / ".tiny.partial-killed").mkdir()
    assert fetched_path("tiny") is None
    assert fetch("tiny") == folder == fetched_path("tiny")
    assert (folder / "a.txt").read_text() == "first\n"
    assert entries(cache_folder()) == ["tiny"]


def test_two_at_once_download_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []
    real = fetch_module.download

    def counted(name: str, recipe: Recipe, folder: Path) -> Path:
        downloads.append(name)
        return real(name, recipe, folder)

    monkeypatch.setattr(fetch_module, "download", counted)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(fetch, ["tiny", "tiny"]))) == 1
    assert downloads == ["tiny"]


def refusal(capsys: pytest.CaptureFixture[str], *names: str) -> str:
    """The one line on stderr of a call that must exit with 2."""
    assert main(list(names)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_unknown_name_is_told_before_anything_is_fetched(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "tiny", "smollm3")
    assert "'smollm3'" in line and "smollm2-135m" in line and "essays" in line
    assert entries(cache_folder()) == []


def test_wrong_checksum_keeps_nothing(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Recipe("kvbench-tiny-texts", "1.0", "0" * 64, 1, "tiny/texts/", ".txt", 2)
    monkeypatch.setitem(offline.RECIPES, "tiny", wrong)
    assert "checksum mismatch" in refusal(capsys, "tiny")
    assert entries(cache_folder()) == []


def test_no_network_names_the_command(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    line = refusal(capsys, "tiny")
    assert "kvbench-tiny-texts==1.0" in line and "python -m kvbench.fetch tiny" in line
    assert entries(cache_folder()) == []


def test_cache_that_cannot_be_written(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file" / "cache"))
    assert "KVBENCH_CACHE" in refusal(capsys, "tiny")


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kvbench"
    monkeypatch.setenv("KVBENCH_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"


def test_help_and_a_second_fetch_import_no_torch(smollm2_folder: Path, essays_folder: Path) -> None:
    code = (
        "import sys; from kvbench.fetch import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert main(['smollm2-135m', 'essays']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KVBENCH_CACHE" in done.stdout and str(smollm2_folder) in done.stdout


# licence terms, and a file in pieces


@pytest.fixture
def licensed(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe `bound`: its terms lie in its wheel, the two pieces of its file in two others."""
    links = tmp_path / "links"
    page = "<nav>Menu</nav><article><h1>Terms<script>x()</script></h1><p>Do no\n harm.</p></article><p>Footer</p>"
    members = {
        "kvbench-bound": {"kvbench_bound/data/TERMS.html": page, "kvbench_bound/__init__.py": ""},
        "kvbench-bound-part1": {"kvbench_bound_part1/data/f.part00": "first "},
        "kvbench-bound-part2": {"kvbench_bound_part2/data/f.part01": "second"},
    }
    sums = {}
    for package, content in members.items():
        name = package.replace("-", "_")
        with zipfile.ZipFile(links / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for member, text in content.items():
                archive.writestr(member, text)
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        sums[package] = hashlib.sha256(Path(archive.filename or "").read_bytes()).hexdigest()
    main, *pieces = sums.items()
    made = Recipe(
        main[0],
        "1.0",
        main[1],
        1,
        "kvbench_bound/data/",
        ".html",
        1,
        pieces=tuple(pieces),
        terms="TERMS.html",
        licence="the Terms of Test",
    )
    monkeypatch.setitem(offline.RECIPES, "bound", made)
    return made


def test_terms_are_shown_and_nothing_is_written_until_they_are_accepted(
    licensed: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (["bound"], ["tiny", "bound"]):
        assert main(names) == 2
        out, err = capsys.readouterr()
        assert out == "Terms\nDo no harm.\n"
        assert err.splitlines() == [
            "kvbench.fetch: bound comes under the Terms of Test, printed above: if you accept them, "
            "type python -m kvbench.fetch bound --accept-license"
        ]
        assert not cache_folder().exists()
    assert main(["bound", "--accept-license"]) == 0
    folder = fetched_path("bound")
    assert folder is not None and (folder / "bound.gguf").read_text() == "first second"
    assert (folder / "TERMS.html").is_file()
    capsys.readouterr()
    assert main(["bound"]) == 0  # accepted before
    assert capsys.readouterr().out == f"bound: {folder}\n"


def test_a_piece_that_is_not_what_was_pinned_keeps_nothing(
    licensed: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, (name, _) = licensed.pieces or ()
    wrong = dataclasses.replace(licensed, pieces=(first, (name, "0" * 64)))
    monkeypatch.setitem(offline.RECIPES, "bound", wrong)
    assert "checksum mismatch" in refusal(capsys, "bound", "--accept-license")
    assert entries(cache_folder()) == []


def test_manifests_of_before_terms_and_pieces_still_count(recipe: Recipe) -> None:
    manifest = fetch("tiny") / "manifest.json"
    content = json.loads(manifest.read_text())
    assert not {"pieces", "terms", "licence", "gguf_sha256"} & set(content["recipe"])
    content["recipe"]["gguf_sha256"] = None
    manifest.write_text(json.dumps(content))
    assert fetched_path("tiny") is not None


def test_check_gguf_accepts_a_whole_file_and_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "whole.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_string("general.name", "a name")
    writer.add_tensor("first", np.ones((8, 32), dtype=np.float32))
    writer.add_tensor("last", np.ones((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_gguf(file)
    whole = file.read_bytes()
    part = tmp_path / "part.gguf"
    for length in [0, 2, 4, 10, 30, 100, len(whole) // 2, len(whole) - 32]:
        part.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"part\.gguf is (not a|a truncated or damaged) GGUF file"):
            check_gguf(part)
    part.write_bytes(b"GGUF" + b"\xff" * 1000)
    with pytest.raises(UserError, match="damaged"):
        check_gguf(part)
    with pytest.raises(UserError, match="cannot read"):
        check_gguf(tmp_path / "absent.gguf")


@pytest.mark.slow
def test_the_real_fetch_from_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"KVBENCH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "kvbench.fetch", "smollm2-135m", "essays"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "cache") == ["essays", "smollm2-135m"]
    assert len(list((tmp_path / "cache" / "essays").glob("*.txt"))) == 49
    assert (tmp_path / "cache" / "smollm2-135m" / "model.safetensors").stat().st_size > 250e6

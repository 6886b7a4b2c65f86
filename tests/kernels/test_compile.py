"""How the CPU kernel is compiled and kept, and which kernel is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvbench.errors import UserError
from kvbench.kernels import choose, compile, compiled
from kvbench.kernels.compile import CannotCompile, loaded_openmp
from kvbench.kernels.cpu import CpuKernel

CPU = torch.device("cpu")
TINY = 'extern "C" int kvbench_answer() { return 42; }'


@pytest.fixture
def tiny_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that compiles in a moment."""
    monkeypatch.setattr(compile, "source", lambda name: TINY if name == "decode.cpp" else "")


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def test_compiles_once(tiny_source: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile.load(tmp_path).kvbench_answer() == 42
    (library,) = tmp_path.iterdir()  # and no leftovers
    monkeypatch.setattr(compile, "compile_first", lambda *_: pytest.fail("compiled again"))
    compile.load(tmp_path)
    assert list(tmp_path.iterdir()) == [library]


def test_another_source_compiler_flag_or_cpu_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, variants = compile.find_compiler(), compile.flag_variants(None)
    seen = {compile.digest(compiler, variants), compile.digest(compiler, variants[1:])}
    monkeypatch.setattr(compile, "cpu_abilities", lambda: "another")
    seen.add(compile.digest(compiler, variants))
    monkeypatch.setattr(compile, "source", lambda name: "another")
    seen.add(compile.digest(compiler, variants))
    monkeypatch.setattr(compile, "run", lambda command: "another 1.0")
    seen.add(compile.digest(compiler, variants))
    assert len(seen) == 5


def test_a_damaged_library_is_replaced(tiny_source: None, tmp_path: Path) -> None:
    compile.load(tmp_path)
    (library,) = tmp_path.iterdir()
    library.unlink()  # this process has it mapped
    library.write_bytes(b"\x7fELF, and then the disk was full")
    assert compile.load(tmp_path).kvbench_answer() == 42


def test_two_at_once_both_get_it(tiny_source: None, tmp_path: Path) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(compile.load(tmp_path).kvbench_answer())) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42, 42] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("command", ["false", "no-such-compiler"])
def test_a_broken_compiler_means_the_reference(
    command: str, monkeypatch: pytest.MonkeyPatch, fresh_choice: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", command)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    kernel = choose(CPU)
    assert kernel.name == "reference" and command in kernel.reason  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=f"kernel=cpu cannot be had: .*{command}.*; type kernel=reference"):
        choose(CPU, wanted="cpu")


def test_no_compiler_and_a_source_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "source", lambda name: "int main( {")
    with pytest.raises(CannotCompile, match=r"failed with exit code 1: .*error"):
        compile.load(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompile, match="no C\\+\\+ compiler"):
        compile.load(tmp_path)


def test_a_cache_folder_that_is_a_file(tiny_source: None, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("")
    with pytest.raises(CannotCompile, match="exists"):
        compile.load(tmp_path / "kernels")


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_KERNEL", raising=False)
    assert choose(CPU).name == choose(CPU, wanted="cpu").name == "cpu-c++"
    assert choose(CPU, wanted="reference").name == "reference"
    assert choose(CPU, torch.float64).name == choose(torch.device("meta")).name == "reference"
    for attempt in (lambda: choose(CPU, torch.float64, "cpu"), lambda: choose(CPU, wanted="fast")):
        with pytest.raises(UserError, match="kernel="):
            attempt()
    monkeypatch.setenv("KVBENCH_KERNEL", "reference")
    assert choose(CPU).name == "reference" and choose(CPU, wanted="cpu").name == "cpu-c++"
    monkeypatch.setenv("KVBENCH_KERNEL", "cpu")
    assert choose(CPU).name == "cpu-c++" and choose(CPU, torch.float64).name == "reference"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_shares_torchs_threads() -> None:
    assert isinstance(compiled(), CpuKernel)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    openmp = [file for file in files if Path(file).name.startswith(("libgomp", "libomp", "libiomp"))]
    torchs = [file for file in openmp if "/torch/" in file]
    assert loaded_openmp() in (torchs or openmp)  # other packages bring copies of their own


# damaged, incomplete and foreign libraries

LOAD = """
import sys
from pathlib import Path
from kvbench.kernels import compile

compile.source = lambda name: sys.argv[1] if name == "decode.cpp" else ""
for folder in sys.argv[2:]:
    print(compile.load(Path(folder)).kvbench_answer())
"""


def spoiled(content: bytes) -> dict[str, bytes]:
    """The library cut at several places, with a byte changed, with a byte added, and with zeros for its second half."""
    size = len(content)
    cuts = {f"cut at {at}": content[:at] for at in (0, 1, 64, size // 4, size // 2, 3 * size // 4, size - 1)}
    changed = content[: size // 2] + bytes([content[size // 2] ^ 1]) + content[size // 2 + 1 :]
    zeros = content[: size // 2] + bytes(size - size // 2)
    return cuts | {"changed": changed, "longer": content + b"\0", "zeros": zeros}


def test_a_damaged_library_is_compiled_again_before_it_is_loaded(tiny_source: None, tmp_path: Path) -> None:
    """In a process of its own: to load or call a library that was cut short can kill the process (SIGBUS)."""
    compile.load(tmp_path / "whole")
    (library,) = (tmp_path / "whole").iterdir()
    whole = library.read_bytes()
    folders = []
    for name, content in spoiled(whole).items():
        assert content != whole
        folder = tmp_path / name
        folder.mkdir()
        (folder / library.name).write_bytes(content)
        folders.append(folder)
    command = [sys.executable, "-c", LOAD, TINY, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["42"] * len(folders)
    assert done.stderr.count("compiling the CPU kernel") == len(folders)
    for folder in folders:
        (again,) = folder.iterdir()
        assert again.name == compile.library_name(again.name.split("-")[1], again.read_bytes())


def test_a_library_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, kept, done = tmp_path / "decode.so", tmp_path / "kernels", []
    library.write_bytes(b"content")
    kept.mkdir()
    monkeypatch.setattr(compile.os, "fsync", lambda descriptor: done.append([*kept.iterdir()]))
    path = compile.publish(library, kept, "key")
    assert done == [[]] and [*kept.iterdir()] == [path] and path.read_bytes() == b"content"


def test_folders_of_killed_compilations_are_removed_after_a_day(tiny_source: None, tmp_path: Path) -> None:
    hour = 3600
    for name, age in ((".compile-old", 25 * hour), (".compile-running", hour), ("other", 25 * hour)):
        (tmp_path / name / "inside").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    compile.load(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".compile-running", "other"]


@pytest.mark.parametrize("command", ["g++ '", 'g++ "-O3', "''", "g++ \\"])
def test_a_cxx_that_is_no_command(
    command: str, monkeypatch: pytest.MonkeyPatch, fresh_choice: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", command)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    with pytest.raises(UserError) as error:
        choose(CPU, wanted="cpu")
    line = str(error.value)
    assert f"CXX={command} " in line and "type export CXX=g++" in line and "\n" not in line
    assert choose(CPU).name == "reference"


def test_a_compiler_that_leaves_our_functions_out(
    monkeypatch: pytest.MonkeyPatch, fresh_choice: None, tmp_path: Path
) -> None:
    """A command that compiles something else, without an error."""
    (real,) = compile.find_compiler()
    fake = tmp_path / "fake-c++"
    fake.write_text(
        f"""#!/bin/sh
case "$*" in
  *" -c "*) for last; do :; done; echo 'int other;' | {real} -fPIC -x c++ -c - -o "$last" ;;
  *) exec {real} "$@" ;;
esac
"""
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"fake-c\+\+ made a library without kvbench_\w+, kvbench_\w+.*kernel=reference"
    ):
        choose(CPU, wanted="cpu")
    assert not list(tmp_path.glob("kernels/*"))


def test_exported_functions_are_those_that_the_kernel_calls() -> None:
    assert {"kvbench_attend", "kvbench_encode"} <= set(compile.exported_functions())

"""How the CPU kernel is compiled and kept, and which kernel is chosen."""

from __future__ import annotations

import threading
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

"""Compiles decode.cpp once, with the system's C++ compiler, into the cache folder.

The file name is a hash of all that decides what comes out: the sources, the compiler's version, the flags and what the
CPU can do, so that one home folder serves different machines. It is written under another name and renamed: two
processes that compile at once both end with a whole library.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvbench.offline import cache_folder

SOURCES = ("decode.cpp", "digits.h", "encode.h", "loops.h", "vectors.h")
COMPILERS = ("c++", "g++", "clang++")

# The two -fno flags give up floating-point exceptions and errno, nothing that a result depends on.
COMPILE = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
LINK = ("-shared",) if sys.platform == "darwin" else ("-shared", "-Wl,--no-undefined")

COMPILE_SECONDS = 300
"""Longest wait for one compilation; it takes some 10."""


class CannotCompile(Exception):
    """Why there is no compiled kernel, in one line."""


def load(folder: Path | None = None) -> ctypes.CDLL:
    """The library, compiled unless an earlier process has done it for this source, compiler and CPU.

    Args:
        folder: where libraries are kept; `kernels` in the cache folder by default.

    Raises CannotCompile.
    """
    compiler = find_compiler()
    runtime = loaded_openmp()
    variants = flag_variants(runtime)
    kept = cache_folder() / "kernels" if folder is None else folder
    path = kept / f"decode-{digest(compiler, variants)}.so"
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # damaged: compiled anew below, and replaced
    print("kvbench: compiling the CPU kernel, once for this machine (some 10 s)", file=sys.stderr, flush=True)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=kept) as work:
            fresh = compile_first(compiler, variants, Path(work))
            fresh.replace(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompile(f"{path}: {error.strerror or error}") from error


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, or the first of c++, g++ and clang++ on the path.

    Raises CannotCompile where there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise CannotCompile(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path, and CXX is not set")


def loaded_openmp() -> str | None:
    """The OpenMP library that torch runs on in this process, else any that is loaded, or None.

    Linked with the same library the kernel shares torch's threads; with another there would be two teams of them,
    each of which spins for work on the cores of the other.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    files = [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
    openmp = [f for f in files if Path(f).name.startswith(("libgomp", "libomp", "libiomp"))]
    return min(openmp, key=lambda file: "/torch/" not in file, default=None)  # other packages bring copies too


def flag_variants(openmp: str | None) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Flags to compile and to link with, best first; the first that works is used."""
    native = ("-march=native",)
    with_openmp = [(native + ("-fopenmp",), (openmp,))] if openmp is not None else []
    return [*with_openmp, (native + ("-fopenmp",), ("-fopenmp",)), (native, ()), ((), ())]


def digest(compiler: list[str], variants: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> str:
    """20 hex digits that change with anything that changes the library. Raises CannotCompile."""
    version = run([*compiler, "--version"])
    parts = [*(source(name) for name in SOURCES), *compiler, version, *COMPILE, *LINK, repr(variants), cpu_abilities()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def source(name: str) -> str:
    try:
        return Path(__file__).with_name(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CannotCompile(f"{name} is not where the package should have it: {error.strerror}") from error


def cpu_abilities() -> str:
    """What -march=native looks at: the CPU's model and instruction sets."""
    wanted = ("model name", "cpu family", "model", "stepping", "flags", "CPU part", "CPU implementer", "Features")
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = text.partition("\n\n")[0].splitlines()
    return "\n".join([platform.machine(), *(line for line in lines if line.split(":")[0].strip() in wanted)])


def compile_first(compiler: list[str], variants: list[tuple[tuple[str, ...], tuple[str, ...]]], work: Path) -> Path:
    """Compile in the folder `work` with the first variant that works. Raises CannotCompile if none does."""
    for name in SOURCES:
        (work / name).write_text(source(name), encoding="utf-8")
    reason = ""
    for compile_flags, link_flags in variants:
        object_file, library = str(work / "decode.o"), work / "decode.so"
        try:
            run([*compiler, *COMPILE, *compile_flags, "-c", str(work / SOURCES[0]), "-o", object_file])
            run([*compiler, *LINK, object_file, *link_flags, "-o", str(library)])
            ctypes.CDLL(str(library))
            return library
        except (CannotCompile, OSError) as error:
            reason = reason or str(error)  # of the variant that was wanted most
    raise CannotCompile(reason)


def run(command: list[str]) -> str:
    """What the command prints. Raises CannotCompile, with its first line of error, where it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in said if "error" in line), said[0] if said else "it said nothing")
        raise CannotCompile(f"{command[0]} failed with exit code {done.returncode}: {first}")
    return done.stdout

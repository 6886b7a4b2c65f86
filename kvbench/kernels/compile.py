"""Compiles decode.cpp once, with the system's C++ compiler, into the cache folder.

A library is called decode-KEY-CONTENT.so. KEY is a hash of all that decides the library: the sources, the compiler's
version, the flags and the CPU's instruction sets, so one home folder serves different machines. CONTENT is a hash of
the file: it is checked before the library is loaded, because a library that was cut short kills the process that calls
it (SIGBUS). The file is written under another name, flushed to disk and renamed, so two processes that compile at the
same time both end with a whole library.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvbench.offline import cache_folder

SOURCES = ("decode.cpp", "call.h", "digits.h", "encode.h", "loops.h", "unpack.h", "vectors.h", "worker.h")
COMPILERS = ("c++", "g++", "clang++")

# The two -fno flags drop floating-point exceptions and errno; no result depends on them.
COMPILE = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
LINK = ("-shared",) if sys.platform == "darwin" else ("-shared", "-Wl,--no-undefined")

COMPILE_SECONDS = 300
"""Longest wait for one compilation; it takes about 10."""

LEFTOVER_SECONDS = 24 * 3600
"""Age from which the folder of a compilation that was killed is removed."""


class CannotCompile(Exception):
    """There is no compiled kernel; the message is one line that says why."""


def load(folder: Path | None = None) -> ctypes.CDLL:
    """The library; compiled here unless an earlier process did so for this source, compiler and CPU.

    Args:
        folder: where libraries are kept; `kernels` in the cache folder by default.

    Raises CannotCompile.
    """
    compiler = find_compiler()
    variants = flag_variants(loaded_openmp())
    kept = cache_folder() / "kernels" if folder is None else folder
    key = digest(compiler, variants)
    if (cached := whole_library(kept, key)) is not None:
        with contextlib.suppress(OSError):  # a library that it links with is gone: compiled again below
            return ctypes.CDLL(str(cached))
    print("kvbench: compiling the CPU kernel, once for this machine (about 10 s)", file=sys.stderr, flush=True)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        remove_leftovers(kept)
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=kept) as work:
            path = publish(compile_first(compiler, variants, Path(work)), kept, key)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompile(f"{kept}: {error.strerror or error}") from error


def library_name(key: str, content: bytes) -> str:
    """The file name of a library with that key and content."""
    return f"decode-{key}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def whole_library(kept: Path, key: str) -> Path | None:
    """The cached library with that key whose content has the hash in its name; damaged ones are removed. None: no."""
    for path in sorted(kept.glob(f"decode-{key}-*.so")):
        with contextlib.suppress(OSError):
            if path.name == library_name(key, path.read_bytes()):
                return path
            path.unlink()
    return None


def publish(library: Path, kept: Path, key: str) -> Path:
    """Move a compiled library to its name in the folder `kept`, once all of it is on the disk. Raises OSError."""
    with open(library, "rb") as file:
        path = kept / library_name(key, file.read())
        os.fsync(file.fileno())
    library.replace(path)
    return path


def remove_leftovers(kept: Path) -> None:
    """Remove the folders of compilations that were killed a day ago or earlier."""
    for folder in kept.glob(".compile-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, or the first of c++, g++ and clang++ on the path.

    Raises CannotCompile where there is none, and where `CXX` cannot be split into words.
    """
    given = os.environ.get("CXX", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise CannotCompile(f"CXX={given} is no command ({error}); type export CXX=g++, for example") from error
    if named and not named[0]:
        raise CannotCompile(f"CXX={given} names no command; type export CXX=g++, for example")
    if named:
        return named
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise CannotCompile(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path, and CXX is not set")


def loaded_openmp() -> str | None:
    """The OpenMP library that torch uses in this process, else any that is loaded, or None.

    A kernel that is linked with the same library shares torch's threads. With another library there would be two
    groups of threads, and each would spin for work on the cores of the other.
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
    """The key of a library: 20 hex digits that change with anything that changes it. Raises CannotCompile."""
    version = run([*compiler, "--version"])
    parts = [*(source(name) for name in SOURCES), *compiler, version, *COMPILE, *LINK, repr(variants), cpu_abilities()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def source(name: str) -> str:
    try:
        return Path(__file__).with_name(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CannotCompile(f"{name} is missing from the package: {error.strerror}") from error


def exported_functions() -> list[str]:
    """Names of the functions that the sources export."""
    return re.findall(r'extern "C" \w+ (\w+)\(', "\n".join(source(name) for name in SOURCES))


def cpu_abilities() -> str:
    """The CPU's model and instruction sets, on which -march=native depends."""
    wanted = ("model name", "cpu family", "model", "stepping", "flags", "CPU part", "CPU implementer", "Features")
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = text.partition("\n\n")[0].splitlines()
    return "\n".join([platform.machine(), *(line for line in lines if line.split(":")[0].strip() in wanted)])


def compile_first(compiler: list[str], variants: list[tuple[tuple[str, ...], tuple[str, ...]]], work: Path) -> Path:
    """The library compiled in the folder `work` with the first variant of flags that works.

    Raises CannotCompile if none does.
    """
    for name in SOURCES:
        (work / name).write_text(source(name), encoding="utf-8")
    reason = ""
    for compile_flags, link_flags in variants:
        object_file, library = str(work / "decode.o"), work / "decode.so"
        try:
            run([*compiler, *COMPILE, *compile_flags, "-c", str(work / SOURCES[0]), "-o", object_file])
            run([*compiler, *LINK, object_file, *link_flags, "-o", str(library)])
            loaded = ctypes.CDLL(str(library))
            if missing := [name for name in exported_functions() if not hasattr(loaded, name)]:
                raise CannotCompile(f"{compiler[0]} made a library without {', '.join(missing)}")
            return library
        except (CannotCompile, OSError) as error:
            reason = reason or str(error)  # of the first variant, which is the best one
    raise CannotCompile(reason)


def run(command: list[str]) -> str:
    """The output of a command. Raises CannotCompile, with its first error line, where it fails."""
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
        first = next((line for line in said if "error" in line), said[0] if said else "no error message")
        raise CannotCompile(f"{command[0]} failed with exit code {done.returncode}: {first}")
    return done.stdout

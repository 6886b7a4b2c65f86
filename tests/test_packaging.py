"""The package as an editable install, as a wheel, and straight from a checkout;

the set-up scripts' refusals.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import kvbench
from tests.shared.paths import ROOT

SOURCE = ["kvbench", "methods", "conf", "pyproject.toml", "README.md", "LICENSE"]


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run outside the checkout: no PYTHONPATH unless given, no input."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=clean | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def checkout_copy(target: Path, names: list[str]) -> Path:
    target.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return target


def test_every_package_folder_is_listed() -> None:
    """setuptools finds nothing by itself here, because methods/ and conf/ lie outside kvbench/."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"kvbench.methods", "kvbench.conf"}
    for init in (ROOT / "kvbench").rglob("__init__.py"):
        found.add(".".join(init.parent.relative_to(ROOT).parts))
    assert set(settings["packages"]) == found
    without = [p for p in (ROOT / "kvbench").rglob("*.py") if not (p.parent / "__init__.py").is_file()]
    assert without == []
    assert settings["package-data"]["kvbench.conf"] == ["**/*.yaml"]


def test_the_version_is_said_once_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvbench.__version__
    assert f"\nversion: {kvbench.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("group", ["model", "data", "method", "store"])
def test_every_config_says_what_it_is(group: str) -> None:
    """`--help` prints the first comment line of each."""
    files = sorted((ROOT / "conf" / group).glob("*.yaml"))
    assert files
    for file in files:
        comments = [line for line in file.read_text().splitlines() if line.startswith("# ")]
        assert [c for c in comments if not c.startswith("# @package")], file


def test_import_costs_no_torch_and_the_public_names_resolve() -> None:
    code = (
        "import sys, kvbench\n"
        "assert not {'torch', 'transformers', 'hydra', 'pandas'} & set(sys.modules)\n"
        "from kvbench import build_cache, generate, load, load_model, prefill\n"
        "assert callable(kvbench.prefill)\n"
        "try: kvbench.prefil\n"
        "except AttributeError as error: assert 'prefil' in str(error)\n"
        "else: raise SystemExit('no AttributeError')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def stub_python(folder: Path, body: str) -> str:
    """An interpreter that can do what `body`, a shell snippet over $2 (the code after -c), allows."""
    stub = folder / "stub-python"
    stub.write_text(f"#!/bin/sh\n{body}\n")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    return str(stub)


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 1", "found none: sudo apt-get install python3 python3-venv"),
        (
            f'case "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac',
            f"sudo apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv",
        ),
    ],
)
def test_a_machine_without_python_or_venv_gets_one_line(tmp_path: Path, script: str, body: str, expected: str) -> None:
    copy = checkout_copy(tmp_path / "copy", ["scripts", "pyproject.toml"])
    done = run(["bash", f"scripts/{script}"], copy, PYTHON=stub_python(tmp_path, body))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(expected + "\n")
    assert not (copy / ".venv").exists()


@pytest.fixture
def fresh_venv(tmp_path: Path) -> Path:
    """A new venv that sees this environment's dependencies behind its own packages, but no kvbench.

    A plain path in a .pth file makes packages importable and leaves out what other .pth files add: an
    editable install stays hidden.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    site = venv / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    behind = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    python = venv / "bin" / "python"
    assert run([str(python), "-c", "import kvbench"], tmp_path).returncode != 0
    return python


def works(python: Path, folder: Path, home: Path, **environment: str) -> None:
    """`--help` names the methods, Hydra finds the configs and their classes, and kvbench comes from `home`."""
    shown = run([str(python), "-m", "kvbench", "--help"], folder, **environment)
    assert shown.returncode == 0, shown.stderr
    assert "h2o" in shown.stdout and "smollm2-135m" in shown.stdout
    code = (
        "import kvbench, kvbench.methods, kvbench.conf\n"
        "from pathlib import Path\n"
        "from hydra import compose, initialize_config_module\n"
        "from hydra.utils import get_class\n"
        "from kvbench.methods.h2o import H2O\n"
        "with initialize_config_module('kvbench.conf', version_base=None):\n"
        "    config = compose('config', ['method=h2o', 'model=random-tiny'])\n"
        "assert get_class(config.method.rule._target_) is H2O\n"
        "print(*{Path(m.__file__).parent for m in (kvbench, kvbench.methods, kvbench.conf)}, sep='\\n')"
    )
    done = run([str(python), "-c", code], folder, **environment)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(home) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_venv_and_brings_nothing_else(tmp_path: Path, fresh_venv: Path) -> None:
    copy = checkout_copy(tmp_path / "copy", SOURCE)
    pip = [str(fresh_venv), "-m", "pip", "--disable-pip-version-check"]
    built = run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), str(copy)], tmp_path)
    assert built.returncode == 0, built.stderr
    site = next((fresh_venv.parent.parent / "lib").glob("python*/site-packages"))
    before = set(os.listdir(site))
    wheel = next((tmp_path / "dist").glob("kvbench-*.whl"))
    done = run([*pip, "install", "--no-deps", "--ignore-installed", str(wheel)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(site)) - before == {"kvbench", f"kvbench-{kvbench.__version__}.dist-info"}
    for folder in ("methods", "conf"):
        kept = [p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml")]
        assert kept and all((site / "kvbench" / folder / p).is_file() for p in kept)
    works(fresh_venv, tmp_path, site / "kvbench")


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_works(tmp_path: Path, fresh_venv: Path) -> None:
    copy = checkout_copy(tmp_path / "copy", ["kvbench", "methods", "conf"])
    works(fresh_venv, copy, copy)
    works(fresh_venv, tmp_path, copy, PYTHONPATH=str(copy))

"""Provenance of a run: its code, packages, machine and command. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = (
    "kvbench",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "gguf",
    "triton",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "hydra-core",
    "omegaconf",
    "matplotlib",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "KMP_AFFINITY",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "TOKENIZERS_PARALLELISM",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "MALLOC_ARENA_MAX",
    "LD_PRELOAD",
    "KVBENCH_CACHE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_PARTITION",
    "SLURM_CPUS_PER_TASK",
    "SLURM_RESTART_COUNT",
)
"""Environment variables that can change a number, say where models are, or name the Slurm job."""
MOST_DIFF = 200_000
"""Characters of the working tree's diff that are kept."""
SOURCE_SUFFIXES = frozenset({".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})


def collect(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Code, packages, machine and command of this process, as plain JSON types.

    `command` is the argument vector to record; by default the one this process was started with.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(command),
        "git": git_state(),
        "source_hash": source_hash(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "host": platform.node(),
        "cpu": {
            "name": cpu_name(),
            "logical_cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "clock_mhz": cpu_clock_mhz(),
            "load_average": list(os.getloadavg()),
        },
        "memory_bytes": memory_bytes(),
        "gpus": gpus(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def command_line(command: Sequence[str] | None = None) -> str:
    """The command in a form that can be pasted into a shell: `python -m kvbench 'compare=[full,h2o]'`."""
    if command is None:
        # argv[0] of `python -m kvbench` is a file's path; orig_argv still knows the -m form.
        command = ["python", *sys.orig_argv[1:]]
    return shlex.join(command)


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None if it is absent. Never imports it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a number, of those that are installed."""
    versions = {name: package_version(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from, and how the files differ: a hash, the diff, untracked files.

    None when the package is not running from its own checkout: an installed copy may well lie inside somebody
    else's repository, whose commit would say nothing.
    """
    root = PACKAGE.parent
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top).strip()).resolve() != root:
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD")
    sources = ("kvbench", "methods", "conf", "pyproject.toml")
    diff = _output("git", "-C", str(root), "diff", "--binary", "HEAD", "--", *sources) or b""
    untracked = _output("git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard", "--", *sources)
    names = sorted(name for name in (untracked or b"").split(b"\0") if name)
    digest = hashlib.sha256(diff)
    for name in names:
        digest.update(name + b"\0" + _bytes_of(root / os.fsdecode(name)) + b"\0")
    dirty = bool(diff or names)
    return {
        "commit": commit.decode().strip() if commit else None,
        "dirty": dirty,
        "diff_sha256": digest.hexdigest() if dirty else None,
        "diff": diff.decode(errors="replace")[:MOST_DIFF] or None,
        "untracked": [os.fsdecode(name) for name in names],
    }


def source_hash() -> str:
    """sha256 of the source that can change a number: `kvbench/` without `report/`, and `methods/`.

    File names count relative to their package, so a checkout and a wheel of the same code agree.
    """
    digest = hashlib.sha256()
    # In a wheel methods/ and conf/ lie inside the package; conf reaches the key through the effective config.
    apart = {PACKAGE / "report", PACKAGE / "methods", PACKAGE / "conf"}
    for label, folder in (("kvbench", PACKAGE), ("methods", _methods_folder())):
        if folder is None:
            continue
        for file in sorted(folder.rglob("*")):
            if file.suffix not in SOURCE_SUFFIXES or apart.intersection(file.parents) - {folder}:
                continue
            digest.update(f"{label}/{file.relative_to(folder).as_posix()}\0".encode())
            digest.update(_bytes_of(file).replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def _methods_folder() -> Path | None:
    spec = find_spec("kvbench.methods")  # locates, does not import
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    beside = [PACKAGE / "methods", PACKAGE.parent / "methods"]
    candidates = [Path(locations[0]).resolve()] if locations else beside
    return next((folder for folder in candidates if folder.is_dir()), None)


def cpu_name() -> str:
    """Marketing name of the processor; its architecture where the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def cpu_clock_mhz() -> dict[str, float] | None:
    """Clocks of the slowest and the fastest core now, and the highest allowed; None where the system tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    if not clocks:
        return None
    highest = _bytes_of(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq")).strip()
    return {"min": min(clocks), "max": max(clocks)} | ({"limit": int(highest) / 1e3} if highest else {})


def gpus() -> list[dict[str, str]]:
    """One entry per NVIDIA GPU, as nvidia-smi prints it; [] without a GPU.

    name, uuid, driver, memory_mib; where the driver knows them also clocks in MHz, the power limit in W and the bits
    that say what throttles it at this moment.
    """
    known = _smi({"name": "name", "uuid": "uuid", "driver": "driver_version", "memory_mib": "memory.total"})
    # Separate queries: a driver that does not know one name answers nothing of the query.
    for more in (
        {
            "clock_sm_mhz": "clocks.sm",
            "clock_sm_max_mhz": "clocks.max.sm",
            "clock_memory_mhz": "clocks.mem",
            "power_limit_w": "power.limit",
        },
        {"throttle_reasons": "clocks_throttle_reasons.active"},
    ):
        found = _smi(more) if known else []
        known = [gpu | of_gpu for gpu, of_gpu in zip(known, found, strict=True)] if len(found) == len(known) else known
    return known


def _smi(fields: dict[str, str]) -> list[dict[str, str]]:
    """The answer of nvidia-smi to a query of `fields`, one entry a GPU; [] where it fails."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits")
    lines = [[cell.strip() for cell in line.split(",")] for line in (text or b"").decode(errors="replace").splitlines()]
    return [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]


def memory_bytes() -> int | None:
    """Physical memory of the machine in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _usable_cores() -> int | None:
    # A container or a Slurm job often owns fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _output(*command: str) -> bytes | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""

"""The resume key: a hash of everything that can change a number. Two cells with one key are measured once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvbench.files import plain
from kvbench.results import provenance


def resume_key(
    *,
    model_revision: str,
    config: Mapping[str, Any],
    data_fingerprint: str,
    protocol: str,
    dtype: str,
    device_name: str | None = None,
    kernel: str | None = None,
    threads: int | None = None,
) -> str:
    """sha256, 64 hex digits, of everything that can change the number of a cell.

    `config` is the effective configuration (unused knobs dropped). `device_name`, `kernel` and `threads` belong to
    latency and memory cells; leave them None for quality. The versions of torch and transformers and the hash of the
    source come from the installation.
    """
    parts = {
        "model_revision": model_revision,
        "config": plain(config),
        "data": data_fingerprint,
        "protocol": protocol,
        "dtype": dtype,
        "torch": provenance.package_version("torch"),
        "transformers": provenance.package_version("transformers"),
        "source": provenance.source_hash(),
        "device": device_name,
        "kernel": kernel,
        "threads": threads,
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()

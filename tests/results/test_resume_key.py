"""The resume key knows everything that can change a number."""

from __future__ import annotations

import re

import pytest

from kvbench.results import provenance
from kvbench.results.resume_key import resume_key


def key(**changes: object) -> str:
    parts: dict[str, object] = {
        "model_revision": "abc",
        "config": {"method": "h2o", "budget": 256},
        "data_fingerprint": "f",
        "protocol": "prefill_decode",
        "dtype": "float32",
    }
    return resume_key(**(parts | changes))  # type: ignore[arg-type]


def test_resume_key_knows_what_can_change_the_number() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"model_revision": "abd"},
        {"config": {"method": "h2o", "budget": 257}},
        {"data_fingerprint": "g"},
        {"protocol": "stream"},
        {"dtype": "bfloat16"},
        {"device_name": "H200"},
        {"kernel": "triton"},
        {"threads": 4},
    ]
    assert len({key(**change) for change in changes}) == len(changes)
    assert key(config={"budget": 256, "method": "h2o"}) == key()
    assert re.fullmatch(r"[0-9a-f]{64}", key())


def test_resume_key_follows_versions_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "package_version", lambda name: "9.9")
        assert key() != before
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "source_hash", lambda: "other")
        assert key() != before
    assert key() == before

"""Every causal family of transformers is exact or refused before anything is measured, as docs/families.md says."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from kvbench.gate import LIMITS, MOST_ROUNDING
from scripts.families_table import TABLE, Outcome, kinds, outcome

pytestmark = pytest.mark.engine

SOME = (
    "afmoe",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "diffllama",
    "doge",
    "dory",
    "gpt_oss",
    "hunyuan_v1_dense",
    "jetmoe",
    "lfm2",
    "llama",
    "llama4_text",
    "minimax",
    "phimoe",
    "qwen3_next",
)
"""Families that the fast tests build: one of each kind of mask, cache and refusal."""

AMPLIFY_ROUNDING = ("hrm_text",)
"""Families whose own forwards of a text and of its beginning differ by 1e-4: another processor, another difference."""


def written() -> dict[str, tuple[str, str]]:
    """Result and detail of each family in the table."""
    rows = re.findall(r"^\| `(.+?)` \| (\w+) \| (.+) \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return {kind: (result, detail) for kind, result, detail in rows}


def without_numbers(detail: str) -> str:
    """The refusal without the differences that it names: they are rounding, and may vary."""
    return re.sub(r"\de[+-]\d\d", "N", detail)


def check(found: Outcome) -> None:
    """What the table says of the family: the same refusal, or exact; the difference is rounding and may vary."""
    result, detail = written()[found.kind]
    assert found.result == result, found
    if result == "refused":
        assert without_numbers(found.detail) == without_numbers(detail)
    else:
        assert result == "exact"
        assert float(found.detail) <= (MOST_ROUNDING if found.kind in AMPLIFY_ROUNDING else LIMITS[torch.float32])


def needs_its_transformers() -> None:
    """The table is of one version of transformers: others have other families."""
    if f"transformers {transformers.__version__} " not in TABLE.read_text(encoding="utf-8"):
        pytest.skip("the table was written with another version of transformers")


def test_the_table_lists_every_family_and_each_is_exact_or_refused() -> None:
    needs_its_transformers()
    table = written()
    assert sorted(table) == kinds()
    assert {result for result, _ in table.values()} == {"exact", "refused"}


@pytest.mark.parametrize("kind", SOME)
def test_a_family_is_what_the_table_says(kind: str) -> None:
    needs_its_transformers()
    check(outcome(kind))


@pytest.mark.slow
def test_all_families_are_what_the_table_says() -> None:
    needs_its_transformers()
    for kind in kinds():
        check(outcome(kind))

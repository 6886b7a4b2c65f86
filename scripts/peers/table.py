"""The table of the comparison with kvpress: table.py FOLDER PAGE

FOLDER holds what both sides wrote; PAGE is the Markdown file to write. The table is printed as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pairs import Pair, chosen

Arrays = Mapping[str, np.ndarray]

HEAD = """# Beside kvpress

The same weights, the same tokens and the same budget in kvbench {kvbench} and kvpress {kvpress} (transformers
{transformers}, torch {torch}): {model} in float32, {windows} windows of {context:,} tokens of `{text}`, {budget} tokens
kept per KV head, then {tokens} tokens fed one by one. The prompt is compressed once and decode appends on both sides.

- **kept sets equal**: layers, KV heads and windows whose kept tokens are the same, of all.
- **overlap**: kept tokens that both keep, as a share of those that kvpress keeps.
- **NLL**: mean negative log-likelihood of the fed tokens, nats.
- **on kvpress's set**: kvbench's engine with exactly the tokens that kvpress keeps.
- **difference**: largest difference of the two columns before it over windows: equal sets must give the same number.

Written by `bash scripts/peers/run.sh`.

| method | kept sets equal | overlap | NLL kvbench | NLL kvpress | on kvpress's set | difference |
|---|---|---|---|---|---|---|
"""


def line(name: str, ours: Arrays, peers: Arrays, check: Arrays) -> str:
    """One line of the table."""
    mine, theirs = ours[f"kept {name}"], peers[f"kept {name}"]
    equal = (mine == theirs).all(-1)
    overlap = (mine & theirs).sum() / theirs.sum()
    nll = [float(found[f"nll {name}"].mean()) for found in (ours, peers, check)]
    apart = np.abs(check[f"nll {name}"].mean(-1) - peers[f"nll {name}"].mean(-1)).max()
    numbers = [
        f"{equal.sum():,} of {equal.size:,}",
        f"{overlap:.2%}",
        *(f"{value:.4f}" for value in nll),
        f"{apart:.0e}",
    ]
    return f"| {name} | " + " | ".join(numbers) + " |"


def differences(pairs: list[Pair]) -> str:
    """What differs by definition, method by method."""
    lines = [f"- {pair.name}: {pair.differs}." for pair in pairs if pair.differs]
    same = ", ".join(pair.name for pair in pairs if not pair.differs)
    return "\n".join([f"Nothing differs by definition for {same}. What differs for the others:", "", *lines])


def page(settings: dict[str, Any], ours: Arrays, peers: Arrays, check: Arrays) -> str:
    """The whole page. settings: of the run, with the versions of both sides."""
    pairs = chosen(settings["methods"])
    lines = [line(name, ours, peers, check) for name in ("full", *(pair.name for pair in pairs))]
    return HEAD.format(**settings) + "\n".join(lines) + f"\n\n{differences(pairs)}\n"


def main(folder: Path, target: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text()) | json.loads((folder / "versions.json").read_text())
    text = page(settings, *(np.load(folder / f"{name}.npz") for name in ("kvbench", "kvpress", "check")))
    target.write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

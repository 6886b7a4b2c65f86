"""The banner of a report: what the evidence is, and where it is too little or mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.methods import Group
from kvbench.report.compare.names import heads_text, name_list, short_model
from kvbench.report.compare.texts import texts_of
from kvbench.report.compare.verdicts import WEIGHTS_WORDS
from kvbench.report.compare.window_verdicts import WindowEvidence
from kvbench.results.paired import FEWEST_UNITS
from kvbench.results.row import Row

HASH = 10
"""Characters of a source hash that are shown."""
MIXED = {
    "source": ("source versions of kvbench", "the code"),
    "machine": ("machines", "the machine"),
    "day": ("days", "the day"),
}
"""What may differ between the runs behind one table: in the plural, and as the cause of a difference."""


@dataclass(frozen=True)
class Banner:
    """facts: name and text. warnings: one sentence each."""

    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]


def banner(
    rows: Sequence[Row], groups: Sequence[Group], evidence: WindowEvidence, provenance: Mapping[str, Mapping[str, Any]]
) -> Banner:
    """provenance: of each run, by the name that its rows carry."""
    facts = [
        ("Model", _models(rows)),
        ("Numbers", _dtypes(groups)),
        ("Windows", _windows(groups, evidence)),
        ("Texts", name_list(_texts(rows)) or "none scored"),
        ("Machine", name_list(_values(provenance, machine_of)) or "not recorded"),
        ("Sources", name_list(_values(provenance, source_of)) or "not recorded"),
        ("Measured", name_list(_values(provenance, day_of)) or "not recorded"),
    ]
    return Banner([(name, text) for name, text in facts if text], [*_few(evidence), *mixed(rows, provenance)])


def mixed(rows: Iterable[Row], provenance: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each kind of thing that differs between the runs behind one table."""
    runs: dict[str, set[str]] = {}
    for row in rows:
        if row.measure is not None and row.run is not None:
            runs.setdefault(row.measure, set()).add(row.run)
    found = []
    for name, read in (("source", source_of), ("machine", machine_of), ("day", day_of)):
        values = {
            measure: _values({run: provenance[run] for run in sorted(own) if run in provenance}, read)
            for measure, own in runs.items()
        }
        several = {measure: own for measure, own in values.items() if len(own) > 1}
        if several:
            plural, cause = MIXED[name]
            everything = sorted({value for own in several.values() for value in own})
            found.append(
                f"Rows of {len(everything)} {plural} ({name_list(everything)}) stand in one table "
                f"({', '.join(several)}): a difference there may come from {cause}."
            )
    return found


def source_of(known: Mapping[str, Any]) -> str | None:
    return str(known["source_hash"])[:HASH] if known.get("source_hash") else None


def machine_of(known: Mapping[str, Any]) -> str | None:
    cpu = known.get("cpu") or {}
    parts = [str(gpu.get("name")) for gpu in known.get("gpus") or [] if isinstance(gpu, Mapping)]
    parts += [f"{cpu['name']}, {cpu.get('usable_cores', '?')} cores"] if cpu.get("name") else []
    return " and ".join(dict.fromkeys(parts)) or None


def day_of(known: Mapping[str, Any]) -> str | None:
    return str(known["time_utc"])[:10] if known.get("time_utc") else None


def _values(provenance: Mapping[str, Mapping[str, Any]], read: Any) -> list[str]:
    return list(dict.fromkeys(value for known in provenance.values() if (value := read(known)) is not None))


def _models(rows: Iterable[Row]) -> str:
    known = dict.fromkeys((row.model, row.kv_heads, row.weights or "trained") for row in rows if row.model)
    among = [model for model, _, _ in known]
    return name_list(
        [f"{short_model(model, among)} ({heads_text(heads)}, {WEIGHTS_WORDS[words]})" for model, heads, words in known]
    )


def _dtypes(groups: Sequence[Group]) -> str:
    known = list(dict.fromkeys(str(group.row.dtype) for group in groups if group.row.dtype))
    held = "; rules that keep tokens in float32 would hold half as much in bfloat16" if "float32" in known else ""
    return f"{', '.join(known)}{held}"


def _windows(groups: Sequence[Group], evidence: WindowEvidence) -> str:
    counts = sorted({len(method.differences) for method in evidence.windows.values()})
    contexts = sorted({group.contexts["perplexity"] for group in groups if "perplexity" in group.contexts})
    if not counts:
        return "no window in samples.jsonl"
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    after = f", scored after {name_list([f'{context:,}' for context in contexts])} tokens" if contexts else ""
    return f"{number} a method{after}"


def _texts(rows: Iterable[Row]) -> list[str]:
    scored = [row for row in rows if row.measure == "perplexity" and is_baseline(row)]
    return list(dict.fromkeys(text for row in scored for text in texts_of(row.dataset)))


def _few(evidence: WindowEvidence) -> list[str]:
    """Where methods have fewer windows than a verdict needs: how many, and how many are likely to be needed."""
    pooled = [evidence.verdicts[key] for key in evidence.windows]
    few = [one for one in pooled if one.n < FEWEST_UNITS]
    if not few:
        return []
    fewest, most = min(one.n for one in few), max(one.n for one in few)
    windows = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    needed = sorted(one.needed for one in few if one.needed is not None)
    likely = f", up to {needed[-1]} for the most uncertain" if needed and needed[-1] > FEWEST_UNITS else ""
    return [
        f"{windows} window{'s' * (most != 1)} for {len(few)} of {len(pooled)} settings: fewer than "
        f"{FEWEST_UNITS} windows, no verdict; {FEWEST_UNITS} needed{likely}."
    ]

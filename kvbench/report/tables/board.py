"""The board: one line for each method of each verified run folder, and a line for each folder that is not verified."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.files import read_json
from kvbench.report.compare.comparison import config_of
from kvbench.report.compare.names import display_name, labels
from kvbench.report.tables.table import Column, Table, text_column
from kvbench.results.loading import load_what_is_there
from kvbench.results.row import Row, rows_of
from kvbench.results.run_files import PROVENANCE, read_provenance
from kvbench.results.verification import read_record, why_not_verified

WHO = "who.txt"
"""A file of a run folder whose first line names who measured."""


@dataclass(frozen=True)
class Submission:
    """A run folder on the board. why_not: why it is not verified, None where it is. who: empty where nobody says."""

    run: Path
    rows: list[Row]
    why_not: str | None
    who: str


def submission(run: Path, who: str = "") -> Submission:
    """A run folder's rows and standing. who: the name for folders that hold no `who.txt`."""
    why_not = why_not_verified(run)
    rows = [] if why_not else [row for row in rows_of(load_what_is_there(run).frame) if row.status == "ok"]
    return Submission(run, rows, why_not, _named(run) or who)


def _named(run: Path) -> str:
    try:
        lines = (run / WHO).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return lines[0].strip()[:80] if lines else ""


def verified_table(submissions: Sequence[Submission]) -> Table | None:
    """One line a method, model and setting of the verified folders, smallest cache first; None where there is none."""
    lines = [line for one in submissions if one.why_not is None for line in _lines(one)]
    if not lines:
        return None
    lines.sort(key=lambda line: (str(line["model"]), str(line["setting"]), -(line["x_smaller"] or 0.0)))

    def words(key: str, header: str, rank: int = 0) -> Column:
        return text_column(key, header, [str(line[key]) for line in lines], rank, whole=key == "method")

    def numbers(key: str, header: str, form: str, better: str) -> Column:
        cells = [_number(line, key, form) for line in lines]
        return Column(key, header, cells, cells, numbers=[line[key] for line in lines], better=better)

    columns = (
        words("method", "method"),
        words("model", "model"),
        words("setting", "setting"),
        numbers("x_smaller", "x smaller than 16-bit", "{:.1f}x", "high"),
        numbers("gap_closed", "gap closed (KL)", "{:.0%}", "high"),
        numbers("loss", "ΔNLL", "{:+.4f}", "low"),
        numbers("tpot_to_full", "TPOT / full's", "{:.2f}x", "low"),
        words("timed_at", "timed at"),
        words("who", "who"),
        words("machine", "machine"),
        words("date", "date"),
        words("source", "source"),
        words("verified", "verified"),
    )
    caption = ["brackets: 95% intervals", "source: first 12 digits of the hash of the code that measured"]
    return Table("verified", "Verified", caption, columns, lines)


def _number(line: dict[str, Any], key: str, form: str) -> str:
    if line[key] is None:
        return "–"
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    inside = "" if low is None or high is None else f" [{form.format(low)}, {form.format(high)}]"
    return form.format(line[key]) + inside


def _lines(one: Submission) -> list[dict[str, Any]]:
    """The lines of one run folder: its perplexity over all texts, or its bytes where it has none, and its times."""
    provenance, record = read_provenance(one.run), read_record(one.run)
    quality = [row for row in one.rows if row.metric == "x_smaller" and row.measure in ("perplexity", "memory")]
    texts = {row.dataset for row in quality}
    pooled = {text for text in texts if text and "+" in text} or texts
    names = labels([row for row in quality])
    found = []
    for row in quality:
        if row.dataset not in pooled:
            continue
        mine = [each for each in one.rows if config_of(each) == config_of(row)]
        place = (row.measure, row.context, row.dataset)
        here = [each for each in mine if (each.measure, each.context, each.dataset) == place]
        loss, gap = _first(here, "nll_minus_full"), _first(here, "gap_closed_kl")
        speed = _first(mine, "tpot_to_full")
        machine = {each.device for each in mine if each.device}
        found.append(
            {
                "method": names.get(config_of(row)) or display_name(row),
                "model": row.model or "?",
                "setting": f"{row.measure}, {row.context or 0:,} tokens of {row.dataset}",
                "x_smaller": row.value,
                **_bounded("gap_closed", gap),
                **_bounded("loss", loss),
                **_bounded("tpot_to_full", speed),
                "timed_at": "–" if speed is None else f"{speed.context or 0:,} tokens",
                "who": one.who or "–",
                "machine": ", ".join(sorted(machine)) or "–",
                "date": str(read_json(one.run / PROVENANCE).get("time_utc") or "–")[:10],
                "source": str(provenance.get("source_hash") or "–")[:12],
                "verified": f"{record.drawn} of {record.population} samples" + (", to the bit" if record.exact else "")
                if record
                else "–",
                "run": one.run.name,
                "knobs": json.dumps([value for value in config_of(row)], default=str),
            }
        )
    return found


def _bounded(key: str, row: Row | None) -> dict[str, float | None]:
    if row is None:
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    return {key: row.value, f"{key}_low": row.low, f"{key}_high": row.high}


def _first(rows: Sequence[Row], metric: str) -> Row | None:
    return next((row for row in rows if row.metric == metric and row.value is not None), None)


def unverified_table(submissions: Sequence[Submission]) -> Table | None:
    """The folders that are not on the board, why, and the command to type; None where there is none."""
    left = [one for one in submissions if one.why_not is not None]
    if not left:
        return None
    lines = [
        {"folder": str(one.run), "why": one.why_not, "command": verify_command(one.run), "who": one.who} for one in left
    ]
    columns = tuple(text_column(key, key, [str(line[key]) for line in lines]) for key in ("folder", "why", "command"))
    return Table("not_verified", "Not verified", [], columns, lines)


def verify_command(run: Path) -> str:
    return f"python -m kvbench.verify {shlex.quote(str(run))}"

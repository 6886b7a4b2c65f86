"""The answer card and the banner of evidence in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.advice.banner import Banner
from kvbench.report.advice.card import AnswerCard, CardLine

SPEED = "time per token against full"
HEAD = ("need", "setting", "budget", "x smaller than 16-bit", "cost in quality", SPEED)


def card_markdown(card: AnswerCard) -> str:
    """A table of the needs for each model, then why and what to run, then the facts beside it."""
    parts = ["## Which setting"]
    for name, lines in card.groups:
        parts += [f"### {safe(name)}"] if name else []
        parts += [_table(lines), "\n".join(_detail(line) for line in lines)]
    facts = [
        f"- **{fact.title}**: {safe(fact.text)}" + (f" `{fact.command}`" if fact.command else "") for fact in card.facts
    ]
    return "\n\n".join([*parts, "What these rows cannot tell:\n\n" + "\n".join(facts)])


def banner_markdown(banner: Banner) -> str:
    """What the evidence is, one fact a line, then its warnings."""
    facts = "\n".join(f"- {name}: {safe(text)}" for name, text in banner.facts)
    warnings = "\n".join(f"- **{safe(text)}**" for text in banner.warnings)
    return "## Evidence\n\n" + "\n".join(filter(None, [facts, warnings]))


def safe(text: str) -> str:
    """Text from outside (error messages, notes) with the signs of Markdown escaped."""
    for sign in ("\\", "`", "*", "_", "<", "[", "]"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _table(lines: Sequence[CardLine]) -> str:
    cells = [HEAD, tuple("---" for _ in HEAD), *map(_cells, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cells(line: CardLine) -> tuple[str, ...]:
    marked = f" *{line.mark}*" if line.mark else ""
    setting = f"**{_cell(line.setting)}**{marked}" if line.setting != "–" else f"*{line.mark or 'none'}*"
    return line.need, setting, *map(_cell, (line.budget, line.smaller, line.price, line.speed))


def _cell(text: str) -> str:
    return safe(text).replace("|", "\\|")


def _detail(line: CardLine) -> str:
    """What the line was ranked by; under it its reasons and limits and what to run."""
    run = [f"run `{line.command}`"] if line.command else []
    behind = [*map(safe, (*line.reasons, *line.limits)), *run]
    return "\n".join([f"- **{line.need}**, ranked by {safe(line.ranked_by)}", *(f"  - {text}" for text in behind)])

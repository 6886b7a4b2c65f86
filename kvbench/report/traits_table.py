"""What each method gives up and gains by its nature, beside the gain that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.candidates import Candidate, Group
from kvbench.report.table import Table, text_column
from kvbench.report.verdict import loss_text

MOST_GROUPS = 2


def traits_table(groups: Sequence[Group]) -> Table | None:
    """One line a method (with its knobs) of the first groups; None if nothing but the full cache was measured."""
    pairs = [(member, group) for group in groups[:MOST_GROUPS] for member in group.members]
    if not pairs:
        return None
    texts = [_texts(member, group) for member, group in pairs]
    columns = tuple(text_column(key, key, [text[key] for text in texts]) for key in texts[0])
    records = [dict(text) for text in texts]
    return Table("traits", "Traits", [], columns, records, terminal=False)


def _texts(member: Candidate, group: Group) -> dict[str, str]:
    traits, ratio = member.traits, group.ratio(member)
    loss = member.numbers.get("nll_minus_full")
    return {
        "method": member.label,
        "shrinks": traits.shrinks or "–",
        "retraining": {True: "needed", False: "no", None: "–"}[traits.retraining],
        "history": traits.history or "–",
        "size bounded": {True: "yes", False: "no", None: "–"}[traits.bounded],
        "typical gain": traits.typical or "–",
        "gain measured": "–" if ratio is None else f"{ratio:.1f}x",
        "at a ΔNLL of": "–" if loss is None else loss_text(loss),
    }

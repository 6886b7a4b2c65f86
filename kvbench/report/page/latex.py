"""A table as LaTeX for a paper: it breaks over pages, its caption explains the columns, and it fits the page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kvbench.report.tables.symbols import symbols_of
from kvbench.report.tables.table import INTERVAL, Column, Table

PORTRAIT, LANDSCAPE = 345.0, 550.0
"""Points of text width and text height of LaTeX's `article` at 10 points."""
LETTER, SMALL_LETTER, GAP = 4.3, 3.5, 6.0
"""Points of a letter in \\scriptsize and in \\tiny, on the wide side, and between two columns."""
WORDS = 90.0
"""Points from which a column of words breaks its lines."""
ONLY_IN_FILES = 2
"""Columns of this rank and above are only in the CSV."""
MINUS = re.compile(r"(?<![\w)\]])-(?=[\d.])")
EXPONENT = re.compile(r"(?<![\w.)\]])([+-]?)(\d+(?:\.\d+)?)e([+-]\d+)(?!\w)")


def to_latex(table: Table) -> str:
    """A `longtable` with booktabs rules and a repeated head, the best of a column in bold.

    It needs \\usepackage{array,booktabs,longtable,pdflscape}. A table that is too wide for a page stands in landscape.
    Where that is too narrow as well, intervals stand below their numbers; then columns are left out, and the caption
    names them.
    """
    wanted = [column for column in table.columns if column.rank < ONLY_IN_FILES]
    stacked = _width(wanted, stacked=False) > LANDSCAPE
    columns, dropped = _columns_that_fit(wanted, stacked=stacked)
    landscape = _width(columns, stacked=stacked) > PORTRAIT
    count = len(columns)
    head = [r"\toprule", " & ".join(map(_head, columns)) + r" \\", r"\midrule"]
    lines = [_line([_cell(column, index, stacked=stacked) for column in columns]) for index in range(table.height)]
    body = [
        "% \\usepackage{array,booktabs,longtable,pdflscape}",
        *([r"\begin{landscape}"] if landscape else []),
        r"\begingroup\scriptsize\setlength{\tabcolsep}{3pt}",
        rf"\begin{{longtable}}{{{''.join(map(_kind, columns))}}}",
        rf"\caption{{{escaped(_caption(table, columns, dropped))}}}\label{{tab:{table.name}}}\\",
        *head,
        r"\endfirsthead",
        rf"\multicolumn{{{count}}}{{l}}{{\tablename~\thetable{{}}, continued}}\\",
        *head,
        r"\endhead",
        rf"\midrule\multicolumn{{{count}}}{{r}}{{continued on the next page}}\\",
        r"\endfoot",
        r"\bottomrule",
        r"\endlastfoot",
        *lines,
        r"\end{longtable}",
        r"\endgroup",
        *([r"\end{landscape}"] if landscape else []),
    ]
    return "\n".join(body) + "\n"


def _caption(table: Table, columns: Sequence[Column], dropped: Sequence[str]) -> str:
    """Title, settings, symbols and marks, sentence by sentence."""
    intervals = any(not column.left and INTERVAL.match(cell) for column in columns for cell in column.full)
    missing = any(cell == "–" for column in columns for cell in column.full)
    sentences = [
        table.title,
        _capitalised("; ".join(table.caption)),
        "; ".join(symbols_of(column.key for column in columns)),  # a symbol keeps its small letter
        "Brackets: 95% intervals" if intervals else "",
        "Bold: better than every other method beyond the intervals" if any(column.best for column in columns) else "",
        "–: not measured" if missing else "",
        f"Left out, in the CSV: {', '.join(dropped)}" if dropped else "",
    ]
    return " ".join(f"{sentence.rstrip('. ')}." for sentence in sentences if sentence)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _columns_that_fit(columns: Sequence[Column], *, stacked: bool) -> tuple[list[Column], list[str]]:
    """The columns that a page in landscape holds, and the headers of the others: of high rank first, from the right."""
    kept, dropped = list(columns), []
    while _width(kept, stacked=stacked) > LANDSCAPE and any(not column.whole for column in kept):
        loose = [index for index, column in enumerate(kept) if not column.whole]
        dropped.append(kept.pop(max(loose, key=lambda index: (kept[index].rank, index))).header)
    return kept, dropped


def _kind(column: Column) -> str:
    """The column of the `longtable`: long words break into lines, other words and numbers stand as they are."""
    if not column.left:
        return "r"
    return rf">{{\raggedright\arraybackslash}}p{{{WORDS:.0f}pt}}" if _breaks(column) else "l"


def _breaks(column: Column) -> bool:
    return column.left and not column.whole and LETTER * max(map(len, column.compact), default=0) > WORDS


def _width(columns: Sequence[Column], *, stacked: bool) -> float:
    """Points that the columns need. stacked: with intervals below their numbers."""
    return sum(
        GAP + (WORDS if _breaks(column) else max(_points(parts, stacked=stacked) for parts in _texts(column)))
        for column in columns
    )


def _texts(column: Column) -> list[tuple[str, str]]:
    heads = [(word, "") for word in column.narrow_header(column.full).split("\n")]
    return [*heads, *(_parts(column, index) for index in range(len(column.full)))]


def _points(parts: tuple[str, str], *, stacked: bool) -> float:
    number, interval = LETTER * len(parts[0]), SMALL_LETTER * len(parts[1])
    return max(number, interval) if stacked else number + interval + SMALL_LETTER * bool(interval)


def _parts(column: Column, index: int) -> tuple[str, str]:
    """The number of a cell and its interval, empty where it has none; of words the short form."""
    if column.left:
        return column.compact[index], ""
    found = INTERVAL.match(column.full[index])
    return (found[1], found[2]) if found else (column.full[index], "")


def _head(column: Column) -> str:
    lines = [escaped(line) for line in column.narrow_header(column.full).split("\n")]
    if len(lines) == 1:
        return lines[0]
    side, stacked = "l" if column.left else "r", r" \\ ".join(lines)
    return rf"\shortstack[{side}]{{{stacked}}}"


def _cell(column: Column, index: int, *, stacked: bool) -> str:
    """The number, bold where it is the best, its interval in a tiny font."""
    number, interval = _parts(column, index)
    text = rf"\textbf{{{escaped(number)}}}" if index in column.best else escaped(number)
    if not interval:
        return text
    small = rf"{{\tiny {escaped(interval)}}}"
    return rf"\shortstack[r]{{{text} \\ {small}}}" if stacked else f"{text} {small}"


def _line(cells: Sequence[str]) -> str:
    """A line of the table. A cell that begins with a bracket or a star would be read as an argument of the line end."""
    first = cells[0]
    return " & ".join([("{}" if first[:1] in ("[", "*") else "") + first, *cells[1:]]) + r" \\"


SIGNS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "Δ": r"$\Delta$",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\rightarrow$",
    ">": r"$>$",
    "<": r"$<$",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "\n": " ",
}
LAST_LATIN = 0x17F
"""Letters up to here are known to LaTeX's default fonts."""


def escaped(text: str) -> str:
    """Text for LaTeX: signs escaped, true minus signs, `2.6e-05` as a power of ten, unknown letters as `?`."""
    parts, start = [], 0
    for found in EXPONENT.finditer(text):
        sign, digits, power = found.groups()
        parts += [_signs(text[start : found.start()]), rf"${sign}{digits}\times10^{{{int(power)}}}$"]
        start = found.end()
    return "".join([*parts, _signs(text[start:])])


def _signs(text: str) -> str:
    return "".join(SIGNS.get(sign) or _letter(sign) for sign in MINUS.sub("−", text))


def _letter(sign: str) -> str:
    if sign.isprintable() and ord(sign) <= LAST_LATIN:
        return sign
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return "".join(SIGNS.get(letter, letter) for letter in plain) or "?"

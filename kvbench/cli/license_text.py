"""Licence terms that lie beside a model as a saved web page, as text to read in a terminal."""

from html.parser import HTMLParser

SILENT = ("script", "style")
BLOCKS = ("p", "div", "li", "h1", "h2", "h3", "h4", "br", "article", "section")


def readable(page: str) -> str:
    """The text of a page from its first heading to the end of its article, one paragraph a line, no empty ones."""
    reader = _Reader()
    reader.feed(page)
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).split("\0"))
    return "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    """Collects text between the first <h1> and </article>; \\0 stands where a block begins or ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.silent = 0
        self.inside = self.over = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in SILENT
        self.inside |= tag == "h1"
        if tag in BLOCKS:
            self.pieces.append("\0")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in SILENT
        self.over |= self.inside and tag == "article"
        if tag in BLOCKS:
            self.pieces.append("\0")

    def handle_data(self, data: str) -> None:
        if self.inside and not self.over and not self.silent:
            self.pieces.append(data)

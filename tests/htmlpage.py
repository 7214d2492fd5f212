"""A page of HTML as a browser's parser sees it, for tests."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements, attributes and texts of a page as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.texts.append(data)

    @property
    def plain(self) -> str:
        return " ".join(" ".join(self.texts).split()).replace("\u00a0", " ")

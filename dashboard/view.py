"""What the address says is looked at: page, recording, and the state of the page. All state lives in the address, so that links work."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode

import msgspec

MOST_KEYS = 32
MOST_CHARACTERS = 2_000
"""Longest value that is taken; what is longer was not written by a page of this dashboard."""

BUNDLE, OTHER = "bundle", "other"
RANK = "rank"
"""Which rank of the recording is looked at: it stays from page to page."""


class View(msgspec.Struct, frozen=True):
    """One place in the dashboard."""

    page: str = "/"
    """Path of the page, such as '/ops'."""
    bundle: str | None = None
    """Name of the recording in the library; nothing says yet that it exists."""
    other: str | None = None
    """The second recording, to compare with."""
    query: dict[str, str] = {}
    """State of the page, such as {'sort': 'calls'}, and the rank; without the names of recordings."""

    @classmethod
    def parse(cls, pathname: object, search: object) -> View:
        """Return what an address means; what is too long or too much, or no text, is left out: any program may send a request."""
        pathname, search = (text if isinstance(text, str) else "" for text in (pathname, search))
        given = parse_qsl(search.removeprefix("?")[: MOST_KEYS * MOST_CHARACTERS], max_num_fields=None)
        query = {key: value for key, value in given[:MOST_KEYS] if len(key) + len(value) <= MOST_CHARACTERS}
        bundle, other = query.pop(BUNDLE, None), query.pop(OTHER, None)
        page = "/" + pathname.strip("/")[:MOST_CHARACTERS]
        return cls(page, bundle, other, query)

    def href(self, page: str | None = None, **query: str | int | None) -> str:
        """Return the address of `page` (default: this one) for the same recordings.

        The state of this page is kept only where the page stays, the rank always; `query` changes it, None takes a key out. `bundle` and
        `other` may be given as well.
        """
        kept = self.query if page in (None, self.page) else self.bare.query
        state: dict[str, str | int | None] = {BUNDLE: self.bundle, OTHER: self.other, **kept, **query}
        text = urlencode([(key, str(value)) for key, value in state.items() if value is not None], quote_via=quote)
        return f"{self.page if page is None else page}{f'?{text}' if text else ''}"

    @property
    def bare(self) -> View:
        """Return the same page of the same recordings and rank without any other state."""
        return View(self.page, self.bundle, self.other, {RANK: self.query[RANK]} if RANK in self.query else {})

    @property
    def rank(self) -> int | None:
        """Return the rank that is looked at; None: the whole recording, of which the report shows the median rank."""
        return self.number(RANK)

    def number(self, key: str) -> int | None:
        """Return a whole number of the state; None where it is not given or is none."""
        text = self.query.get(key, "")
        digits = text.removeprefix("-")
        return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        """Return a word of the state if it is among `known`, else the first of those."""
        return self.query[key] if self.query.get(key) in known else known[0]

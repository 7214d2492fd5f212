"""The text of an SQL query, taken apart before polars sees it: one SELECT over known tables, and nothing that reaches further.

polars' own functions of tables (read_csv and the like) open files. What runs is not the text as given but its tokens as read here, without
comments, so that nothing can hide between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

MAX_LENGTH = 4_000
"""Characters of a query: far beyond a readable one."""

MAX_TOKENS = 600
"""Words and signs of a query: polars takes 0.3 s for 300 terms of a sum, and many times as long for ten times as many (measured)."""

MAX_RELATIONS = 24
"""Tables named after FROM and JOIN: parts of WITH that name the last one twice double the work each time."""

_TOKEN = re.compile(
    r"(?P<gap>\s+|--[^\n]*|/\*.*?\*/)"
    r"|(?P<text>'(?:[^'\\]|'')*')"
    r'|(?P<quoted>"[^"\\]+")'
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<sign>\|\||::|<=|>=|<>|!=|==|[-+*/%<>=(),.;\[\]])",
    re.DOTALL | re.ASCII,
)
"""What a query is made of. Dialects differ on backslashes, $, # and backquotes: a text with them could be read in two ways."""

_OUTSIDE = re.compile(r"read_\w*|scan_\w*|generate_\w*|recursive")
"""Names of polars' functions that open files or make rows of their own; and WITH RECURSIVE, on which polars does not come back."""

_NEXT_CLAUSE = (
    "select",
    "where",
    "group",
    "having",
    "order",
    "limit",
    "offset",
    "union",
    "intersect",
    "except",
    "qualify",
    "window",
    "fetch",
)
"""Words that end the list of tables after FROM."""

_WITH_FROM = ("extract", "substring", "trim", "overlay")
"""Functions in whose brackets FROM names no table: extract(year from x)."""


class QueryError(Exception):
    """A query that is not allowed or cannot be run. `name`: what it calls a table or column that is none; `known`: what there is."""

    def __init__(self, message: str, name: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.known = known


class Token(msgspec.Struct, frozen=True):
    """A word or sign of a query as written, and as it is compared: in lower case, without quotes."""

    text: str
    name: str
    kind: str
    apart: bool
    """A gap or a comment stands before it."""


class _Bracket(msgspec.Struct):
    """Where in a pair of brackets the reading is: in the list of tables of a FROM, and whether a table must come next."""

    function: bool = False
    """These are the brackets of a function of _WITH_FROM."""
    tables: bool = False
    due: bool = False


def checked(query: str, tables: Sequence[str]) -> str:
    """Return `query` without comments; raises QueryError unless it is one short SELECT, or WITH ... SELECT, that names only `tables`."""
    tokens = _tokens(query)
    if not tokens or tokens[0].kind != "word" or tokens[0].name not in ("select", "with"):
        raise QueryError("only SELECT, or WITH ... SELECT")
    for token in tokens:
        if token.kind in ("word", "quoted") and _OUTSIDE.fullmatch(token.name):
            raise QueryError(f"{token.name} is not allowed: a query sees only the tables {', '.join(tables)}")
    _check_relations(tokens, tables)
    return "".join(f" {token.text}" if token.apart else token.text for token in tokens).strip()


def _tokens(query: str) -> list[Token]:
    """Return the tokens of `query`, without gaps and comments; raises QueryError for a sign that has no place in one, and for too many."""
    if len(query) > MAX_LENGTH:
        raise QueryError(f"longer than {MAX_LENGTH} characters")
    found, position, apart = [], 0, False
    while position < len(query):
        match = _TOKEN.match(query, position)
        if match is None:
            raise QueryError(f"{query[position]!r} is not allowed, at {query[position : position + 20]!r}")
        position, kind = match.end(), match.lastgroup or ""
        if kind != "gap":
            found.append(Token(match[0], match[0].lower().strip('"'), kind, apart))
        apart = kind == "gap"
    if len(found) > MAX_TOKENS:
        raise QueryError(f"more than {MAX_TOKENS} words and signs")
    return found


def _check_relations(tokens: list[Token], tables: Sequence[str]) -> None:
    """Raise QueryError for anything after FROM and JOIN but `tables`, names that WITH gives, and brackets that hold a SELECT."""
    own = {one.name for one, two, three in zip(tokens, tokens[1:], tokens[2:], strict=False) if two.name == "as" and three.text == "("}
    count = 0
    for token, after in _relations(tokens):
        count += 1
        if token.text == "(" and after is not None and after.name in ("select", "with"):
            continue
        if token.kind not in ("word", "quoted") or token.name not in {*tables, *own} or (after is not None and after.text in ("(", ".")):
            raise QueryError(f"no table is named {token.text!r}", token.name, tuple(tables))
    if count > MAX_RELATIONS:
        raise QueryError(f"names more than {MAX_RELATIONS} tables after FROM and JOIN")


def _relations(tokens: list[Token]) -> Iterator[tuple[Token, Token | None]]:
    """Yield the first token of everything that stands where a table must stand, and the token after it."""
    brackets = [_Bracket()]
    for index, token in enumerate(tokens):
        inner = brackets[-1]
        if inner.due:
            inner.due = False
            yield token, tokens[index + 1] if index + 1 < len(tokens) else None
        elif token.text == "," and inner.tables:
            inner.due = True
        elif token.kind == "word":
            _read_word(inner, tokens, index)
        if token.text == "(":
            brackets.append(_Bracket(function=index > 0 and tokens[index - 1].name in _WITH_FROM))
        elif token.text == ")" and len(brackets) > 1:
            brackets.pop()


def _read_word(inner: _Bracket, tokens: list[Token], index: int) -> None:
    """Note in `inner` what the word at `index` means for the tables that follow."""
    name = tokens[index].name
    if name in _NEXT_CLAUSE:
        inner.function, inner.tables = inner.function and name != "select", False
    elif name == "join" or (name == "from" and not inner.function and not _is_distinct(tokens, index)):
        inner.tables = inner.due = True


def _is_distinct(tokens: list[Token], index: int) -> bool:
    """Return whether the FROM at `index` is that of IS (NOT) DISTINCT FROM, a comparison."""
    return [token.name for token in tokens[max(0, index - 2) : index]] in (["is", "distinct"], ["not", "distinct"])

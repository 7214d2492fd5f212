"""Reads a copy again: does a text that was removed stand in it?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing

import msgspec

from gpudiag.api.scrub.forms import JSON_ERRORS
from gpudiag.api.scrub.words import LONG_CHARACTERS
from gpudiag.trace.source import text_blocks

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def left_in(copies: Iterable[Iterable[bytes]], texts: Iterable[str]) -> set[str]:
    """Return those of `texts` (of LONG_CHARACTERS or more) that stand in a string of one of the copies (their JSON, in blocks)."""
    strings: set[bytes] = set()
    for copy in copies:
        for line in _lines(copy):
            strings.update(_STRING.findall(line))
    wanted: dict[str, list[str]] = {}
    for text in texts:
        wanted.setdefault(text[:LONG_CHARACTERS], []).append(text)
    found: set[str] = set()
    for string in strings:
        _find(_text(string), wanted, found)
    return found


def _find(text: str, wanted: dict[str, list[str]], found: set[str]) -> None:
    for at in range(len(text) - LONG_CHARACTERS + 1):
        for candidate in wanted.get(text[at : at + LONG_CHARACTERS], ()):
            if text.startswith(candidate, at):
                found.add(candidate)


def _text(string: bytes) -> str:
    try:
        return msgspec.json.decode(string, type=str)
    except JSON_ERRORS:
        return string.decode("utf-8", "replace")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `blocks` cut behind line ends: no string of a copy goes over one."""
    rest = b""
    for block in blocks:
        head, end, tail = (rest + block).rpartition(b"\n")
        yield head + end
        rest = tail
    yield rest


def text_of(path: str) -> Iterator[bytes]:
    """Yield the text of a trace in blocks."""
    with closing(text_blocks(path)) as blocks:
        yield from blocks

"""Values of a trace as JSON text: each form says what may stand there. What has another form is left out, so unknown values stay behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from gpudiag.api.scrub.names import Names
from gpudiag.api.scrub.vocabulary import WORDS
from gpudiag.api.scrub.words import Words

Form = Callable[[bytes], bytes | None]

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NUMBER = re.compile(rb'-?\d{1,50}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,4})?|true|false|null|""|"(?:stream )?[-+]?\d{1,30}(?:\.\d{1,30})? ?"')
_NUMBERS = re.compile(rb'[\[\]\s,\d.+-]*|"[\[\]\s,\d.+-]*"')
_ADDRESS = re.compile(rb'"0x[0-9a-fA-F]{1,16}"')
_VERSION = re.compile(rb'"\d[\w.+-]{0,39}"|\d{1,10}')
_DEVICE = re.compile(rb'"[\w .()/+-]{0,100}"', re.ASCII)
_PLAIN_SPLIT = re.compile(r"[\[\](),\s]+")
_PLAIN = re.compile(r"(?:True|False|None|-?inf|nan|-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?[jL]?)?")
_WORD = re.compile(r"\w+", re.ASCII)
_MAX_DEPTH = 8


def number(raw: bytes) -> bytes | None:
    """Return a number or truth value, also in quotes, as the profiler writes them."""
    return raw if _NUMBER.fullmatch(raw) else None


def numbers(raw: bytes) -> bytes | None:
    """Return nested lists of numbers, also as a text; null for what is none: that something was recorded counts too."""
    return raw if _NUMBERS.fullmatch(raw.replace(b"...", b"")) else _mapped(raw, lambda _: "")


def address(raw: bytes) -> bytes | None:
    """Return a pointer or a number."""
    return raw if _ADDRESS.fullmatch(raw) else number(raw)


def version(raw: bytes) -> bytes | None:
    """Return the version of a library: it begins with a digit."""
    return raw if _VERSION.fullmatch(raw) else None


def device_name(raw: bytes) -> bytes | None:
    """Return the name of a processor, as its vendor writes it."""
    return raw if _DEVICE.fullmatch(raw) else None


def types(raw: bytes) -> bytes | None:
    """Return nested lists of the names of data types."""
    return _mapped(raw, lambda text: text if all(word.lower() in WORDS for word in _WORD.findall(text)) and len(text) < 80 else "")


def arguments(raw: bytes) -> bytes | None:
    """Return the plain arguments of an op: numbers, truth values, lists of such, and the known words among its options."""
    return _mapped(raw, lambda text: text if _plain(text) else "")


def _plain(text: str) -> bool:
    if all(_PLAIN.fullmatch(token) for token in _PLAIN_SPLIT.split(text)):
        return True
    return text.strip("\"'").lower() in WORDS


def text_by(rewrite: Callable[[str], str]) -> Form:
    """Return the form of a text, or a number, that `rewrite` makes shareable."""

    def form(raw: bytes) -> bytes | None:
        value = decoded(raw)
        return msgspec.json.encode(rewrite(value)) if isinstance(value, str) else number(raw)

    return form


def words(names: Names) -> Form:
    """Return the form of a text of known words."""
    return text_by(names.text)


def symbol(names: Names) -> Form:
    """Return the form of the name of a kernel."""
    return text_by(names.symbol)


def decoded(raw: bytes) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return msgspec.json.decode(raw)
    except JSON_ERRORS:
        return None


def _mapped(raw: bytes, keep: Callable[[str], str]) -> bytes:
    """Return nested lists with their texts as `keep` returns them, null for what is no list; the same bytes where nothing changes."""
    value = decoded(raw)
    found = _walk(value, keep, 0)
    if not isinstance(value, list):
        return b"null"
    return raw if found == value else msgspec.json.encode(found)


def _walk(value: Any, keep: Callable[[str], str], depth: int) -> Any:
    if isinstance(value, str):
        return keep(value)
    if isinstance(value, list) and depth < _MAX_DEPTH:
        return [_walk(item, keep, depth + 1) for item in value]
    return value if isinstance(value, int | float) else None


def texts_in(raw: bytes, words: Words, kind: str) -> None:
    """Note every text in a value that is left out."""
    _note(decoded(raw), words, kind, 0)


def _note(value: Any, words: Words, kind: str, depth: int) -> None:
    if isinstance(value, str):
        words.removed.note(kind, value)
    elif isinstance(value, list) and depth < 64:
        for item in value:
            _note(item, words, kind, depth + 1)
    elif isinstance(value, dict) and depth < 64:
        for key, item in value.items():
            words.removed.note(kind, key)
            _note(item, words, kind, depth + 1)

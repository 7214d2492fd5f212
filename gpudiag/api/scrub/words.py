"""Free text with every word replaced that is not in the vocabulary; the same word is replaced alike throughout one run."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter

from gpudiag.api.scrub.vocabulary import WORDS

MAX_NUMBER = 7
"""Digits of a number that may stand in a text: a layer, a step, a process (up to 4,194,304 on Linux); no account."""

MAX_TEXTS = 100_000
"""Removed texts that are remembered for the check of the copy."""

LONG_CHARACTERS = 9
"""Shorter texts are not looked for in the copy: they stand in it by chance."""

MAX_CHARACTERS = 1_000
"""Of a removed text that are remembered."""

_LONG_WORD = 16
"""Letters of a word that is looked for in the copy."""

_LETTERS = str.maketrans("0123456789abcdef", "bcdfghjklmnpqrst")

_PIECE = re.compile(r"[^\W_]+")
_PART = re.compile(r"\d+|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|.", re.DOTALL)
_ODD = re.compile(r"[^ -~]")
"""What is neither a letter nor printable ASCII: control characters, emoji."""


class Removed:
    """What was taken out: how often, by kind, and which texts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.texts: set[str] = set()

    def note(self, kind: str, text: str | None = None) -> None:
        """Count one removal; remember its text, where it is long enough to be told from others."""
        self.counts[kind] += 1
        if text is not None and len(text) >= LONG_CHARACTERS and len(self.texts) < MAX_TEXTS:
            self.texts.add(text[:MAX_CHARACTERS])

    def worth_a_look(self) -> set[str]:
        """Return the removed texts that no known word explains: those are looked for in the copy."""
        return {text for text in self.texts if not all(map(is_known, _PIECE.findall(text)))}


class Words:
    """Replaces words by a digest under a key that nobody keeps: equal words stay equal, and no list of guesses finds them out."""

    def __init__(self, removed: Removed, key: bytes | None = None) -> None:
        self.removed = removed
        self._key = secrets.token_bytes(16) if key is None else key

    def digest(self, text: str, letter: str = "x") -> str:
        """Return the word that stands for `text`."""
        found = hashlib.blake2s(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=4).hexdigest()
        return letter + found.translate(_LETTERS)  # no digits: numbers in names count the steps

    def known(self, text: str, vocabulary: frozenset[str] = WORDS) -> str:
        """Return `text` with each word that is not in the vocabulary replaced."""
        found = _ODD.sub("?", _PIECE.sub(lambda match: self._piece(match.group(), vocabulary), text))
        if found != text:
            self.removed.note("names changed", text if _telling(text) else None)
        return found

    def _piece(self, piece: str, vocabulary: frozenset[str]) -> str:
        if is_known(piece, vocabulary):
            return piece
        self.removed.note("words replaced", piece if _telling(piece) else None)
        return self.digest(piece)


def is_known(piece: str, vocabulary: frozenset[str] = WORDS) -> bool:
    """Return whether letters and digits without a gap consist of known words and short numbers."""
    if piece.lower() in vocabulary:
        return True
    if not piece.isascii():
        return False
    return all(part.lower() in vocabulary or (part.isdigit() and len(part) <= MAX_NUMBER) for part in _PART.findall(piece))


def _telling(text: str) -> bool:
    """Return whether a text is looked for in the copy: a short word without digits stands in names of code too."""
    return len(text) >= _LONG_WORD or any(map(str.isdigit, text))

"""Sentences that gpudiag wrote into a bundle: a word stays where gpudiag's own source uses it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from gpudiag.api.scrub.vocabulary import WORDS
from gpudiag.model import tables

_WRITERS = ("capture", "hardware", "model")
"""Folders of the package whose texts get into bundles."""

_LETTERS = re.compile(rb"[A-Za-z]+")


@cache
def own_words() -> frozenset[str]:
    """Return the words, in lower case, of the source of what writes bundles, and the vocabulary."""
    found: set[bytes] = set()
    package = Path(tables.__file__).parents[1]
    for folder in _WRITERS:
        for file in (package / folder).rglob("*.py"):
            found.update(_LETTERS.findall(file.read_bytes()))
    return WORDS | {word.decode().lower() for word in found}

"""Results that are kept beside large recordings: a whole report, what one rank tells of itself, the steps of a side of a comparison.

    >>> data = kept(Key("rank", (trace,), asked=("window 0",), rank=3), lambda: encode(summarise(...)))

makes the bytes at the first call and reads them at the next ones, for as long as nothing of what they were made from changes: the content
of the recordings, the rules, the measured peaks, gpudiag itself, and what was asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from gpudiag.api import cache, cache_key

Result = TypeVar("Result")

_DATA = "data"


class Key(NamedTuple):
    """What a result was made from."""

    kind: cache.Kind
    paths: tuple[str | Path, ...]
    """Everything that was read: traces, bundles, folders of ranks. The result is kept beside the first one."""
    asked: tuple[object, ...] = ()
    """Whatever else the result depends on, told apart by its repr()."""
    rank: int | None = None
    """Of bundles: files whose names say that they are of another rank do not count. None: all files count."""
    rules: tuple[str, ...] = ()
    """Folders of rules besides the built-in ones."""


def kept(key: Key, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that `make` returns, from the cache where they are kept there.

    Nothing is looked up or kept for small recordings, for URLs, and where the recording changes while `make` runs.
    """
    return kept_as(key, make, bytes, bytes)


def kept_as(
    key: Key, make: Callable[[], Result], encode: Callable[[Result], bytes], decode: Callable[[bytes], Result],
    sure: Callable[[Result], bool] = lambda _: True,
) -> Result:  # fmt: skip
    """Return what `make` returns, as `kept` does, with its way to bytes and back; `sure`: whether it would be the same next time."""
    slot = _slot(key)
    files = None if slot is None else cache.load(slot)
    if files is not None:
        with suppress(KeyError, ValueError, RecursionError, msgspec.MsgspecError):  # written by somebody else
            return decode(files[_DATA])
    found = make()
    if slot is not None and sure(found) and _slot(key) == slot:
        cache.store(slot, [(_DATA, encode(found))])
    return found


def _slot(key: Key) -> cache.Slot | None:
    """Return where the result lies; None where nothing is kept. Small recordings are told by sizes alone, before anything is read."""
    if cache.switched_off() or not key.paths or any("://" in str(path) for path in key.paths):
        return None
    paths = [Path(path) for path in key.paths]
    place = cache.place_of(paths[0])
    if place is None or cache_key.text_bytes(paths) < cache.MIN_TEXT_BYTES:
        return None
    made_from = (cache_key.recordings(paths, key.rank), cache_key.rule_files(key.rules), cache_key.peaks(), cache_key.code())
    if None in made_from:
        return None
    asked = (*key.asked, key.rank, *((str(path), os.path.abspath(path)) for path in paths))  # results may name where they were read
    return cache.Slot(place, key.kind, _subject(paths[0]), cache_key.digest(*made_from, *asked))


def _subject(path: Path) -> str:
    """Return the name under which results are kept: that of a file; for a folder or a pattern cache.WHOLE."""
    return path.name if path.is_file() else cache.WHOLE

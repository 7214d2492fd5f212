"""What can be fuzzed: a function of bytes that returns for every input; anything that it raises is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from gpudiag.errors import GpudiagError

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
"""Inputs that are kept, a folder for each target: each reached code that no other one did, or broke it once."""


class Target(NamedTuple):
    """One function under test."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    """Inputs to begin with, beside those that are kept."""
    covers: tuple[str, ...]
    """Modules and packages whose branches guide the fuzzer; all others run as they are, and start sooner."""
    words: tuple[str | bytes, ...] = ()
    """Pieces that a fuzzer should know."""
    longest: int = 4000
    """Bytes of an input."""


def text_of(data: bytes) -> str:
    """Return `data` as text; what is not UTF-8 becomes half a surrogate pair, as Python reads the arguments of a command."""
    return data.decode("utf-8", "surrogateescape")


def refused(act: Callable[[], object], kind: type[Exception] = GpudiagError) -> bool:
    """Return whether `act` raised an error of `kind`, which is one line where it is of gpudiag; any other exception is a finding."""
    said = ""
    try:
        act()
    except kind as error:
        said = f"refused: {error}"
    assert kind is not GpudiagError or "\n" not in said, "an error of more than one line"
    return bool(said)

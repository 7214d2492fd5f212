"""The rows of a table of experiments, as plain text: shared by Markdown, pages and notebooks, which escape it their own way."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpudiag.model.experiment import Outcome
from gpudiag.report.experiment import words

NO_RESULT = "no result"
_UNKNOWN = "?"


class Row(msgspec.Struct, frozen=True):
    """One change in words. `told` is the reason where there is no result, and else what its figure rests on."""

    name: str
    verdict: str
    ratio: str
    told: str
    parity: str
    memory: str
    pays_back: str
    promised: str
    tone: str
    """good (proved), bad (does not train the same, failed), slower, or weak: for colours beside the words."""
    more: tuple[str, ...]
    """Evidence and notes in short."""


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the measured changes, then those of screening, then those without a result."""
    return [row(found) for group in words.groups(outcomes) for found in group]


def row(found: Outcome) -> Row:
    """Return the row of one change."""
    lost = words.missing(found)
    told = [words.why(found), words.basis(found)] if found.verdict == "unstable" else [words.why(found) if lost else words.basis(found)]
    energy = words.energy(found)
    memory = "" if lost else _UNKNOWN if found.memory_ratio is None else words.percent(found.memory_ratio)
    evidence = [f"In effect: {said}" for said in found.evidence]
    return Row(
        name=words.name(found),
        verdict=words.verdict(found),
        ratio=words.throughput(found) or NO_RESULT,
        told="; ".join(text for text in told if text),
        parity="" if lost else words.parity(found),
        memory=memory,
        pays_back=words.pays_back(found).removeprefix("pays back "),
        promised=words.promised(found),
        tone=tone(found),
        more=(*evidence, *([energy] if energy and not lost else []), *words.notes(found)),
    )


def tone(found: Outcome) -> str:
    """Return good, bad, slower or weak."""
    if words.differs(found) or (found.verdict == "failed" and not words.out_of_time(found)):
        return "bad"
    if words.proved(found):
        return "good"
    return "slower" if found.verdict == "slower" and words.is_proof(found) else "weak"

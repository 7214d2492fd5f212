"""Whole reports of trainings that are broken in their structure, or odd in ways that are allowed."""

from __future__ import annotations

import json

from fuzz.documents import SHAPES
from fuzz.survival import survives
from fuzz.targets.dice import Dice, broken, decisions
from fuzz.targets.places import written
from fuzz.targets.target import Target


def report(data: bytes) -> None:
    """The bytes decide what is broken in the document of a small training."""
    dice = Dice(data)
    document = broken(SHAPES[dice.choice(sorted(SHAPES))](), dice, 12)
    survives(written("trace.json", json.dumps(document).encode()))


TARGETS = (
    Target("report", report, decisions, ("gpudiag.trace", "gpudiag.attribution", "gpudiag.timeline", "gpudiag.roofline"), longest=120),
)

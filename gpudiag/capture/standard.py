"""The parts that record beside the steps unless a session is told otherwise."""

from __future__ import annotations

from gpudiag.capture.parts import Part


def standard_parts() -> list[Part]:
    """Return new parts for one session, in the order in which they hear of events."""
    return []

"""Whether a change trains the same: runs from one known start, set beside each other step by step."""

from __future__ import annotations

from gpudiag.experiment.parity.runs import check, quality

__all__ = ["check", "quality"]

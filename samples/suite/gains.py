"""What experiments add to the gains that reports tell beside an upper bound (gpudiag/diagnosis/gains.yaml)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpudiag.model.experiment import Outcome
from gpudiag.model.hardware import DeviceKind
from suite.table import Row


def update_gains(text: str, device: str, rows: Sequence[Row]) -> str:
    """Return the file `text` with what the repaired samples of `rows` gained, by rule, in the place of what `device` gave before."""
    gains = defaultdict(list)
    for row in rows:
        if re.fullmatch(r"[A-Z]+-\d+", row.wanted) and row.gain is not None and row.gain.share < 1:
            gains[row.wanted].append(1 / (1 - row.gain.share))
    return _replace_rows(text, f"samples/SCORE.md, {device}", "cpu" if device.startswith("CPU") else "gpu", gains, "planted: true, ")


def add_experiments(text: str, program: str, device: DeviceKind, outcomes: Iterable[Outcome]) -> str:
    """Return the file `text` with what single fixes gave in experiments with `program`, in the place of what they gave it before.

    `gpudiag ab` screens candidates too: what it did not measure to the end says nothing, nor does what may be noise.
    """
    gains = defaultdict(list)
    for outcome in outcomes:
        fix = outcome.fix.partition("=")[0]
        single = outcome.variant is None and "+" not in fix and not outcome.screening
        if single and outcome.ratio is not None and outcome.verdict in ("faster", "slower", "no_difference"):
            gains[fix] = [outcome.ratio]  # of one program the last result
    return _replace_rows(text, f"gpudiag ab, {program}", device, gains)


def _replace_rows(text: str, source: str, device: DeviceKind, gains: Mapping[str, Sequence[float]], more: str = "") -> str:
    lines = [line for line in text.splitlines() if json.dumps(source) not in line]
    for change, found in sorted(gains.items()):
        span = f"least: {min(found):.2f}, most: {max(found):.2f}, count: {len(found)}"
        lines.append(f"- {{change: {change}, device: {device}, {span}, {more}source: {json.dumps(source)}}}")
    return "\n".join([*lines, ""])

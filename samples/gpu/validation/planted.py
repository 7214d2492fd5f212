"""The planted bottlenecks and healthy controls on this device, recorded for machines without it: what `make score` does, by worth."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path

import torch

from gpudiag.errors import GpudiagError
from validation.rows import Job

SAMPLES = Path(__file__).resolve().parents[2]

RECORD_S, GAIN_S = 30.0, 45.0
"""What a sample takes at first guess; then as long as the one before it, or half of the guess before."""


def run(job: Job) -> None:
    """Score the samples that need a GPU, then the controls, then the others; only the first have their twins measured."""
    sys.path.insert(0, str(SAMPLES))
    from suite.expected import Sample, find_samples
    from suite.needs import device_name, lacking
    from suite.scoring import Options, score
    from suite.table import Row as Score
    from suite.table import section, totals, with_section

    def on_a_gpu(sample: Sample) -> bool:
        return any(name.startswith("cuda") for name in sample.expected.requires)

    def worth(sample: Sample) -> tuple[bool, bool, str]:
        return not on_a_gpu(sample), not sample.control, sample.name

    scores: list[Score] = []
    skipped: list[tuple[str, str]] = []
    slowest = {False: RECORD_S, True: RECORD_S + GAIN_S}
    for sample in sorted(find_samples(SAMPLES), key=worth):
        claim = f"{sample.name}: {sample.expected.title}"
        reason = lacking(sample.expected.requires)
        if reason is not None:
            job.not_run(claim, reason)
            skipped.append((sample.name, reason))
            continue
        twin = job.on_gpu and on_a_gpu(sample) and job.left_s > slowest[True]
        if not job.has_time(claim, slowest[False]):
            skipped.append((sample.name, "no time was left"))
            continue
        begun = time.monotonic()
        try:
            row = score(sample, Options(runs=1, pairs=1, gain=twin, record=job.out / "recorded"), lambda text: print(text, flush=True))
        except (GpudiagError, OSError) as error:
            job.error(claim, error)
            continue
        slowest[twin] = max(slowest[twin] / 2, time.monotonic() - begun)
        scores.append(row)
        keep(job, claim, row)
    if scores:
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        told = f"{today}, torch {torch.__version__}; each sample recorded once, gains over one pair of processes."
        (job.out / "SCORE.md").write_text(with_section("", device_name(), section(device_name(), told, scores, skipped)), encoding="utf-8")
        found = totals(scores)
        job.add(
            "first findings right, no false alarm",
            "all, and none",
            found.lines()[-1],
            found.right == found.scored and not found.false_alarms,
        )


def keep(job: Job, claim: str, row: object) -> None:
    """Keep the score of one sample as a row."""
    from suite.table import Row as Score
    from suite.table import cells

    assert isinstance(row, Score)
    if row.failed:
        return job.error(claim, RuntimeError(row.failed))
    _, first, alarms, ceiling, gain, promise, seconds = cells(row)
    measured = f"first {first}; false alarms {alarms}; ceiling {ceiling}; gain {gain}; ceiling/gain {promise}"
    return job.add(claim, f"first {row.wanted or 'nothing'}; no false alarm", measured, row.fine, f"{seconds} s. {row.note}".strip())

"""The claims about GPUs of samples/figures, one row each; what compiles most comes last."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import torch

from validation.rows import Job, Row, Verdict

FOLDER = Path(__file__).resolve().parents[2] / "figures"

LAST = ("G-13", "G-22")
"""They compile several models, G-22 with autotuning."""

SECONDS = 0.25
"""For one measurement; a claim has two to ten of them."""

NEEDS_S = 3.0

VERDICTS: dict[str, Verdict] = {"holds": "holds", "DOES NOT HOLD": "DOES NOT HOLD", "told": "told", "not run": "not run", "ERROR": "ERROR"}


def run(job: Job) -> None:
    """Check the claims as samples/figures/run.py does."""
    sys.path.insert(0, str(FOLDER))  # before samples/gpu, which has a `training` too
    figures = importlib.import_module("run")
    bench = figures.Bench(torch, job.device, figures.peaks_of(torch, job.device), SECONDS)
    for number in sorted(figures.CLAIMS, key=lambda number: (number in LAST, figures.order(number))):
        if not job.has_time(f"{number} {figures.CLAIMS[number][0]}", NEEDS_S):
            continue
        name, says, expected, measured, verdict = figures.check(number, bench)
        note = measured if verdict in ("not run", "ERROR") else ""
        job.keep(Row(job.part, f"{name} {says}", expected, "-" if note else measured, VERDICTS[verdict], note))
        gc.collect()
        if job.on_gpu:
            torch.cuda.empty_cache()

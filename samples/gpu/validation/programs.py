"""Compiled and graph-captured trainings on the device: what is modelled, the error of the replay; and idle time by planted causes."""

from __future__ import annotations

import importlib
import time

import gpudiag
from validation.rows import Job
from validation.tests import tests

NAMES = ("transformer_compiled", "transformer_cudagraphs", "transformer_bf16")

MODELLED, REPLAY_ERROR = 0.95, 0.10
"""At least so much of the attributable kernel time, and at most such an error of the replay with nothing changed."""

NEEDS_S = 40.0
"""Compiling, recording and reading one of them."""


def run(job: Job) -> None:
    """Record each sample and judge its report, then run the tests of planted causes."""
    for name in NAMES if job.on_gpu else NAMES[2:]:
        if not job.has_time(f"{name} is modelled", NEEDS_S if job.on_gpu else 5.0):
            continue
        try:
            recorded(job, name)
        except Exception as error:  # noqa: BLE001 - one that fails must not cost the others
            job.error(f"{name} is modelled", error)
    if job.on_gpu:
        tests(job, ["test_planted_gpu.py"])
    else:
        job.not_run("idle causes at their lines, planted", "tests/gpu/test_planted_gpu.py needs a GPU")


def recorded(job: Job, name: str) -> None:
    """Record one sample of samples/gpu/record.py and keep what its report says; the bundle stays below bundles/."""
    record = importlib.import_module("record")
    begun = time.monotonic()
    bundle = record.record(name, job.out / "bundles", job.device, tiny=not job.on_gpu)
    data = gpudiag.diagnose(str(bundle)).data
    trust, seconds = data.trust, f"{time.monotonic() - begun:.0f} s"
    record.free(job.device)
    share(job, f"{name}: kernel time modelled", trust.modelled_share, MODELLED, seconds)
    parts = ("of all", trust.modelled_share_of_all), ("linked", trust.linked_share), ("mapped replays", trust.mapped_replay_share)
    told = ", ".join(f"{name} {shown(value)}" for name, value in (*parts, ("unmapped replays", trust.replay_share)))
    job.add(f"{name}: other shares of kernel time", "-", told, None)
    error = data.replay and data.replay.error_share
    if error is None:
        job.not_run(f"{name}: replay error", next((text for text in trust.warnings if "replay" in text), "the report holds no replay"))
    else:
        job.add(
            f"{name}: replay error",
            f"at most {REPLAY_ERROR:.0%}",
            f"{error:.1%}",
            error <= REPLAY_ERROR,
            data.replay.note if data.replay else "",
        )
    job.add(f"{name}: MFU", "-", shown(data.mfu and data.mfu.share), None)
    for row in data.ops:
        if row.over_roof is not None and row.over_roof_cause == "unexplained":
            job.add(f"{name}: {row.name} is not above its roof", "at most 103%", f"{row.over_roof:.0%}", False, row.signature or "")


def share(job: Job, claim: str, found: float | None, least: float, note: str) -> None:
    """Keep a share that has to be `least` at least."""
    if found is None:
        return job.not_run(claim, "nothing was attributable")
    return job.add(claim, f"{least:.0%} or more", f"{found:.1%}", found >= least, note)


def shown(value: float | None) -> str:
    """Return a share in percent; '-' where it is not known."""
    return "-" if value is None else f"{value:.1%}"

"""Recording on the device: what it costs a step, telemetry and energy against NVML itself, steps without a synchronisation."""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gpudiag
from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.capture.environment import identify_cuda_device
from gpudiag.experiment import gpu_state
from validation.rows import Job

BENCHMARKS = Path(__file__).resolve().parents[3] / "tests" / "benchmarks"

SECONDS = 8.0
"""Of training with telemetry: a counter that the driver renews every 0.1 s is then off by 1 to 2 %."""

SETTLED = 40
"""Steps until the windows of the profiler are over (5 plain, 2 + 6 timing, 1 export, 1 + 2 + 1 with stacks)."""

ENERGY = 0.10
"""How far two ways to the energy of a step may be apart: the report reads the counter at its samples and interpolates."""

ON_A_GPU = (
    "sm_clock_mhz",
    "mem_clock_mhz",
    "gpu_util_pct",
    "mem_used_bytes",
    "power_w",
    "energy_mj",
    "temperature_c",
    "clock_event_reasons",
)


def run(job: Job) -> None:
    """Record one training with telemetry, then measure the overhead with the time that is left."""
    telemetry(job)
    overhead(job)


# -- telemetry ------------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A training of some seconds, and what NVML said meanwhile."""

    bundle: OpenedBundle
    path: Path
    joule_per_step: float | None
    """Between two readings of the counter, both with nothing left to do on the device; null: no counter."""


def telemetry(job: Job) -> None:
    """Keep the rows about telemetry, energy and steps."""
    found = recorded(job)
    manifest = found.bundle.manifest
    rows, info = found.bundle.telemetry, manifest.telemetry
    spacing_s = statistics.median(b - a for a, b in itertools.pairwise(rows["t_ns"].to_list())) / 1e9 if rows.height > 2 else float("inf")
    job.add("telemetry 20 times a second", "0.050 s between samples, 0.065 s at most", f"{spacing_s:.3f} s", spacing_s <= 0.065)
    for column in ON_A_GPU:
        known = rows.height - rows[column].null_count()
        if not job.on_gpu:
            job.not_run(f"telemetry: {column}", "needs a GPU")
        elif known:
            low, high = rows[column].min(), rows[column].max()
            job.add(f"telemetry: {column}", "samples", f"{low:g} to {high:g}, {known} of {rows.height} samples", True)  # type: ignore[str-bytes-safe]
        else:
            why = info.missing.get(column, "no reason is given") if info else "nothing was sampled"
            job.add(f"telemetry: {column}", "samples", f"none: {why}", False)
    energy(job, found)
    clocks = found.bundle.step_records["phase_clock"].unique().to_list()
    if job.on_gpu:
        clock = "device" if "device" in clocks else "host"
        job.add("phases of steps by CUDA events", "device", clock, clock == "device", f"clocks of the steps: {clocks}")
        said = "; ".join(found.bundle.warnings) or "none"
        job.add("nothing of the recording synchronises", "no warning with set_sync_debug_mode('error')", said, not found.bundle.warnings)


def energy(job: Job, found: Recorded) -> None:
    """Keep the energy of a step by the report against that of the counter."""
    claim = "energy of a step against NVML's counter"
    report = gpudiag.diagnose(str(found.path)).data.energy
    mine = report and report.joule_per_step
    if mine is None or found.joule_per_step is None:
        return job.not_run(claim, (report and report.reason) or "this device tells no energy")
    apart = abs(mine / found.joule_per_step - 1)
    expected, by = f"{found.joule_per_step:.4g} J, within {ENERGY:.0%}", report.provenance if report else ""
    return job.add(
        claim, expected, f"{mine:.4g} J ({apart:.1%} apart)", apart <= ENERGY, f"by {by}, over {report.steps if report else 0} steps"
    )


def recorded(job: Job) -> Recorded:
    """Return a training of the large model of bench_capture that ran for SECONDS after the windows of the profiler."""
    sys.path.insert(0, str(BENCHMARKS))
    bench: Any = importlib.import_module("bench_capture")
    training = bench.Training(*bench.TRAININGS["wide" if job.on_gpu else "small"], job.device)
    training.batch = training.batch.to(job.device)
    training.step(training.batch)
    seconds = SECONDS if job.on_gpu else 2.0
    settled, ended = (0, 0.0, None), (0, 0.0, None)
    with gpudiag.profile(job.out / "bundles" / "capture") as prof:
        for step in prof.steps(itertools.count()):
            training.step(training.batch)
            if step == 0 and job.on_gpu:
                torch.cuda.set_sync_debug_mode("error")
            if step == SETTLED:
                if job.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
                settled = read_counter(job, step)
            if step > SETTLED and time.monotonic() - settled[1] >= seconds:
                ended = read_counter(job, step)
                break
    known = settled[2] is not None and ended[2] is not None
    path = Path(prof.path)
    return Recorded(open_bundle(path), path, (ended[2] - settled[2]) / (ended[0] - settled[0]) if known else None)  # type: ignore[operator]


def read_counter(job: Job, step: int) -> tuple[int, float, float | None]:
    """Return the step, the moment, and the energy counter in joule, once the device has nothing left to do."""
    identity = None
    if job.on_gpu:
        torch.cuda.synchronize()
        identity = identify_cuda_device()
    nvml = gpu_state.open_nvml() if identity is not None else None
    if nvml is None or identity is None:
        return step, time.monotonic(), None
    handle = nvml.handle(identity)
    return step, time.monotonic(), None if handle is None else nvml.energy_j(handle)


# -- overhead -------------------------------------------------------------------------------------------------------------


def overhead(job: Job) -> None:
    """Keep what recording costs a step: as many processes of bench_capture as fit into the time, three at most."""
    bench: Any = importlib.import_module("bench_capture")
    cost = child(job, "the cost outside the window", "empty", 25.0)
    if cost is not None:
        limit = bench.OUTSIDE_LIMIT_S
        measured = f"{cost['added_s'] * 1e6:.1f} us"
        job.add("CPU time added to a step outside the window", f"at most {limit * 1e6:.0f} us", measured, cost["added_s"] <= limit)
        share, limit = cost["threads_share"], bench.THREADS_LIMIT
        job.add("threads beside the training, share of a core", f"at most {limit:.0%}", f"{share:.2%}", share <= limit)
    sizes = ("small", "wide") if job.on_gpu else ("small",)
    for place, size in enumerate(sizes):
        claim = f"recording a {size} model"
        runs, until_s, longest = [], job.left_s * (1 - 1 / (len(sizes) - place)), 12.0
        while len(runs) < 3 and job.left_s - until_s > longest:
            begun = time.monotonic()
            found = child(job, claim, size, longest)
            if found is None:
                break
            runs.append(found)
            longest = time.monotonic() - begun
        ratios(job, bench, claim, runs)


def ratios(job: Job, bench: Any, claim: str, runs: list[dict[str, list[float]]]) -> None:
    """Keep the ratios of one model; with fewer than two processes there is no interval, and nothing is claimed."""
    if len(runs) < 2:
        return job.not_run(claim, f"{len(runs)} processes fit into the time, two are needed for an interval")
    step_ms = statistics.median(time_ns for run in runs for time_ns in run["bare"]) / 1e6
    for arm, reference in (("outside", "bare"), ("inside", "bare"), ("inside", "torch.profiler")):
        middle, low, high = bench.ratio(runs, arm, reference)
        limit = bench.INSIDE_LIMIT if reference == "torch.profiler" else None
        expected = "-" if limit is None else f"at most x{limit:.2f}, unless the interval holds it"
        measured = f"x{middle:.3f} [{low:.3f}, {high:.3f}]"
        holds = None if limit is None else low <= limit
        job.add(f"{claim}: {arm} / {reference}", expected, measured, holds, f"bare step {step_ms:.2f} ms, {len(runs)} processes")
    return None


def child(job: Job, claim: str, what: str, need_s: float) -> Any:
    """Return what a process of bench_capture measured; None where it failed or had no time, which is kept."""
    if not job.has_time(claim, need_s):
        return None
    command = [sys.executable, str(BENCHMARKS / "bench_capture.py"), "--child", what, "--rounds", "3" if job.on_gpu else "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=job.left_s)  # noqa: S603
    except subprocess.TimeoutExpired:
        job.not_run(claim, "no time was left for another process")
        return None
    if done.returncode:
        job.error(claim, RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1]))
        return None
    return json.loads(done.stdout.splitlines()[-1])

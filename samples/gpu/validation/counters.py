"""Bounds and bytes that gpudiag predicts for some thirty ops, judged by hardware counters; without these by times with a cold cache."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import polars as pl
import torch

import gpudiag
from gpudiag.analysis import analyse
from gpudiag.inputs import resolve_input
from gpudiag.units import format_bytes, format_ns
from validation import ncu
from validation.ops import MARK, OPS, Call, Sizes
from validation.rows import Job

BYTES, CLASS = 0.15, 0.90
"""DRAM bytes within this of the predicted ones; the class right for so many of the ops."""

NEITHER = 0.30
"""Below this share of both peaks neither binds: what gpudiag calls overhead."""

APART = 1.4
"""Where FLOP and bytes of a larger op grow by factors that differ less than this, its time does not tell which it follows."""

ROOF = (0.5, 1.1)
"""An op whose roof takes this part of its measured time is bound by that roof."""

REPEATS = 7
FLUSH_BYTES = 1 << 28
"""Written before each timed call: more than any last-level cache of a GPU."""

PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r}); from validation.counters import under_ncu"


class Predicted(msgspec.Struct, frozen=True):
    """What gpudiag says of one call of an op."""

    bound: str
    bytes: float
    flops: float
    t_roof_ns: float
    busy_ns: float
    provenance: str


def run(job: Job) -> None:
    """Predict, count or time, judge."""
    gpudiag.api.calibrate(job.device) if not job.on_gpu else None
    size = Sizes(job.device, job.on_gpu)
    predicted = recorded(job, size, "counters")
    missing = [name for name in OPS if name not in predicted]
    for name in missing:
        job.not_run(name, "it could not be run, or no kernel of it was recorded")
    counted, why = count(job) if job.on_gpu else ({}, "needs a GPU")
    if counted:
        by_counters(job, predicted, counted)
    else:
        job.not_run("DRAM bytes by hardware counters", why)
        by_time(job, size, predicted)


# -- prediction -----------------------------------------------------------------------------------------------------------


def made(size: Sizes, names: Iterable[str] = OPS) -> Iterator[tuple[str, Call]]:
    """Yield each op, called once; one that this device cannot make or run is left out, and said in the log."""
    for name in names:
        try:
            call = OPS[name](size)
            call()
        except Exception as error:  # noqa: BLE001 - out of memory, or no such kernel here
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        yield name, call


@torch.no_grad()
def recorded(job: Job, size: Sizes, name: str) -> dict[str, Predicted]:
    """Return what gpudiag says of each op, from one recording of all of them; it stays below bundles/."""
    ops = dict(made(size))
    with gpudiag.profile(job.out / "bundles" / name, skip=1, warm=1, record=3, sites=0) as prof:
        for _ in prof.steps(range(7)):
            for op, call in ops.items():
                with torch.profiler.record_function(MARK + op):
                    call()
    return predictions(Path(prof.path))


def predictions(path: Path) -> dict[str, Predicted]:
    """Return the prediction for one call of each op of a recorded bundle."""
    analysis = analyse(resolve_input(str(path), None), lambda _: None)
    trace = analysis.trace
    marks = trace.marks.filter(pl.col("name").cast(pl.String).str.starts_with(MARK)).select(
        pl.col("name").cast(pl.String).str.strip_prefix(MARK).alias("of"), mark_start="start_ns", mark_end="end_ns"
    )
    started = trace.launches.select(launch="id", called_ns="start_ns")
    kernels = trace.kernels.join(started, on="launch", how="left").with_columns(pl.coalesce("called_ns", "start_ns").alias("called_ns"))
    inside = kernels.sort("called_ns").join_asof(marks.sort("mark_start"), left_on="called_ns", right_on="mark_start")
    inside = inside.filter((pl.col("called_ns") < pl.col("mark_end")) & (pl.col("busy_ns") > 0))
    calls = dict(marks.group_by("of").len().iter_rows())
    groups = {str(name[0]): rows for name, rows in inside.group_by("of")}
    return {name: _predicted(groups[name], calls[name]) for name in OPS if name in groups}


def _predicted(rows: pl.DataFrame, calls: int) -> Predicted:
    def most(column: str) -> str:
        return str(rows.group_by(column).agg(pl.col("busy_ns").sum()).sort("busy_ns")[column][-1])

    sums = [float(rows[column].sum() or 0) / calls for column in ("bytes_moved", "flops", "t_roof_ns", "busy_ns")]
    return Predicted(most("bound"), *sums, most("provenance"))


# -- by counters ----------------------------------------------------------------------------------------------------------


def count(job: Job) -> tuple[dict[str, ncu.Counted], str]:
    """Return what ncu counted of each op, or why it could not."""
    found = ncu.find()
    if found is None:
        return {}, "Nsight Compute (ncu) is not installed"
    limit_s = max(job.left_s - 15, 5)
    command = ncu.command(found, [sys.executable, "-c", f"{PROGRAM}; under_ncu({limit_s:.0f})"])
    log = job.out / "ncu.csv"
    with open(log, "w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=limit_s + 10).returncode  # noqa: S603
        except subprocess.TimeoutExpired:
            code = 124
    output = log.read_text(encoding="utf-8", errors="replace")
    counted = ncu.counted(output)
    return counted, ncu.why_not(output) or f"ncu ended with exit code {code}; what it printed is in ncu.csv"


@torch.no_grad()
def under_ncu(limit_s: float) -> None:
    """Run each op once inside of an NVTX range of its name, counted; what was made for it is freed before the next.

    It ends by itself after `limit_s`: ncu prints what it counted only then.
    """
    deadline = time.monotonic() + limit_s
    for name in OPS:
        if time.monotonic() > deadline:
            break
        for _, call in made(Sizes("cuda", large=True), [name]):
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_push(MARK + name)
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            torch.cuda.nvtx.range_pop()
        call = None  # what it holds goes back before the next is made
        torch.cuda.empty_cache()


def by_counters(job: Job, predicted: dict[str, Predicted], counted: dict[str, ncu.Counted]) -> None:
    """Keep bytes and class of each op, and how many are right."""
    near: list[tuple[str, bool]] = []
    right: list[bool] = []
    for name, said in predicted.items():
        if name not in counted:
            job.not_run(name, "ncu did not count it, or had no time for it")
            continue
        found = counted[name]
        ratio = found.dram_bytes / said.bytes if said.bytes else math.inf
        within = abs(ratio - 1) <= BYTES
        near.append((said.bound, within))
        told = f"{format_bytes(found.dram_bytes)} (x{ratio:.2f}), {found.kernels} kernels"
        expected = f"{format_bytes(said.bytes)}, within {BYTES:.0%}"
        job.add(f"{name}: DRAM bytes", expected, told, within, "" if within else miss(said, found, ratio))
        right.append(bound_by(found) == said.bound)
        shares = f"{bound_by(found)}: SMs {found.sm_share:.0%}, DRAM {found.dram_share:.0%} of their peaks"
        note = f"{format_ns(found.time_ns)} under ncu, roof {format_ns(said.t_roof_ns)}, cost {said.provenance}"
        job.add(f"{name}: bound", said.bound, shares, right[-1], note)
    memory = [within for bound, within in near if bound == "memory"]
    told = f"{sum(memory)} of {len(memory)}; of all {sum(within for _, within in near)} of {len(near)}"
    job.add(f"judged by ncu: DRAM bytes within {BYTES:.0%}", "every op that is bound by memory", told, all(memory) if memory else None)
    _share_right(job, "judged by ncu: class right", right)


def bound_by(found: ncu.Counted) -> str:
    """Return the class that the counters show: the busier of SMs and DRAM, or neither."""
    if max(found.sm_share, found.dram_share) < NEITHER:
        return "overhead"
    return "memory" if found.dram_share >= found.sm_share else "compute"


def miss(said: Predicted, found: ncu.Counted, ratio: float) -> str:
    """Return the likely reason why the counted bytes are others than the predicted ones."""
    if ratio < 1:
        return (
            "fewer: the last of what was written was still in the L2 cache when the kernel ended, or rows that were asked for twice hit it"
        )
    if said.bound == "compute":
        return "more, likely: tiles that no longer fit the L2 cache are read again; bytes do not bind this op"
    several = "intermediate results of several kernels" if found.kernels > 1 else "lines that are read again or only in part"
    return f"more, likely: {several}; the roof counts each input and output once"


# -- by time --------------------------------------------------------------------------------------------------------------


def by_time(job: Job, size: Sizes, predicted: dict[str, Predicted]) -> None:
    """Keep the class of each op by how its time grows with its size, or by how near its roof it runs; on a CPU the sizes only rehearse."""
    grown = size._replace(grown=2)
    larger = recorded(job, grown, "counters-grown")
    right = []
    for name, said in predicted.items():
        if name not in larger or not job.has_time(name, 1.0):
            continue
        times = [cold_ns(make_size, name) for make_size in (size, grown)]
        if any(value is None for value in times):
            job.not_run(name, "it could not be timed")
            continue
        first, second = (value or 0.0 for value in times)
        found, by = followed(said, larger[name], second / first, first)
        holds = None if found is None or not job.on_gpu else found == said.bound
        right += [] if holds is None else [holds]
        told = f"{format_ns(first)}, twice as large x{second / first:.2f}; roof {format_ns(said.t_roof_ns)}"
        job.add(f"{name}: bound", said.bound, f"{found or 'not told'}: {told}", holds, by)
    _share_right(job, "judged by times with a cold cache, not by counters: class right", right)


def followed(said: Predicted, larger: Predicted, growth: float, time_ns: float) -> tuple[str | None, str]:
    """Return the class that the times show (None: they do not tell), and what told it."""
    if min(said.flops, said.bytes, larger.flops, larger.bytes, growth) > 0:
        flops, moved = larger.flops / said.flops, larger.bytes / said.bytes
        if abs(math.log(flops / moved)) >= math.log(APART):
            compute = abs(math.log(growth / flops)) < abs(math.log(growth / moved))
            return "compute" if compute else "memory", f"its FLOP grow x{flops:.2f}, its bytes x{moved:.2f}"
    if ROOF[0] <= said.t_roof_ns / time_ns <= ROOF[1]:
        return said.bound, f"FLOP and bytes grow alike; it runs at {said.t_roof_ns / time_ns:.0%} of that roof"
    return None, f"FLOP and bytes grow alike, and it runs at {said.t_roof_ns / time_ns:.0%} of its roof: neither is shown to bind it"


@torch.no_grad()
def cold_ns(size: Sizes, name: str) -> float | None:
    """Return the median time of one call with a cold cache, in ns; None where the op does not run here."""
    flush = torch.empty(FLUSH_BYTES if size.large else 1 << 24, dtype=torch.uint8, device=size.device)
    times = []
    for _, call in made(size, [name]):
        for _ in range(REPEATS):
            flush.fill_(1)
            times.append(_event_ns(call) if size.device == "cuda" else _host_ns(call))
    return statistics.median(times) if times else None


def _host_ns(call: Call) -> float:
    begun = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - begun)


def _event_ns(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond: the host has issued all of the op before the device begins with it
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6


def _share_right(job: Job, claim: str, right: list[bool]) -> None:
    if not right:
        return job.not_run(claim, "no op was judged")
    return job.add(claim, f"{CLASS:.0%} or more", f"{sum(right)} of {len(right)}", sum(right) >= CLASS * len(right))

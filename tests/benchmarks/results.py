"""RESULTS.md: what was measured, on which machine, and which targets it meets."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Literal, NamedTuple

from measuring import Run
from peers import BASELINE_PER_FLOOR, HTA, LENS

HERE = Path(__file__).parent

OPS_HEADING, FUSING_HEADING = "## Measured times of single ops", "## What fusing gave against its upper bound"
DEVICES_HEADING = "## Projection from one device to another"
CPU_HEADING = "## Promises on a CPU against measured pairs"

FLOOR, READ, REPORT, AGAIN = "floor", "trace.read", "gpudiag report", "second open"
LARGE_MB = 900
"""From this size on a trace is one of a gigabyte, of which the targets speak."""

MOST_FLOOR, STRETCH_FLOOR, MOST_SIZE, MOST_AGAIN_S, MOST_HELP_S, MOST_SMALL_S = 2.5, 1.5, 0.5, 1.0, 0.3, 1.5
LEAST_TIMES = {HTA: 20.0, LENS: 12.0}
MOST_PEER_MEMORY = 0.1
LINEAR = 1.1
"""Exponent of the time over the events: twice the events take 2.14 times as long at most."""


Clock = Literal["wall_s", "cpu_s"]


class Measured(NamedTuple):
    """One trace and what was run on it; None: it failed."""

    name: str
    size_mb: float
    """Uncompressed, 10^6 bytes."""
    events: int
    runs: dict[str, Run | None]

    def ratio(self, what: str, of: str = FLOOR, clock: Clock = "wall_s") -> float | None:
        """Return the wall time of `what` over that of `of`; `clock`: cpu_s for processor time, which other work disturbs less."""
        first, second = self.runs.get(what), self.runs.get(of)
        return None if first is None or second is None else float(getattr(first, clock) / getattr(second, clock))


class Target(NamedTuple):
    """One target and what was measured; `met` None: not measured, and `found` says why."""

    wanted: str
    found: str
    met: bool | None


def exponent(measured: Iterable[Measured], what: str = REPORT, clock: Clock = "wall_s") -> float | None:
    """Return the steepest slope of log(time) over log(events) between neighbouring sizes; None for fewer than two (1: linear).

    Not a fit over all: the start of the process, a constant, would flatten it.
    """
    found = sorted((one.events, getattr(run, clock)) for one in measured if (run := one.runs.get(what)) is not None and one.events)
    pairs = [(first, second) for first, second in pairwise(found) if first[0] < second[0]]
    return max((log(second[1] / first[1]) / log(second[0] / first[0]) for first, second in pairs), default=None)


def targets(grown: Sequence[Measured], small: Measured | None, help_run: Run | None, missing: dict[str, str]) -> list[Target]:
    """Return the targets with what was found. `grown`: by size; `small`: a trace of about 10 MB; `missing`: peers that are not there."""
    large = next((one for one in grown if one.size_mb >= LARGE_MB), None)
    found = [*_of_large(large), _linear(grown)]
    found += [_against(name, large, missing.get(name, "not asked for: --peers")) for name in LEAST_TIMES]
    found += [_memory_against(name, large) for name in LEAST_TIMES if large is not None and large.runs.get(name) is not None]
    again = None if large is None else large.runs.get(AGAIN)
    found.append(_at_most(f"second open of a 1 GB trace: at most {MOST_AGAIN_S} s", again and again.wall_s, MOST_AGAIN_S, "s"))
    first = None if small is None else small.runs.get(REPORT)
    found.append(_at_most(f"report on a 10 MB trace: at most {MOST_SMALL_S} s", first and first.wall_s, MOST_SMALL_S, "s"))
    found.append(_at_most(f"gpudiag --help: at most {MOST_HELP_S} s", help_run and help_run.wall_s, MOST_HELP_S, "s"))
    return found


def _of_large(large: Measured | None) -> list[Target]:
    ratio = None if large is None else large.ratio(REPORT)
    run = None if large is None else large.runs.get(REPORT)
    share = None if run is None or large is None else run.peak_mb / large.size_mb
    cpu = None if large is None else large.ratio(REPORT, clock="cpu_s")
    return [
        _at_most(f"report on a 1 GB trace: at most {MOST_FLOOR} x the floor", ratio, MOST_FLOOR, "x", cpu),
        _at_most(f"stretch: at most {STRETCH_FLOOR} x the floor", ratio, STRETCH_FLOOR, "x", cpu),
        _at_most(f"memory: at most {MOST_SIZE} x the uncompressed size", share, MOST_SIZE, "x"),
    ]


def _linear(grown: Sequence[Measured]) -> Target:
    sizes = ", ".join(f"{one.size_mb:,.0f}" for one in grown)
    cpu = exponent(grown, clock="cpu_s")
    return _at_most(f"linear in events: exponent at most {LINEAR} between neighbours of {sizes} MB", exponent(grown), LINEAR, "", cpu)


def _at_most(wanted: str, value: float | None, most: float, unit: str, cpu: float | None = None) -> Target:
    if value is None:
        return Target(wanted, "not measured", None)
    also = "" if cpu is None else f" (by processor time {cpu:.2f})"
    return Target(wanted, f"{value:.2f} {unit}".rstrip() + also, value <= most)


def _against(name: str, large: Measured | None, why: str) -> Target:
    """Return how many times as fast as a peer; by its baseline over the floor, and said so, where the peer was not run."""
    least = LEAST_TIMES[name]
    wanted = f"1 GB trace: at least {least:.0f} x faster than {name}"
    times = None if large is None else large.ratio(name, REPORT)
    if times is not None:
        return Target(wanted, f"{times:.0f} x", times >= least)
    ours = None if large is None else large.ratio(REPORT)
    if ours is None:
        return Target(wanted, "not measured", None)
    times = BASELINE_PER_FLOOR[name] / ours
    return Target(wanted, f"{times:.0f} x, by its baseline of {BASELINE_PER_FLOOR[name]:.0f} x the floor ({why})", times >= least)


def _memory_against(name: str, large: Measured | None) -> Target:
    ours, theirs = (None if large is None else large.runs.get(what) for what in (REPORT, name))
    share = None if ours is None or theirs is None else ours.peak_mb / theirs.peak_mb
    return _at_most(f"1 GB trace: at most {MOST_PEER_MEMORY} of the memory of {name}", share, MOST_PEER_MEMORY, "")


# -- the page -------------------------------------------------------------------------------------------------------------------


def page(
    measured: Sequence[Measured], reached: Sequence[Target], notes: Sequence[str], ranks: Sequence[str], *, repeat: int, when: str = ""
) -> str:
    """Return RESULTS.md."""
    day = when or datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    lines = ["# What reading and reporting cost", "", f"Written by `make bench` on {day}. {machine()}", ""]
    lines += [
        f"Every figure is one fresh process, start included; the least disturbed of {repeat} runs{'' if repeat > 1 else ' (one only)'}, "
        "peers once. CPU: user and system seconds. Peak: resident memory, of all processes of a command together. Load: average over the "
        "minute before. The floor reads typed columns only and explains nothing (floor.py).",
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(f"| {one.wanted} | {one.found} | {'' if one.met is None else 'met' if one.met else '**missed**'} |" for one in reached),
        "",
        "| trace | MB | events | what | wall s | CPU s | x floor | CPU x floor | peak MB | x size | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row for one in measured for row in rows(one)),
        "",
    ]
    lines += [*notes, ""] if notes else []
    return "\n".join([*lines, *ranks]).rstrip() + "\n"


def split_section(text: str, heading: str) -> tuple[str, str, str]:
    """Split the page `text` into what stands before its section `heading` (a line '## ...'), the section, and what follows it."""
    before, found, rest = text.partition(f"\n{heading}\n")
    section, marker, after = rest.partition("\n## ") if found else ("", "", "")
    return before.strip(), f"{heading}\n{section}".strip() if found else "", f"## {after}".strip() if marker else ""


def replace_section(text: str, heading: str, section: str) -> str:
    """Return the page `text` with `section`, which begins with `heading`, in place of the one there is, else at its end; '': without it."""
    before, _, after = split_section(text, heading)
    return "\n\n".join(part for part in (before, section.strip(), after) if part) + "\n"


def keep_sections(text: str, old: str) -> str:
    """Return the new page `text` with the sections that other benchmarks wrote into the `old` one."""
    for heading in (OPS_HEADING, FUSING_HEADING, DEVICES_HEADING, CPU_HEADING):
        text = replace_section(text, heading, split_section(old, heading)[1])
    return text


def rows(one: Measured) -> list[str]:
    """Return the lines of the table for one trace."""
    out = []
    for place, (what, run) in enumerate(one.runs.items()):
        head = f"| {one.name} | {one.size_mb:,.0f} | {one.events:,}" if place == 0 else "| | |"
        if run is None:
            out.append(f"{head} | {what} | failed | | | | | | |")
            continue
        ratios = ["" if found is None else f"{found:.2f}" for found in (one.ratio(what), one.ratio(what, clock="cpu_s"))]
        cells = [
            f"{run.wall_s:.2f}",
            f"{run.cpu_s:.2f}",
            *ratios,
            f"{run.peak_mb:,.0f}",
            f"{run.peak_mb / one.size_mb:.2f}" if one.size_mb else "",
        ]
        out.append(f"{head} | {what} | {' | '.join([*cells, f'{run.load:.1f}'])} |")
    return out


def machine() -> str:
    """Return the machine in a sentence: processor, cores, memory, versions; no name of a host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("polars", "msgspec", "isal", "numpy"))
    return f"{_processor()}, {cores} cores, {memory_gb:.0f} GB; {platform.system()}, Python {platform.python_version()}, {packages}."


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

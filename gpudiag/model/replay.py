"""What the replay of the dependency graph says: how well it reproduces the run, and what a change would give."""

from __future__ import annotations

import msgspec


class ReplayedStep(msgspec.Struct, frozen=True):
    """One representative step, replayed with nothing changed."""

    name: str
    role: str
    """fastest | median | slowest (joined with ', ' where one step is several); run: consecutive steps, all times are theirs together."""
    measured_ns: int
    replayed_ns: int
    free_ns: int
    """Part of the replayed step's longest path that lies in free delay parameters: measured waits that no dependency explains."""
    marks_ns: int | None = None
    """Time between the step's marks, as recorded."""
    steady_ns: int | None = None
    """Time of the step with nothing changed in a run that repeats it: what what-ifs are measured against."""
    backlog_begin_ns: int | None = None
    """How long the device still worked on earlier steps after the first mark."""
    backlog_end_ns: int | None = None
    """How long the device still worked on this step, or on earlier ones, after the last mark."""


class ReplayTrust(msgspec.Struct, frozen=True):
    """How far the replay can be trusted. Shares 0..1."""

    steps: tuple[ReplayedStep, ...]
    error_share: float
    """How far what-ifs may be off: the largest |replayed - measured| / measured over `steps` and `run`, or steady_error_share if larger."""
    free_share: float
    """Largest free_ns / measured_ns over `steps`."""
    steady_error_share: float | None = None
    """Error of steady_ns, which what-ifs are measured against, to the nearer of two measured times: marks_ns, the pace of the host, and
    marks_ns + backlog_end_ns - backlog_begin_ns, the pace of the device. Of `run`; where it is None the largest over `steps`."""
    drift_share: float | None = None
    """|steady_ns - marks_ns| / marks_ns of the same: how far the steps of a run that goes on are from the recorded ones."""
    note: str = ""
    """Why they differ, in words; '' where they do not by more than 5 %."""
    run: ReplayedStep | None = None
    """The steps in the order in which they ran that what-ifs are measured by; None: `steps`, each repeated."""


class WhatIf(msgspec.Struct, frozen=True):
    """The step with one cost changed, replayed."""

    name: str
    """Name and value as `gpudiag whatif --set NAME=VALUE` takes them."""
    words: str
    """What was assumed, in words."""
    step_ns: float
    """Time of a step with nothing changed, in a run that repeats the analysed steps in their order. Where these are too many: mean over the
    representative steps, each in a run that repeats it; each counts for the analysed steps whose length is nearest to its own."""
    changed_ns: float
    """The same with the change."""
    share: float
    """1 - changed / unchanged, 0..1 (below 0: slower). Of the time per sample where the batch was changed."""
    per_step_ns: tuple[tuple[str, float, float], ...] = ()
    """(step, unchanged, changed) of each representative step, in a run that repeats it; () in a list of standard what-ifs."""
    notes: tuple[str, ...] = ()


class QueueStats(msgspec.Struct, frozen=True):
    """How far the host runs ahead of the device in the analysed steps. Null where launches were not recorded."""

    launches_per_step: float
    kernels_per_step: float
    delay_median_ns: int
    """Start of the work minus end of the call that started it (0 at least)."""
    delay_p10_ns: int
    delay_p90_ns: int
    depth_median: float
    """Kernels issued and not yet over, by time."""
    depth_max: int
    empty_share: float
    """Share of the analysed time with nothing issued and unfinished."""
    host_bound_share: float
    """Share of the kernels (by count) that started within the normal launch latency: the device was waiting for them."""
    t_ns: tuple[int, ...] = ()
    """Moments of the depth curve (at most 512, from the start of the analysed steps)."""
    depth: tuple[float, ...] = ()
    """Mean depth from that moment to the next."""

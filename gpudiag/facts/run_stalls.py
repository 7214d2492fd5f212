"""Facts about garbage collections and file writes in all steps of a run (OVH-06): a checkpoint every 50 steps is seldom in a window."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.causes import idle_gc_ns, idle_io_ns
from gpudiag.facts.ceilings import without_stalls_ns
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.timeline.history import MIN_FOR_PACE, SETTLED_AFTER

ENOUGH_STEPS = 20
"""Fewer plain steps than this say less of the run than the window does (heuristic: rarer stalls than one in 20 need more anyway)."""

AFTER_EXPORT = 10
"""Steps after the recorder wrote a trace: the garbage that is collected in them is its own (seen: up to 8 steps later)."""

WORTH = 0.01
"""Share of the usual step from which a stall is one (heuristic)."""

TWICE = 2

SYNC = "os.fsync"
"""Name of the marks of that call (capture/seen.py)."""


def stalled_steps(window: Window) -> pl.DataFrame:
    """Return the plain steps of the run with gc_ns and io_ns: what collections, saves and file writes cost each of them.

    A collection costs its own time, on a GPU at most what the step takes beyond the median of those without a mark: the device may have had
    work. Writing a file costs that excess, on a CPU at least the time of torch.save; os.fsync its own time, on a GPU at most that excess.
    Raises NotKnownError where the records do not say.
    """
    records, marks = window.analysis.step_records, window.analysis.host_marks
    if records is None or marks is None:
        raise NotKnownError("a trace does not hold the steps outside it: record with gpudiag.profile")
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain")).select("step", "wall_ns")
    if plain.height < ENOUGH_STEPS:
        raise NotKnownError(f"fewer than {ENOUGH_STEPS} unprofiled steps: let the recording run on")
    exported = pl.concat(
        [records.filter(pl.col("window") == "export").select(step=pl.col("step") + later) for later in range(AFTER_EXPORT + 1)]
    )
    plain = plain.join(exported, on="step", how="anti")
    marked = plain.join(_by_step(marks), on="step", how="left").with_columns(pl.col("gc_ns", "save_ns", "sync_ns", "writes").fill_null(0))
    free = marked.filter((pl.col("gc_ns") + pl.col("save_ns") + pl.col("writes")) == 0)["wall_ns"]
    usual = free.median() if len(free) >= MIN_FOR_PACE else None
    if usual is None and (not window.on_cpu or marked.filter((pl.col("writes") > 0) & (pl.col("save_ns") == 0)).height):
        raise NotKnownError("nearly every step collects garbage or writes files, so what a step without takes is not known")
    # where every step saves, no more is known to come of it than the time of torch.save
    excess = pl.col("save_ns") if usual is None else (pl.col("wall_ns") - usual).clip(lower_bound=0)
    gc_ns = pl.min_horizontal("gc_ns", excess if not window.on_cpu else "wall_ns")
    untimed = (pl.col("writes") > 0) & (pl.col("save_ns") == 0)
    written = pl.when(untimed | (pl.col("save_ns") > 0)).then(excess).otherwise(0)
    if window.on_cpu:
        saved_ns = pl.max_horizontal("save_ns", written, "sync_ns")
    else:
        saved_ns = pl.max_horizontal(written, pl.min_horizontal("sync_ns", excess))
    io_ns = pl.min_horizontal(saved_ns, (pl.col("wall_ns") - gc_ns).clip(lower_bound=0))
    found = marked.with_columns(gc_ns=gc_ns.cast(pl.Float64), io_ns=io_ns.cast(pl.Float64))
    return _recurring(_recurring(found, "gc_ns"), "io_ns")


def _recurring(steps: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return `steps` with `column` 0 where it holds 1 % of the usual step in one step alone: what comes once does not come again."""
    least = WORTH * float(steps["wall_ns"].median() or 0)  # type: ignore[arg-type]
    return steps.with_columns(pl.lit(0.0).alias(column)) if (steps[column] >= least).sum() < TWICE else steps


def _by_step(marks: pl.DataFrame) -> pl.DataFrame:
    """Return for each step that has marks: gc_ns, save_ns, sync_ns and the number of files written."""
    kind, sync = pl.col("kind"), pl.col("name").eq_missing(SYNC)
    return marks.group_by("step").agg(
        gc_ns=pl.col("duration_ns").filter(kind == "gc").sum(),
        save_ns=pl.col("duration_ns").filter((kind == "save") & ~sync).sum(),
        sync_ns=pl.col("duration_ns").filter((kind == "save") & sync).sum(),
        writes=(kind == "file_write").sum(),
    )


def _share(window: Window, column: str, in_window: float) -> float:
    """Return the share of the plain steps' time in `column`; of the analysed steps, `in_window`, where the records do not say."""
    try:
        found = stalled_steps(window)
    except NotKnownError:
        return in_window
    return float(found[column].sum()) / max(1, int(found["wall_ns"].sum()))


@fact("gc_share", unit="share")
def gc_share(window: Window) -> float:
    """Time in which Python collected garbage over the time of all unprofiled steps; on a GPU only what a step takes beyond the usual one.

    Without records of the run: idle time of the analysed steps.
    """
    return _share(window, "gc_ns", float(idle_gc_ns(window)) / window.wall_ns)


@fact("io_share", unit="share")
def io_share(window: Window) -> float:
    """As gc_share, for torch.save and other writing of files (checkpoints, logs)."""
    return _share(window, "io_ns", float(idle_io_ns(window)) / window.wall_ns)


@fact("run_stall_share", unit="share")
def run_stall_share(window: Window) -> float:
    """gc_share and io_share together."""
    return min(1.0, float(gc_share(window)) + float(io_share(window)))


@fact("stalled_step_share", unit="share")
def stalled_step_share(window: Window) -> float:
    """Part of the unprofiled steps in which garbage was collected or a file written, at a cost of 1 % of the usual step or more."""
    found = stalled_steps(window)
    least = WORTH * float(found["wall_ns"].median() or 0)  # type: ignore[arg-type]
    return found.filter(pl.col("gc_ns") + pl.col("io_ns") > least).height / found.height


@fact("without_run_stalls_ns", unit="ns")
def without_run_stalls_ns(window: Window) -> float:
    """Time that as many steps as were analysed save without them, on average over the run; by the window (without_stalls_ns) where it alone
    is known."""
    try:
        stalled_steps(window)
    except NotKnownError:
        return float(without_stalls_ns(window))
    return float(run_stall_share(window)) * window.wall_ns

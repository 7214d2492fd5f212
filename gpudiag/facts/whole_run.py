"""Facts about all steps of a run, profiled or not: phases, drift, stalls, padding, price, and how the step grows with the batch."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.fields import field_fact
from gpudiag.facts.host_time import measure_share_of_plain
from gpudiag.facts.idle_time import measure_idle_ns, without_stalls_ns
from gpudiag.facts.registry import NotKnownError, fact, fact_of, known, require, require_known, with_share
from gpudiag.facts.window import Window
from gpudiag.model.experiment import ExperimentData
from gpudiag.timeline.history import MIN_FOR_DRIFT, MIN_FOR_PACE, SETTLED_AFTER, SLOW_FACTOR

_NO_DRIFT = f"fewer than {MIN_FOR_DRIFT} unprofiled steps: let the recording run on"
NO_RECORDS = "a trace does not hold the steps outside it: record with gpudiag.profile"

read_history = known(lambda window: window.history, NO_RECORDS)
padded_share = known(
    lambda window: read_history(window).padded_share,
    "few batches told their padding or none: a field attention_mask, padding_mask or lengths on the CPU does",
)
gpu_hour_price = known(
    lambda window: window.analysis.gpu_hour_price,
    "what an hour of the device costs is not known: give --gpu-hour-price, for example 2.00",
)
planned_steps = known(lambda window: window.analysis.planned_steps, "how many steps the run is to have is not known: give --planned-steps")


ENOUGH_STEPS = 20
"""Fewer plain steps than this say less of the run than the window does (heuristic: rarer stalls than one in 20 need more anyway)."""

AFTER_EXPORT = 10
"""Steps after the recorder wrote a trace: the garbage that is collected in them is its own (seen: up to 8 steps later)."""

LEAST_STALL_SHARE = 0.01
"""Share of the usual step from which a stall is one (heuristic)."""

SYNC = "os.fsync"
"""Name of the marks of that call (capture/host_marks.py)."""


def find_stalled_steps(window: Window) -> pl.DataFrame:
    """Return the plain steps of the run with gc_ns and io_ns: what collections, saves and file writes cost each of them.

    A collection costs its own time, on a GPU at most what the step takes beyond the median of those without a mark: the device may have had
    work. Writing a file costs that excess, at most what its bytes can have taken, on a CPU at least the time of torch.save; os.fsync costs
    its own time, on a GPU at most that excess.
    Raises NotKnownError where the records do not say.
    """
    records, marks = window.analysis.step_records, window.analysis.host_marks
    if records is None or marks is None:
        raise NotKnownError(NO_RECORDS)
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain")).select("step", "wall_ns")
    require(plain.height >= ENOUGH_STEPS, f"fewer than {ENOUGH_STEPS} unprofiled steps: let the recording run on")
    exports = records.filter(pl.col("window") == "export")
    after_export = pl.concat([exports.select(step=pl.col("step") + later) for later in range(AFTER_EXPORT + 1)])
    plain = plain.join(after_export, on="step", how="anti")
    # what was marked in each step
    kind, sync, duration = pl.col("kind"), pl.col("name").eq_missing(SYNC), pl.col("duration_ns")
    most = (pl.col("most_ns") if "most_ns" in marks.columns else pl.lit(None, dtype=pl.Int64)).filter(kind == "file_write")
    by_step = marks.group_by("step").agg(
        gc_ns=duration.filter(kind == "gc").sum(),
        save_ns=duration.filter((kind == "save") & ~sync).sum(),
        sync_ns=duration.filter((kind == "save") & sync).sum(),
        writes=(kind == "file_write").sum(),
        most_ns=pl.when(most.null_count() == 0).then(most.sum()),
    )
    marked = plain.join(by_step, on="step", how="left").with_columns(pl.col("gc_ns", "save_ns", "sync_ns", "writes").fill_null(0))
    free = marked.filter((pl.col("gc_ns") + pl.col("save_ns") + pl.col("writes")) == 0)["wall_ns"]
    usual = free.median() if len(free) >= MIN_FOR_PACE else None
    if usual is None and (not window.on_cpu or marked.filter((pl.col("writes") > 0) & (pl.col("save_ns") == 0)).height):
        raise NotKnownError("nearly every step collects garbage or writes files, so what a step without takes is not known")
    # where every step saves, no more is known to come of it than the time of torch.save
    excess = pl.col("save_ns") if usual is None else (pl.col("wall_ns") - usual).clip(lower_bound=0)
    gc_ns = pl.min_horizontal("gc_ns", excess if not window.on_cpu else "wall_ns")
    untimed = (pl.col("writes") > 0) & (pl.col("save_ns") == 0)
    written = pl.when(untimed).then(pl.min_horizontal(excess, "most_ns")).when(pl.col("save_ns") > 0).then(excess).otherwise(0)
    if window.on_cpu:
        saved_ns = pl.max_horizontal("save_ns", written, "sync_ns")
    else:
        saved_ns = pl.max_horizontal(written, pl.min_horizontal("sync_ns", excess))
    io_ns = pl.min_horizontal(saved_ns, (pl.col("wall_ns") - gc_ns).clip(lower_bound=0))
    found = marked.with_columns(gc_ns=gc_ns.cast(pl.Float64), io_ns=io_ns.cast(pl.Float64))
    # what comes in one step alone (1 % of the usual step or more) does not come again: the first full collection of a program
    least = measure_least_stall_ns(found)
    once = [column for column in ("gc_ns", "io_ns") if (found[column] >= least).sum() < 2]
    found = found.with_columns(pl.col(column).clip(upper_bound=pl.col(column).top_k(2).min()) for column in ("gc_ns", "io_ns"))
    return found.with_columns(pl.lit(0.0).alias(column) for column in once)


def measure_least_stall_ns(steps: pl.DataFrame) -> float:
    """Return from which time in ns on a stall is one: 1 % of the usual step."""
    return LEAST_STALL_SHARE * float(steps["wall_ns"].median() or 0)  # type: ignore[arg-type]


def measure_stall_share(window: Window, column: str, cause: str) -> float:
    """Return the share of the plain steps' time in `column`; of the analysed steps that of `cause`, where the records do not say.

    The larger of both where it comes in most steps: the records time torch.save on a CPU, but not the file around it, and no reading.
    """
    in_window = measure_share_of_plain(window, measure_idle_ns(window, cause))
    try:
        found = find_stalled_steps(window)
    except NotKnownError:
        return in_window
    share = float(found[column].sum()) / max(1, int(found["wall_ns"].sum()))
    marked = float((found[column] > 0).mean() or 0)  # type: ignore[arg-type]
    return (
        max(share, in_window) if (window.on_cpu and marked > 0.5) or (cause == "idle_io" and measure_io_recurrence(window) > 0.5) else share
    )


def measure_io_recurrence(window: Window) -> float:
    """Return the part of the analysed steps in which the device was idle for files for 1 % of the step or more."""
    stalls = window.idle_spans("idle_io")
    starts, ends = window.steps["start_ns"].to_numpy(), window.steps["end_ns"].to_numpy()
    return float((spans.measure_covered(stalls, starts, ends) >= LEAST_STALL_SHARE * (ends - starts)).mean())


def stalled_step_share(window: Window) -> float:
    """Part of the unprofiled steps in which garbage was collected or a file written, at a cost of 1 % of the usual step or more; of the
    analysed steps where that is most of them."""
    found = find_stalled_steps(window)
    marked = found.filter(pl.col("gc_ns") + pl.col("io_ns") > measure_least_stall_ns(found)).height / found.height
    recurrence = measure_io_recurrence(window)
    return max(marked, recurrence) if recurrence > 0.5 else marked


def run_stall_share(window: Window) -> float:
    """gc_share and io_share together."""
    return min(1.0, measure_stall_share(window, "gc_ns", "idle_gc") + measure_stall_share(window, "io_ns", "idle_io"))


def without_run_stalls_ns(window: Window) -> float:
    """Time that as many steps as were analysed save without them, on average over the run; by the window (what-ifs gc=0 and
    io=0) where it alone is known."""
    try:
        find_stalled_steps(window)
    except NotKnownError:
        if not window.on_cpu:
            return without_stalls_ns(window)
    return run_stall_share(window) * window.wall_ns


def _find_model_work(window: Window) -> pl.DataFrame:
    found = window.work().filter(pl.col("phase").is_in(["forward", "backward"]))
    require(found.height > 0, "no work of a forward or backward pass was told apart from the rest")
    return found


def model_work_ns(window: Window) -> int:
    """Time that only work of the forward and backward pass fills; on a CPU their ops."""
    found = _find_model_work(window)
    return min(int(found["time_ns"].sum()), window.exposed_ns(found))


def _find_work_on_positions(window: Window) -> pl.DataFrame:
    """Return the work of the passes; of batches of ids, which an embedding looks up, what their number or length is among the shapes of."""
    work, records = _find_model_work(window), window.analysis.step_records
    known = (
        require_known(records, NO_RECORDS).filter(pl.col("samples") > 0, window="timing").select("batch_elements", "samples").drop_nulls()
    )
    sizes = {number for whole, samples in known.iter_rows() for number in (whole, whole - samples, whole // samples, whole // samples - 1)}
    if not sizes or (known["batch_elements"] % known["samples"]).sum():
        return work
    named = pl.col("shapes").str.contains(rf"\b(?:{'|'.join(map(str, sorted(sizes)))})\b|^$").fill_null(True)
    one_by_one = pl.len().over("op_name", "shapes") >= window.steps.height * int((known["batch_elements"] // known["samples"]).min())  # type: ignore[arg-type]
    ids = work.filter(pl.col("op_name").str.contains(r"^aten::_?embedding") & named)
    return work.filter(named | one_by_one) if ids.height else work


def padded_work_ns(window: Window) -> float:
    """At most this part of the passes goes into padding: padded_share w of their work on the positions, of attention 1 - (1 - w)^2.

    Attention grows with the square of the length: its waste is 1 - sum(len^2) / (B L^2), which is never above that (Jensen).
    """
    padded, work = padded_share(window), _find_work_on_positions(window)
    time_ns = int(work["time_ns"].sum())
    attention = int(work.filter(pl.col("family") == "attention")["time_ns"].sum()) / time_ns
    return min(time_ns, window.exposed_ns(work)) * (padded * (1 - attention) + (1 - (1 - padded) ** 2) * attention)


def measure_slow_steps(window: Window) -> tuple[int, int, float]:
    """Return the slow unprofiled steps, all of them, and the share of time that the slow take beyond the median.

    Without what the training thread waited for a core: on a busy machine many steps are slow, and none by the program.
    """
    records, marks = require_known(window.analysis.step_records, NO_RECORDS), window.analysis.host_marks
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain")).select("step", "wall_ns")
    require(plain.height >= MIN_FOR_PACE, f"fewer than {MIN_FOR_PACE} unprofiled steps: let the recording run on")
    walls = plain["wall_ns"]
    if marks is not None:
        waits = marks.filter(kind="preempted").group_by("step").agg(pl.col("duration_ns").sum())
        joined = plain.join(waits, on="step", how="left", maintain_order="left")
        walls = (walls - joined["duration_ns"].fill_null(0)).clip(lower_bound=0)
    usual = float(walls.median() or 0)  # type: ignore[arg-type]
    slow = walls.filter(walls > SLOW_FACTOR * usual)
    return len(slow), len(walls), float((slow - usual).sum()) / max(1, int(walls.sum()))


def format_cost(window: Window, steps: float) -> str:
    """Return what `steps` steps cost on all ranks, idle ones too, with two digits that say something: $0.31, $0.0042, $1,234.

    By the mean wall time of the unprofiled steps where there are enough, else of the analysed ones.
    """
    ranks = window.analysis.manifest.world_size if window.analysis.manifest else 1
    price, history, records = gpu_hour_price(window), window.history, window.analysis.step_records
    if history is None or history.plain < MIN_FOR_PACE or records is None:
        step_ns = window.wall_ns / max(1, window.steps.height)
    else:
        plain = records.filter(records["window"] == "plain")["wall_ns"]
        settled = plain[2:] if len(plain) > 2 + MIN_FOR_PACE else plain
        step_ns = float(settled.sum()) / len(settled)
    amount = steps * ranks * price * step_ns / 1e9 / 3600
    if amount >= 100:
        return f"${amount:,.0f}"
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.2g}"


MIN_STEPS = 5
"""Plain steps of a batch size whose median counts (heuristic)."""

MIN_RATIO = 1.5
"""Largest over smallest batch size from which a line through them can be told from scatter (heuristic)."""

ASK = "run a few steps with twice the batch in the same recording, or test it: gpudiag ab -o BUNDLE --fix batch-size=x2 ..."


class BatchFit(NamedTuple):
    """Step time in ns by batch size in samples: fixed_ns + sample_ns x batch."""

    fixed_ns: float
    sample_ns: float
    batch: int
    """The size that is asked to be doubled: the largest of a run, that of the unchanged program in an experiment."""
    smallest: int
    largest: int
    """The smallest and the largest size seen."""

    def step_ns(self, batch: float) -> float:
        """Return the time of a step of `batch` samples in ns."""
        return self.fixed_ns + self.sample_ns * batch


def fit_experiment(data: ExperimentData) -> BatchFit | None:
    """Return the line through the unchanged batch and the largest other one that was compared with it; None where none was.

    With f times the batch a step takes f / (ratio of samples a second) times as long.
    """
    samples = data.baseline.samples_per_step if data.baseline else None
    if data.baseline is None or not samples or data.baseline.step_ns <= 0:
        return None
    known = []
    for one in data.experiments:  # those that changed the batch alone, by 1.5 or more
        name, _, value = one.fix.partition("=")
        alone = name == "batch-size" and not one.variant and not one.screening and one.unit == "samples"
        if not alone or not one.ratio or one.verdict in ("failed", "not_applied", "unstable"):
            continue
        try:
            factor = float(value[1:]) if value.startswith("x") else float(value) / samples
        except ValueError:
            continue
        if factor >= MIN_RATIO:
            known.append((factor, one.ratio))
    if not known:
        return None
    step_ns, (factor, ratio) = data.baseline.step_ns, max(known)
    slope = min(max(step_ns * (factor / ratio - 1) / (samples * (factor - 1)), 0.0), step_ns / samples)
    return BatchFit(step_ns - slope * samples, slope, round(samples), round(samples), round(factor * samples))


def fit_step_time(window: Window) -> BatchFit:
    """Return the line of an experiment with another batch size, else of the batch sizes of the run: the least-squares line through the
    median step time of each, no part of it negative.

    Raises NotKnownError unless there is an experiment, or two sizes with a ratio of 1.5 have 5 unprofiled steps each.
    """
    tested = next((found for data in reversed(window.analysis.experiments) if (found := fit_experiment(data)) is not None), None)
    if tested is not None:
        return tested
    records = window.analysis.step_records
    if records is None:
        raise NotKnownError("a trace does not hold the steps outside it: record with gpudiag.profile")
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain") & (pl.col("samples") > 0))
    sizes = plain.group_by("samples").agg(pl.len().alias("steps"), pl.col("wall_ns").median()).filter(pl.col("steps") >= MIN_STEPS)
    sizes = sizes.sort("samples")
    if sizes.height < 2 or int(sizes["samples"][-1]) < MIN_RATIO * int(sizes["samples"][0]):
        raise NotKnownError(f"the batch size did not vary (two sizes, 1.5 apart, {MIN_STEPS} unprofiled steps each): {ASK}")
    at, times = sizes["samples"].cast(pl.Float64).to_numpy(), sizes["wall_ns"].to_numpy()
    weights = sizes["steps"].cast(pl.Float64).to_numpy()
    mean_at, mean_time = (weights * at).sum() / weights.sum(), (weights * times).sum() / weights.sum()
    slope = float((weights * (at - mean_at) * (times - mean_time)).sum() / (weights * (at - mean_at) ** 2).sum())
    slope = min(max(slope, 0.0), float(mean_time / mean_at))
    return BatchFit(float(mean_time - slope * mean_at), slope, int(at[-1]), int(at[0]), int(at[-1]))


def doubling_ratio(window: Window) -> float:
    """How many times as long a step takes with twice the largest batch of the run, by the line T = a + c b through its batch sizes; where
    an experiment has tested another batch size, with twice that of the unchanged program.

    1: a larger batch costs nothing (overhead, latency, weight reads); 2: the device is saturated.
    """
    found = fit_step_time(window)
    return found.step_ns(2 * found.batch) / found.step_ns(found.batch)


# fmt: off
FACTS = (
    fact("padded_share", "share", "Padding among the positions of the batches, by their masks, lengths or ids; all steps.", padded_share),
    fact("step_drift_share", "share", "How much longer an unprofiled step takes in the last quarter of the run than in the first; 0 "
         "where that may be noise. Negative where steps became faster. See gpudiag.timeline.history.measure_drift for the test.",
         lambda window: (found.share if (found := require_known(read_history(window).drift, _NO_DRIFT)).real else 0.0)),
    fact("slow_steps", "count", "Unprofiled steps of the run that take more than 1.5 times the median, waits for a core left out.",
         lambda window: measure_slow_steps(window)[0]),
    fact("slow_step_part", "share", "Part of the unprofiled steps that slow_steps are.",
         lambda window: (found := measure_slow_steps(window))[0] / found[1]),
    fact("slow_step_share", "share", "Time of slow_steps beyond the median, over that of the unprofiled steps.",
         lambda window: measure_slow_steps(window)[2]),
    fact("gc_share", "share", "Time in which Python collected garbage over the time of all unprofiled steps; on a GPU only what a step "
         "takes beyond the usual one. Without records of the run: idle time of the analysed steps.",
         lambda window: measure_stall_share(window, "gc_ns", "idle_gc")),
    fact("io_share", "share", "As gc_share, for torch.save and files that are written (checkpoints, logs), or read in most steps.",
         lambda window: measure_stall_share(window, "io_ns", "idle_io")),
    fact_of(run_stall_share, "share"),
    fact_of(stalled_step_share, "share"),
    fact_of(without_run_stalls_ns, "ns"),
    *with_share(padded_work_ns),
    fact("gpu_hour_price", "count", "Price of one hour of one device in dollars (or whatever currency), as given by --gpu-hour-price.",
         gpu_hour_price),
    fact("thousand_steps_cost", "text", "What 1,000 steps cost on all ranks at gpu_hour_price, by the unprofiled steps where there are "
         "some.", lambda window: format_cost(window, 1000)),
    field_fact("ranks", "manifest.world_size", "Processes of the run, each with a device of its own.",
               "a trace does not hold the number of processes: record with gpudiag.profile"),
    fact("planned_steps", "count", "Steps of the whole run, as given by --planned-steps.", planned_steps),
    fact("planned_cost", "text", "What planned_steps steps cost on all ranks at gpu_hour_price.",
         lambda window: format_cost(window, planned_steps(window))),
    fact("tenth_of_planned_cost", "text", "What a tenth of planned_cost is: the worth of steps that are 10 % shorter.",
         lambda window: format_cost(window, planned_steps(window) / 10)),
    fact("smallest_batch", "count", "Samples of the smallest batch of at least 5 unprofiled steps, where the batch size varied; in an "
         "experiment the unchanged one.", lambda window: fit_step_time(window).smallest),
    fact("largest_batch", "count", "Samples of the largest batch of at least 5 unprofiled steps, where the batch size varied; in an "
         "experiment the largest tested.", lambda window: fit_step_time(window).largest),
    fact_of(doubling_ratio, "ratio"),
    fact("fixed_step_ns", "ns", "The part of a step that does not grow with the batch (a of T = a + c b).",
         lambda window: fit_step_time(window).fixed_ns),
    fact("doubling_saves_ns", "ns", "Time that the samples of the analysed steps save with twice the batch: 1 - doubling_ratio / 2 of it.",
         lambda window: (1 - doubling_ratio(window) / 2) * window.wall_ns),
)
# fmt: on

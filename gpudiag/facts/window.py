"""The analysed window with the tables and replays that several facts share, each made once and only when asked for.

Conventions of the counts of matrix work (op_costs section 15.1):

* products, convolutions, attention and recurrent layers, 2 FLOP per multiply-add; no element-wise work, no optimizer;
* attention under a causal mask counts half of the pairs, so half of PaLM's 12*L*H*Q*T per token (appendix B of arXiv:2204.02311
  counts all pairs); the embedding look-up counts nothing, the output layer is a product like any other;
* repeated forward work is counted apart: ops inside a checkpointed region's backward, and the scores that a fused attention backward
  forms again. Work that a compiler recomputes inside its own kernels cannot be told from other work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import decode_column, decode_names, match_column
from gpudiag.attribution.nesting import find_nearest, null_missing
from gpudiag.facts.messages import find_recorded_messages
from gpudiag.facts.registry import NO_ACCELERATOR, require, require_known
from gpudiag.facts.sql import list_analysis_tables
from gpudiag.model.analysis import Analysis
from gpudiag.model.hardware import Device
from gpudiag.model.ops import Signature, parse_signature
from gpudiag.model.timeline import StepHistory
from gpudiag.roofline import op_calls
from gpudiag.roofline.op_calls import MATRIX_FAMILIES, find_family
from gpudiag.timeline.history import build_history
from gpudiag.timeline.whatif.study import WhatIfResults
from gpudiag.trace.kernel_names import LOADER_MARK, OTHER_CLASS

LEAST_SHARE_OF_CAUSE = 0.5
"""Least part of the idle time of a cause that its what-if gives back where the steps that are replayed hold the cause (heuristic)."""

MATRIX_CLASSES = ("gemm", "convolution", "attention", "rnn", "triton_template")
"""Kernel classes (trace.kernel_names) whose work runs on matrix engines."""

UNUSED_COLUMNS = (
    "correlation", "graph_node", "block", "kernel_class", "matrix_flops", "recompute_flops", "cache_resident", "over_roof", "over_cause",
)  # fmt: skip
"""Columns that no fact asks of `kernels`: each choice of rows would copy them."""

WORD_COLUMNS = ("kind", "bound", "provenance", "engine", "engine_by", "phase", "family", "dtype", "copy_kind")
"""Columns of `kernels` that hold one of a few words: as codes they take a quarter of the memory of texts."""


class Window:
    """An Analysis and what follows from it. Properties raise NotKnownError where the recording does not say."""

    def __init__(self, analysis: Analysis, what_ifs: WhatIfResults | None = None) -> None:
        self.analysis = analysis
        self.what_ifs = what_ifs or WhatIfResults(analysis)
        self.as_recorded = False
        """Whether idle time is measured with what the profiler added to it (facts.host_time)."""
        self.replayed = False
        """Whether anything was taken from a replay since this was last set to False: facts.catalogue keeps it for each fact."""
        self.shared: dict[Any, Any] = {}
        """What functions under `cache_by_window` have made of this window, by function."""

    def without_tables(self) -> Window:
        """Return the same window without the tables that facts share but for `kernels`, which most are made of, and small ones."""
        made = Window(self.analysis, self.what_ifs)
        made.shared = {make: found for make, found in self.shared.items() if _measure_bytes(found) <= SMALL_BYTES}
        if "kernels" in self.__dict__:
            made.__dict__["kernels"] = self.kernels
        return made

    @property
    def table_bytes(self) -> int:
        """Return how much memory the tables take that facts share, in B, but for `kernels`."""
        held = [*self.shared.values(), *(value for name, value in vars(self).items() if name != "kernels")]
        flat = [part for value in held for part in (value if isinstance(value, tuple) else (value,))]
        return sum(int(part.estimated_size()) for part in flat if isinstance(part, pl.DataFrame))

    @property
    def on_cpu(self) -> bool:
        """Return whether the CPU is the device of this run."""
        return self.analysis.device_kind == "cpu"

    def require_accelerator(self) -> Window:
        """Return this window; raises NotKnownError on a CPU-only run."""
        require(not self.on_cpu, NO_ACCELERATOR)
        return self

    @property
    def wall_ns(self) -> int:
        """Return the wall time of the analysed steps in ns."""
        require(self.analysis.wall_ns > 0, "no complete step was recorded")
        return self.analysis.wall_ns

    @property
    def step_count(self) -> int:
        """Return the number of analysed steps, at least 1."""
        require(self.steps.height > 0, "no complete step was recorded")
        return self.steps.height

    def what_if_ns(self, *codes: str, otherwise: Callable[[], float]) -> float:
        """Return the time in ns that the analysed steps would save with `codes` of `gpudiag whatif --set`, those that apply at once.

        From the replay; `otherwise`, by formula, where there is none or no code applies. A cause of idle time of which the replay gives
        back less than half, where only some steps are replayed, stood in others (a collection in one step of a hundred): then by formula.
        """
        share = self.what_ifs.saved_share(*codes)
        if share is not None and not self.what_ifs.holds_all(*codes) and share * self.wall_ns < LEAST_SHARE_OF_CAUSE * otherwise():
            share = None
        return self._replayed_ns(share, otherwise)

    def without_syncs_ns(self, syncs: pl.DataFrame, otherwise: Callable[[pl.DataFrame], float]) -> float:
        """Return the time in ns that would be saved where these rows of `syncs` did not wait; `otherwise` of them at most, which holds too
        where no replay tells."""
        study, launches = self.what_ifs.study, syncs["launch"].drop_nulls().to_list()
        share = study.share_without_syncs(np.asarray(launches, dtype=np.int64)) if study else None
        most = float(otherwise(syncs))
        return min(self._replayed_ns(share, lambda: most), most)

    def _replayed_ns(self, share: float | None, otherwise: Callable[[], float]) -> float:
        if share is None:
            return float(otherwise())
        self.replayed = True
        return min(max(share, 0.0), 1.0) * self.wall_ns

    def saving_ns(self, chosen: pl.DataFrame, floor_ns: pl.Expr) -> float:
        """Return how much time in ns the analysed steps would save with `chosen` (rows of `kernels`) at `floor_ns` each.

        From the replay, at the pace without the profiler where that is known. Where there is none: the summed saving, at most the time that
        only they fill. A kernel whose floor is not known saves nothing.
        """
        each = chosen.select("id", "busy_ns", saved=(pl.col("time_ns") - floor_ns).clip(lower_bound=0).fill_null(0).fill_nan(0))
        new_ns = np.full(self.analysis.trace.kernels.height, np.nan)
        new_ns[each["id"].to_numpy()] = (each["busy_ns"] - each["saved"]).clip(lower_bound=0).to_numpy()
        study = self.what_ifs.plain
        share = study.share_with_kernels(new_ns) if study else None
        return self._replayed_ns(share, lambda: min(float(each["saved"].sum()), float(self.exposed_ns(chosen))))

    @cached_property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the tables that queries see, by name."""
        return list_analysis_tables(self.analysis)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Return the analysed rows of `steps`."""
        return self.analysis.steps.filter(pl.col("analysed"))

    @cached_property
    def within_steps(self) -> pl.Expr:
        """Return which rows (by their column step) belong to the analysed steps."""
        return pl.col("step").is_in(self.steps["id"].implode())

    @cached_property
    def step_spans(self) -> spans.Spans:
        """Return the time that the analysed steps cover."""
        return spans.build_spans(self.steps)

    @cached_property
    def host_spans(self) -> spans.Spans:
        """Return the time from mark to mark of the host: what the host did in the analysed steps lies in it."""
        return spans.build_spans(self.analysis.host_steps.filter("analysed"))

    @cached_property
    def history(self) -> StepHistory | None:
        """Return what the records of all steps say; None where there are none."""
        records = self.analysis.step_records
        return None if records is None else build_history(records, self.analysis.host_marks)

    @property
    def device(self) -> Device:
        """Return the device with its peaks."""
        hint = "see the device table"
        if self.on_cpu:
            hint = "run `gpudiag calibrate` on the machine" if self.analysis.manifest else "record with gpudiag.profile"
        return require_known(self.analysis.device, f"the peaks of this device are not known ({hint})")

    @property
    def bandwidth(self) -> float:
        """Return the memory bandwidth in B/s."""
        return require_known(self.device.bandwidth_byte_per_s, "the memory bandwidth of this device is not known")

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Return the work of the device within the analysed steps: kernels (stage cost) less UNUSED_COLUMNS, with the columns added here.

        time_ns (the part within the steps; on a CPU self time of the ops of the steps), op_name, phase, thread, and the columns of
        roofline.op_calls.CALL_SCHEMA. A kernel carries the operator that owns its cost, else the innermost one around its launch.
        WORD_COLUMNS are Categorical.
        """
        kernels = self.analysis.trace.kernels.drop(UNUSED_COLUMNS)
        kernels = kernels.with_columns(pl.col(word).cast(pl.Categorical) for word in WORD_COLUMNS if word in kernels.columns)
        if self.on_cpu:
            chosen, time_ns = (pl.col("kind") == "cpu") & self.within_steps, kernels["busy_ns"]
        else:
            index = self.analysis.device_index
            chosen = (pl.col("kind") != "cpu") if index is None else (pl.col("kind") != "cpu") & (pl.col("device") == index)
            starts, ends = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
            time_ns = pl.Series(spans.measure_covered(self.step_spans, starts, ends), dtype=pl.Int64)
        frame = kernels.with_columns(time_ns=time_ns).filter(chosen & (pl.col("time_ns") > 0)).drop("device", "occupancy")
        frame = frame if frame["start_ns"].is_sorted() else frame.sort("start_ns", "id")  # each copies all columns
        frame = frame.with_columns(decode_column("name"), pl.coalesce("owner", "op").alias("call")).drop("owner")
        ops = self.analysis.trace.ops  # an op's id is its row
        asked = {"op_name": "name", "phase": "phase", "signature": "signature", "thread": "thread"}
        frame = frame.with_columns(ops[column].gather(frame["call"]).alias(name) for name, column in asked.items())
        frame = frame.with_columns(decode_column("op_name"), pl.col("phase").cast(pl.Categorical))
        pairs = frame.select("op_name", "signature").drop_nulls("op_name").unique().sort("op_name", "signature")
        described = op_calls.build_call_table(pairs.iter_rows(), self.analysis.trace.signatures)
        described = described.with_columns(pl.col("family", "dtype", "copy_kind").cast(pl.Categorical))
        frame = frame.join(described, on=["op_name", "signature"], how="left", nulls_equal=True)
        return frame.with_columns(pl.col("family").fill_null("other"))

    @property
    def recorded_ops(self) -> pl.DataFrame:
        """Return the ops of the trace; raises NotKnownError where there are none."""
        require(self.analysis.trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
        return self.analysis.trace.ops

    def work(self, *, shapes: bool = False) -> pl.DataFrame:
        """Return `kernels`; raises NotKnownError where there are none, no op is linked, or (`shapes`) no shapes were recorded."""
        frame = self.kernels
        require(frame.height > 0, "no work of the device was recorded in the analysed steps")
        require(frame["op_name"].null_count() < frame.height, "no kernel is linked to an op: record with activities=[CPU, CUDA]")
        require(not shapes or frame["signature"].null_count() < frame.height, "no shapes: record with record_shapes=True")
        return frame

    def name_around(self, work: pl.DataFrame) -> pl.Series:
        """Return the name of the op around the call of each kernel of `work`, null where there is none."""
        ops = self.analysis.trace.ops
        return decode_names(ops["name"].gather(ops["parent"].gather(work["call"])))

    def find_around(self, work: pl.DataFrame, ops: npt.NDArray[np.bool_]) -> pl.Series:
        """Find for each kernel of `work` the innermost of `ops` (a mask of the table's rows) at or around its call; null: none."""
        around = np.append(find_nearest(self.analysis.trace.ops["parent"].fill_null(-1).to_numpy(), ops), -1)
        return null_missing(around[work["call"].fill_null(-1).to_numpy()])

    def signature(self, row: int) -> Signature:
        """Return the inputs of an op by its row of `signatures`."""
        texts = self.analysis.trace.signatures
        return parse_signature(*(texts[column][row] for column in ("shapes", "dtypes", "strides", "args")))

    @cached_property
    def matrix_work(self) -> pl.DataFrame:
        """Return the kernels launched in the analysed steps that do matrix work or may do some: a few columns, matrix and again.

        matrix: matrix FLOP, null where they are not known; again: the part that repeats forward work. Work goes to the step that launched
        it, whenever it ran (architecture: two accounts).
        """
        kernels, ops = self.analysis.trace.kernels, self.analysis.trace.ops
        within = self.within_steps & pl.col("kind").is_in(["kernel", "cpu"])
        asked = ("id", "owner", "op", "matrix_flops", "provenance", "kernel_class")
        own = kernels.select(*asked, "step", "kind", "collective").filter(within & ~pl.col("collective").fill_null(False))
        own = own.select(asked).with_columns(pl.coalesce("owner", "op").alias("call"))
        names, repeated = (ops[name].gather(own["call"]) for name in ("name", "recompute"))  # an op's id is its row
        own = own.with_columns(decode_names(names).alias("op_name"), repeated.fill_null(False).alias("repeated"))
        families = {name: find_family(name) for name in own["op_name"].drop_nulls().unique().to_list()}
        own = own.with_columns(family=pl.col("op_name").replace_strict(families or {"": ""}, default=None, return_dtype=pl.String))
        counted = pl.col("matrix_flops") > 0
        guessed = pl.col("provenance").is_in(["generic", "none"]) | pl.col("matrix_flops").is_null()
        # Whether a kernel without a count may do matrix work: by its op's family, else by its own name, else because nothing tells
        by_op, kind = pl.col("family").is_in(MATRIX_FAMILIES), pl.col("kernel_class")
        unknown = (kind.is_null() | (kind == OTHER_CLASS)) & (pl.col("family").is_null() | (pl.col("family") == "other"))
        may = by_op.fill_null(False) | kind.is_in(MATRIX_CLASSES).fill_null(False) | unknown
        found = own.filter(counted | (guessed & may))
        frame = kernels.select("id", "busy_ns", "step", "engine", "provenance", "matrix_flops", "recompute_flops")[found["id"]]
        matrix = pl.when(counted).then(pl.col("matrix_flops"))
        again = pl.when(pl.lit(found["repeated"])).then(matrix).otherwise(pl.when(counted).then("recompute_flops").fill_null(0.0))
        return frame.with_columns(matrix.alias("matrix"), again.alias("again"))

    @cached_property
    def messages(self) -> pl.DataFrame:
        """Return the collectives that the analysed steps called (see find_recorded_messages); raises NotKnownError where there is none."""
        none_ran = "no collective ran in the analysed steps"
        require(bool(self.analysis.trace.kernels["collective"].any()), none_ran)
        frame = find_recorded_messages(self.analysis, self.steps["id"])
        require(frame.height > 0, none_ran)
        return frame

    @cached_property
    def busy_ns(self) -> int:
        """Return the time of the analysed steps in which the device worked, in ns."""
        return self.wall_ns - self.analysis.breakdown.idle_ns

    def exposed_ns(self, chosen: pl.DataFrame) -> int:
        """Return the time in ns that only `chosen` (rows of `kernels`) fills: what the device would be free of without them.

        On a CPU self times never overlap within a thread: their sum, at most the wall time.
        """
        if self.on_cpu:
            return min(int(chosen["time_ns"].sum()), self.wall_ns)
        rest = self.kernels.select("id", "start_ns", "end_ns").filter(~pl.col("id").is_in(chosen["id"].implode()))
        own, others = spans.build_spans(chosen), spans.build_spans(rest)
        within = spans.measure_covered(self.step_spans, own[:, 0], own[:, 1]).sum()
        either = spans.merge_spans(np.concatenate((own, others)))
        own_ns, others_ns, either_ns = (spans.measure_overlap(part, self.step_spans) for part in (own, others, either))
        return int(within) - (own_ns + others_ns - either_ns)

    def share_of_wall(self, chosen: pl.DataFrame) -> float:
        """Return the summed time of `chosen` over the wall time of the analysed steps, 0..1."""
        return min(float(chosen["time_ns"].sum()) / self.wall_ns, 1.0)

    @cached_property
    def loader_waits(self) -> pl.DataFrame | None:
        """Return the waits for a batch (start_ns, end_ns, name), by the DataLoader's marks or what tells the same (Python frames: the
        idle time of the device in them); None: none is shown."""
        trace = self.analysis.trace
        marks = trace.marks.filter((pl.col("category") == "loader") | match_column("name", LOADER_MARK))
        ops = trace.ops.filter(match_column("name", LOADER_MARK))  # torch up to 1.9 wrote annotations among the ops
        both = pl.concat([frame.select("start_ns", "end_ns", decode_column("name")) for frame in (marks, ops)])
        records = self.analysis.step_records
        if not both.height and (records is None or records["loader_wait_ns"].null_count() == records.height):  # else the records tell
            both = self.idle.filter(cause="idle_data").select("start_ns", "end_ns", name="evidence")
        return both if both.height else None

    @cached_property
    def idle(self) -> pl.DataFrame:
        """Return the gaps of the device cut to the analysed steps, with their length time_ns (> 0)."""
        gaps = self.analysis.idle.filter(pl.col("cause") != "outside_recording")
        start, end = pl.col("start_ns"), pl.col("end_ns")
        pieces = [
            gaps.filter((start < last) & (end > first)).with_columns(start.clip(lower_bound=first), end.clip(upper_bound=last))
            for first, last in self.step_spans.tolist()
        ]
        return pl.concat([*pieces, gaps.clear()]).with_columns((end - start).alias("time_ns")).filter(pl.col("time_ns") > 0)

    def idle_spans(self, *causes: str) -> spans.Spans:
        """Return the idle time of these causes; of all where none is named."""
        return spans.build_spans(self.idle.filter(pl.col("cause").is_in(causes)) if causes else self.idle)


def estimate_target_ns(window: Window, matrix_peak: float | None, *, compute: float, memory: float, byte_factor: float = 1.0) -> pl.Expr:
    """Return the time in ns that each kernel would take at `compute` of `matrix_peak` (FLOP/s) or `memory` of the bandwidth.

    max(F / (compute x peak), byte_factor x B / (memory x BW)): the floor of the gain bounds (roofline model, Williams et al. 2009).
    """
    by_bytes = pl.col("bytes_moved") * byte_factor / (memory * window.bandwidth) * 1e9
    if matrix_peak is None:
        return by_bytes
    return pl.max_horizontal(pl.col("flops") / (compute * matrix_peak) * 1e9, by_bytes)


def divide_sums(found: pl.DataFrame, over: str, under: str, none_found: str) -> float:
    """Return the sum of column `over` over that of `under`; raises NotKnownError(none_found) where there are no rows."""
    require(found.height > 0, none_found)
    return float(found[over].sum()) / float(found[under].sum())


def copies(*patterns: str, least_bytes: int = 0, below_bytes: int | None = None) -> Callable[[Window], pl.DataFrame]:
    """Return what finds the copies whose names match all `patterns`, of these sizes; it raises NotKnownError on a CPU-only run."""
    chosen = [pl.col("kind") == "memcpy", *(pl.col("name").str.contains(pattern) for pattern in patterns)]
    chosen += [pl.col("bytes") >= least_bytes] if least_bytes else []  # the size of some was not recorded
    chosen += [pl.col("bytes") < below_bytes] if below_bytes is not None else []
    return lambda window: window.require_accelerator().kernels.filter(*chosen)


SMALL_BYTES = 1 << 20
"""Size of a result up to which it is kept where memory is short: the next rule asks for it again."""


def _measure_bytes(found: object) -> float:
    if isinstance(found, pl.DataFrame):
        return found.estimated_size()
    return found.nbytes if isinstance(found, np.ndarray) else np.inf


Cached = TypeVar("Cached")


def cache_by_window(make: Callable[[Window], Cached]) -> Callable[[Window], Cached]:
    """Return `make` with its result kept as long as the window lives (in Window.shared)."""

    def asked(window: Window) -> Cached:
        if make not in window.shared:
            window.shared[make] = make(window)
        found: Cached = window.shared[make]
        return found

    asked.__doc__ = make.__doc__
    return asked


def measure_known_share(work: pl.DataFrame) -> float | None:
    """Return the part of the kernel time of `work` (rows of matrix_work) whose FLOP are known; None where there is no time."""
    total = int(work["busy_ns"].sum())
    return int(work.filter(pl.col("matrix").is_not_null())["busy_ns"].sum()) / total if total else None

"""Facts about two kinds of calls that wait for the device: reads of its results, and synchronisation that the program asks for."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import matches, texts
from gpudiag.facts.registry import fact, require
from gpudiag.facts.syncs import syncs_of
from gpudiag.facts.window import Window

READ_OPS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::tolist")
"""Ops that bring a value to the host whatever they are given (native_functions.yaml; rules.md SYN-01)."""

SHAPE_OPS = (
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::where", "aten::masked_select", "aten::index", "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_", "aten::unique_dim", "aten::unique_consecutive", "aten::_unique", "aten::_unique2",
    "aten::repeat_interleave", "aten::bincount", "aten::histc", "aten::masked_scatter",
)  # fmt: skip
"""Ops whose result has a size that depends on values (native_functions.yaml; rules.md SYN-02); indexing where the index is a mask."""


_TO_HOST = r"(?i)DtoH|DeviceToHost"
_ASKED_FOR = r"(?i)(Device|Stream|Event|Ctx)Synchronize$"


def with_names(window: Window) -> pl.DataFrame:
    """Return the syncs of the analysed steps with op_name and kernel_name."""
    found, trace = syncs_of(window), window.analysis.trace
    ops, kernels = texts(trace.ops["name"]), texts(trace.kernels["name"])
    return found.with_columns(op_name=pl.lit(ops.gather(found["op"])), kernel_name=pl.lit(kernels.gather(found["kernel"])))


def reads(window: Window) -> pl.DataFrame:
    """Return the syncs in which the host reads a result: .item(), float(), .cpu(), a condition on a tensor."""
    copied = pl.col("op_name").is_not_null() & pl.col("kernel_name").str.contains(_TO_HOST)
    read = pl.col("op_name").is_in(READ_OPS) | (copied & ~pl.col("op_name").is_in(SHAPE_OPS))
    return with_names(window).filter(read.fill_null(False))


def asked_for(window: Window) -> pl.DataFrame:
    """Return the syncs that belong to no op: torch.cuda.synchronize(), Stream.synchronize(), Event.synchronize()."""
    return with_names(window).filter(pl.col("op").is_null() & matches("api", _ASKED_FOR))


def _cost_ns(found: pl.DataFrame) -> int:
    require(found["cost_ns"].null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(found["cost_ns"].sum())


def _per_step(window: Window, found: pl.DataFrame) -> float:
    require(window.steps.height > 0, "no complete step was recorded")
    return found.height / window.steps.height


@fact("read_cost_ns", unit="ns")
def read_cost_ns(window: Window) -> int:
    """Idle time of the device after the host had waited to read a result (.item(), .cpu(), a condition on a tensor)."""
    return _cost_ns(reads(window))


@fact("read_cost_share", unit="share")
def read_cost_share(window: Window) -> float:
    """read_cost_ns over the wall time of the analysed steps."""
    return _cost_ns(reads(window)) / window.wall_ns


@fact("reads_per_step", unit="count")
def reads_per_step(window: Window) -> float:
    """Reads of results that wait for the device, per analysed step."""
    return _per_step(window, reads(window))


def amid_steps(window: Window, found: pl.DataFrame) -> pl.DataFrame:
    """Return the syncs of `found` that lie between the first and the last op of the forward and backward passes of their step."""
    ops = window.analysis.trace.ops.select("phase", "step", "start_ns")
    passes = ops.filter(pl.col("phase").is_in(["forward", "backward"])).drop_nulls("step")
    spans = passes.group_by("step").agg(pl.col("start_ns").min().alias("first_ns"), pl.col("start_ns").max().alias("last_ns"))
    return found.join(spans, on="step", how="inner").filter(pl.col("start_ns").is_between("first_ns", "last_ns", closed="none"))


@fact("reads_amid_per_step", unit="count")
def reads_amid_per_step(window: Window) -> float:
    """Reads of results within the forward and backward passes, per analysed step: no graph captures them. One of the loss after is none."""
    return _per_step(window, amid_steps(window, reads(window)))


@fact("synchronize_cost_ns", unit="ns")
def synchronize_cost_ns(window: Window) -> int:
    """Idle time of the device after a synchronisation that the program asked for (torch.cuda.synchronize and its kin)."""
    return _cost_ns(asked_for(window))


@fact("synchronize_cost_share", unit="share")
def synchronize_cost_share(window: Window) -> float:
    """synchronize_cost_ns over the wall time of the analysed steps."""
    return _cost_ns(asked_for(window)) / window.wall_ns


@fact("synchronizations_per_step", unit="count")
def synchronizations_per_step(window: Window) -> float:
    """Synchronisations that the program asked for, per analysed step."""
    return _per_step(window, asked_for(window))


@fact("without_reads_ns", unit="ns")
def without_reads_ns(window: Window) -> float:
    """Time that the analysed steps would save if no read of a result waited for the device: replayed, else read_cost_ns."""
    found = reads(window)
    return window.without_syncs_ns(found, otherwise=lambda: _cost_ns(found))


@fact("without_synchronize_ns", unit="ns")
def without_synchronize_ns(window: Window) -> float:
    """Time that the analysed steps would save without the synchronisations that are asked for: replayed, else synchronize_cost_ns."""
    found = asked_for(window)
    return window.without_syncs_ns(found, otherwise=lambda: _cost_ns(found))

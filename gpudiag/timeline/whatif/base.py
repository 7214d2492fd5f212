"""What a what-if is made of: the times of a graph that it changes, the tables that it looks at, and its setting (NAME=VALUE of `--set`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Floats, Ints
from gpudiag.attribution.names import decode_column
from gpudiag.errors import InputError
from gpudiag.model.graph import Graph, encode_edge_kind, encode_node_kind
from gpudiag.model.hardware import Device
from gpudiag.model.trace import Trace
from gpudiag.roofline import op_calls
from gpudiag.roofline.fused_kernels import find_elementwise_chains
from gpudiag.roofline.kernel_bounds import estimate_attainable_ns


class Times(msgspec.Struct, frozen=True):
    """Durations of the nodes and delays of the edges of one graph, in ns, and what is taken out of their order."""

    duration_ns: Ints
    lag_ns: Ints
    free_ns: Ints
    dropped: Bools
    """Edges that hold nobody up any more."""
    own_lane: Bools
    """Nodes that run beside all others: they hold nobody up, and the step is not shorter than their total."""
    samples: float = 1.0
    """Samples of a step over those of the recorded one."""


def read_times(graph: Graph) -> Times:
    """Return the times of `graph` as measured."""
    none = np.zeros(graph.src.size, dtype=np.bool_)
    return Times(graph.duration_ns, graph.lag_ns, graph.free_ns, none, np.zeros(graph.kind.size, dtype=np.bool_))


def scale_times(times: Times, nodes: Bools, factor: float) -> Times:
    """Return `times` with the durations of `nodes` times `factor`, in whole ns."""
    changed = np.where(nodes, np.rint(times.duration_ns * factor), times.duration_ns).astype(np.int64)
    return msgspec.structs.replace(times, duration_ns=changed)


def find_nodes(graph: Graph, *kinds: str) -> Bools:
    """Return which nodes are of one of `kinds` (model.graph.NODE_KINDS)."""
    return np.isin(graph.kind, [encode_node_kind(kind) for kind in kinds])


def sum_kernel_times(graph: Graph, times: Times, busy_ns: Floats) -> Floats:
    """Return the time in ns that each kernel now takes in `graph`, 0 for those that it does not hold.

    `busy_ns`: as recorded (NaN: as in the graph). The graph holds less of a kernel that the next one overlaps, or that began before the
    step: what changes of the part changes of the whole.
    """
    held = graph.kernel >= 0
    rows = graph.kernel[held]
    measured, now = (np.bincount(rows, weights=column[held], minlength=busy_ns.size) for column in (graph.duration_ns, times.duration_ns))
    whole = np.where(np.isnan(busy_ns), measured, busy_ns)
    found: Floats = whole * np.divide(now, measured, out=np.zeros_like(whole), where=measured > 0)
    return found


def set_kernel_times(graph: Graph, times: Times, new_ns: Floats, busy_ns: Floats) -> Times:
    """Return `times` with kernel row k taking new_ns[k] ns; NaN: as it is. A row that several nodes share is scaled as a whole.

    `busy_ns`: of each kernel as recorded (see sum_kernel_times).
    """
    before = sum_kernel_times(graph, times, busy_ns)
    ratio = np.divide(new_ns, before, out=np.ones_like(new_ns), where=(before > 0) & ~np.isnan(new_ns))
    held = graph.kernel >= 0
    factor = np.ones(graph.kind.size)
    factor[held] = ratio[graph.kernel[held]]
    return msgspec.structs.replace(times, duration_ns=np.rint(times.duration_ns * factor).astype(np.int64))


_KERNEL_COLUMNS = ("id", "name", "kind", "stream", "start_ns", "step", "busy_ns", "bytes_moved", "collective", "bound", "waves")
_WORK_COLUMNS = ("family", "copy_kind", "numel", "item_bytes", "operands", "result", "shapes")
"""Columns of roofline.op_calls.CALL_SCHEMA that what-ifs ask of each kernel."""


class WhatIfContext:
    """The costed trace of the graphs, its device and its table `syncs`."""

    def __init__(
        self, trace: Trace, *, on_cpu: bool, device: Device | None = None, syncs: pl.DataFrame | None = None, samples: int | None = None
    ) -> None:
        self.trace = trace
        self.on_cpu = on_cpu
        self.device = device
        self.syncs = syncs
        self.samples = samples
        """First dimension of the loader's batch, where it was recorded."""
        self._once: dict[str, Bools] = {}

    def forget_tables(self) -> None:
        """Let go of the tables, which take more memory than the kernels of the trace."""
        for name in ("work", "chains"):
            self.__dict__.pop(name, None)

    def make_once(self, name: str, make: Callable[[], Bools]) -> Bools:
        """Return what `make` returned when it was first asked for under `name`: the same for every graph."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    @cached_property
    def busy_ns(self) -> Floats:
        """Return the recorded time of each kernel in ns; NaN where it is not known."""
        found: Floats = self.trace.kernels["busy_ns"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        return found

    def estimate_attainable_ns(self, share: float) -> Floats:
        """Return the time of each kernel in ns at `share` of its roof, as far as the device attains it; NaN where no roof is known."""
        found: Floats = self.trace.kernels.select(estimate_attainable_ns(self.device, share)).to_series().fill_null(float("nan")).to_numpy()
        return found

    @cached_property
    def t_roof_ns(self) -> Floats:
        """Return the roofline time of each kernel in ns; NaN where it is not known."""
        found: Floats = self.trace.kernels["t_roof_ns"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        return found

    @cached_property
    def work(self) -> pl.DataFrame:
        """Return _KERNEL_COLUMNS (kind and bound as codes) with time_ns, op_name, phase, signature, thread and _WORK_COLUMNS."""
        kernels = self.trace.kernels.select(*_KERNEL_COLUMNS, pl.coalesce("owner", "op").alias("call"))
        frame = kernels.drop("call").with_columns(decode_column("name"), pl.col("kind", "bound").cast(pl.Categorical), time_ns="busy_ns")
        asked = {"op_name": "name", "phase": "phase", "signature": "signature", "thread": "thread"}
        frame = frame.with_columns(self.trace.ops[column].gather(kernels["call"]).alias(name) for name, column in asked.items())
        frame = frame.with_columns(decode_column("op_name"), pl.col("phase").cast(pl.Categorical))
        pairs = frame.select("op_name", "signature").drop_nulls("op_name").unique().sort("op_name", "signature")
        described = op_calls.build_call_table(pairs.iter_rows(), self.trace.signatures).select("op_name", "signature", *_WORK_COLUMNS)
        described = described.with_columns(pl.col("family", "copy_kind").cast(pl.Categorical))
        frame = frame.join(described, on=["op_name", "signature"], how="left", nulls_equal=True, maintain_order="left")
        return frame.with_columns(pl.col("family").fill_null("other"))

    @cached_property
    def chains(self) -> pl.DataFrame:
        """Return the chains of element-wise kernels (roofline.fused_kernels) within the steps."""
        return find_elementwise_chains(self.work.filter(pl.col("step").is_not_null()), on_cpu=self.on_cpu)

    def find_named(self, text: str) -> Bools:
        """Return which kernels have `text` in their name or in that of their op, whatever the case. Raises InputError where it is empty."""
        if not text:
            raise InputError("kernel needs a name", "for example kernel:gemm=0.5 or kernel:aten::add=0")
        wanted = text.lower()
        either = pl.concat_str("name", "op_name", separator="\n", ignore_nulls=True).str.to_lowercase()
        found: Bools = self.work.select(either.str.contains(wanted, literal=True).alias("found"))["found"].to_numpy()
        return found


_LONGEST = 200
"""Characters of a value that is repeated in a message."""


class Setting(msgspec.Struct, frozen=True):
    """A what-if with its value."""

    name: str
    value: str = ""
    target: str = ""

    def __str__(self) -> str:
        """Return the text that `--set` takes."""
        target = f":{self.target}" if self.target else ""
        return f"{self.name}{target}{f'={self.value}' if self.value else ''}"


Apply: TypeAlias = Callable[[Graph, Times, WhatIfContext, Setting], "Times | None"]
"""Changes the times of one graph; None where the graph has nothing that the setting is about. Raises InputError for a wrong value."""


class WhatIfKind(msgspec.Struct, frozen=True, kw_only=True):
    """A what-if: its name, the values that it takes (in words), its value in the table of standard what-ifs, what it does."""

    name: str
    values: str
    standard: str | None
    """None: not in the table of standard what-ifs."""
    apply: Apply
    words: Callable[[Setting], str]
    """Return what is assumed."""
    absent: str
    """What is missing where no graph changes."""
    short: str = ""
    """What a table calls it with its standard value."""
    conditions: Mapping[str, str] = {}
    """Value that takes a cause away -> what then holds, as a part of a sentence that begins with 'if'. Ceilings of rules name such."""
    takes_target: bool = False
    names_places: bool = False
    """The value names a place, so that several may be given."""
    idle: tuple[str, ...] = ()
    """Buckets of idle time that it gives back at most, beside the device's work that it shortens; (): it touches no time of the host. The
    first is its cause: where that is empty, so is the gain. The others an earlier host hides: it then runs ahead of the device."""
    of_device: bool = False
    """It saves work of the device, and is judged at the pace without the profiler, which slows the host alone."""


def format_example(kind: WhatIfKind) -> str:
    """Return how `--set` takes `kind`, with its standard value."""
    return str(Setting(kind.name, kind.standard or "0.5", "NAME" if kind.takes_target else "")) if kind.standard != "" else kind.name


def read_number(setting: Setting, lowest: float, highest: float) -> float:
    """Return the value as a number; raises InputError where it is none or lies outside."""
    try:
        found = float(setting.value)
    except ValueError:
        found = float("nan")
    if not lowest <= found <= highest:
        raise InputError(
            f"{format_setting(setting)}: the value is a number from {lowest:g} to {highest:g}", f"for example {setting.name}={lowest:g}"
        )
    return found


def format_setting(setting: Setting) -> str:
    """Return the setting for a one-line message."""
    text = "".join(character for character in str(setting) if character.isprintable())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def build_scaling_kind(
    name: str,
    values: str,
    standard: str | None,
    find: Callable[[Graph, WhatIfContext, Setting], Bools],
    words: Callable[[Setting, float], str],
    absent: str,
    *,
    short: str = "",
    gone: str = "",
    takes_target: bool = False,
    idle: tuple[str, ...] = (),
) -> WhatIfKind:
    """Return the what-if by which the nodes that `find` returns take 0 to 10 times their time; `words` takes that factor too.

    `gone`: what holds where the factor is 0.
    """

    def apply(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
        nodes = find(graph, context, setting)
        factor = read_number(setting, 0, 10)
        if not times.duration_ns[nodes].any():
            return None
        # a call that is gone (a free) waits for nothing
        waits = (graph.edge_kind == encode_edge_kind("sync")) & nodes[graph.dst] & (factor == 0)
        return msgspec.structs.replace(scale_times(times, nodes, factor), dropped=times.dropped | waits)

    return WhatIfKind(
        name=name,
        values=values,
        standard=standard,
        apply=apply,
        words=lambda setting: words(setting, read_number(setting, 0, 10)),
        absent=absent,
        short=short,
        conditions={"0": gone} if gone else {},
        takes_target=takes_target,
        idle=idle,
    )

"""What the what-ifs look at beside the graph: columns of the trace's tables as arrays, each made once and only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import polars as pl

from gpudiag.attribution.names import text
from gpudiag.model.hardware import Device
from gpudiag.model.trace import Trace
from gpudiag.roofline import calls
from gpudiag.roofline.chains import chains
from gpudiag.timeline.whatif.times import Bools, Floats

_USED = ("id", "name", "kind", "stream", "start_ns", "step", "busy_ns", "bytes_moved", "collective", "bound", "waves")
_DESCRIBED = ("family", "copy_kind", "numel", "item_bytes", "shapes")
"""Columns of calls.SCHEMA that what-ifs ask of each kernel."""


class Context:
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

    def once(self, name: str, make: Callable[[], Bools]) -> Bools:
        """Return what `make` returned when it was first asked for under `name`: the same for every graph."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    @property
    def kernel_count(self) -> int:
        """Return the number of rows of `kernels`."""
        return self.trace.kernels.height

    @cached_property
    def busy_ns(self) -> Floats:
        """Return the recorded time of each kernel in ns; NaN where it is not known."""
        found: Floats = self.trace.kernels["busy_ns"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        return found

    def in_phases(self, *phases: str) -> Bools:
        """Return which ops are of `phases`, with one more place, False, for 'no op' (index -1)."""
        known = self.trace.ops["phase"].cast(pl.String).is_in(phases).fill_null(False).to_numpy()
        return np.append(known, False)

    @cached_property
    def t_roof_ns(self) -> Floats:
        """Return the roofline time of each kernel in ns; NaN where it is not known."""
        found: Floats = self.trace.kernels["t_roof_ns"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        return found

    @cached_property
    def work(self) -> pl.DataFrame:
        """Return _USED of `kernels`, name as text, kind and bound as codes, with time_ns, op_name, phase, signature, thread, _DESCRIBED."""
        kernels = self.trace.kernels.select(*_USED, pl.coalesce("owner", "op").alias("call"))
        frame = kernels.drop("call").with_columns(text("name"), pl.col("kind", "bound").cast(pl.Categorical), time_ns="busy_ns")
        asked = {"op_name": "name", "phase": "phase", "signature": "signature", "thread": "thread"}
        frame = frame.with_columns(self.trace.ops[column].gather(kernels["call"]).alias(name) for name, column in asked.items())
        frame = frame.with_columns(text("op_name"), pl.col("phase").cast(pl.Categorical))
        pairs = frame.select("op_name", "signature").drop_nulls("op_name").unique().sort("op_name", "signature")
        described = calls.table(pairs.iter_rows(), self.trace.signatures).select("op_name", "signature", *_DESCRIBED)
        described = described.with_columns(pl.col("family", "copy_kind").cast(pl.Categorical))
        frame = frame.join(described, on=["op_name", "signature"], how="left", nulls_equal=True, maintain_order="left")
        return frame.with_columns(pl.col("family").fill_null("other"))

    @cached_property
    def chains(self) -> pl.DataFrame:
        """Return the chains of element-wise kernels (roofline.chains) within the steps."""
        return chains(self.work.filter(pl.col("step").is_not_null()), on_cpu=self.on_cpu)

    def named(self, text: str) -> Bools:
        """Return which kernels have `text` in their name or in that of their op, whatever the case."""
        wanted = text.lower()
        either = pl.concat_str("name", "op_name", separator="\n", ignore_nulls=True).str.to_lowercase()
        found: Bools = self.work.select(either.str.contains(wanted, literal=True).alias("found"))["found"].to_numpy()
        return found

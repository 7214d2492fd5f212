"""The what-ifs of one analysis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.study import Study


def study_of(analysis: Analysis) -> Study | None:
    """Return what answers what-ifs on `analysis`; None where its steps cannot be replayed."""
    if not analysis.graphs:
        return None
    context = Context(
        analysis.trace,
        on_cpu=analysis.device_kind == "cpu",
        device=analysis.device,
        syncs=analysis.syncs,
        samples=_samples(analysis.step_records),
    )
    names = dict(analysis.steps.select("id", "name").iter_rows())
    if analysis.run_graph is not None:
        return Study(analysis.graphs, names, context, run=analysis.run_graph, notes=_part_of(analysis.run_graph, analysis.steps))
    return Study(analysis.graphs, names, context, _stand_for(analysis.steps, [graph.step for graph in analysis.graphs]))


def _part_of(run: Graph, steps: pl.DataFrame) -> tuple[str, ...]:
    """Return which of the analysed steps are replayed, in words; () where all are."""
    count, last = int(steps["analysed"].sum()), run.step + run.step_count - 1
    if run.step_count >= count:
        return ()
    part = f"{steps['name'][run.step]} to {steps['name'][last]}"
    return (f"replayed: {part}, {run.step_count} of {count} steps; the others are taken to be like them",)


def _stand_for(steps: pl.DataFrame, rows: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the analysed steps each of `rows` stands for: those whose length is nearest to its own, at least itself.

    A plain mean over the three would count a checkpoint in one step of a hundred as if it were in every third.
    """
    length = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    every = length[steps["analysed"].to_numpy()]
    nearest = np.abs(every[:, None] - length[list(rows)][None, :]).argmin(axis=1)
    return tuple(np.maximum(np.bincount(nearest, minlength=len(rows)), 1).tolist())


def _samples(records: pl.DataFrame | None) -> int | None:
    """Return the batch size that most steps had; None where none was recorded."""
    if records is None:
        return None
    found = records["samples"].drop_nulls().mode().sort()
    return int(found[-1]) if len(found) and found[-1] > 0 else None

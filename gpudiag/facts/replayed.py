"""Replays of the representative steps, as far as facts need them: how much of the analysed time a change takes away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.replay import WhatIf
from gpudiag.timeline.whatif.analysed import study_of
from gpudiag.timeline.whatif.registry import parse
from gpudiag.timeline.whatif.setting import Setting
from gpudiag.timeline.whatif.study import Study, changed_step_ns, kernel_times
from gpudiag.timeline.whatif.syncs import without_calls
from gpudiag.timeline.whatif.times import unchanged

Floats = npt.NDArray[np.float64]


class Replays:
    """What changes give in the analysed steps of one window, each replayed once. None wherever there is nothing to replay."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._known: dict[tuple[str, ...], float | None] = {}

    @cached_property
    def study(self) -> Study | None:
        """Return the what-ifs of the representative steps; None where nothing can be replayed."""
        return study_of(self._analysis)

    @cached_property
    def standard(self) -> tuple[WhatIf, ...]:
        """Return every standard what-if that applies, the largest gain first."""
        return self.study.standard() if self.study else ()

    def saved_share(self, *settings: str) -> float | None:
        """Return the share of the time, 0..1, that `settings` (as `--set` takes them) save at once; None where none of them applies."""
        if settings not in self._known:
            self._known[settings] = self._of_settings(parse(settings)) if self.study else None
        return self._known[settings]

    def with_kernels(self, new_ns: Floats) -> float | None:
        """Return the share that is saved where row k of `kernels` takes new_ns[k] ns (NaN: as it is)."""
        return self._share([kernel_times(graph, new_ns) for graph in self._analysis.graphs]) if self.study else None

    def without_syncs(self, launches: Sequence[int]) -> float | None:
        """Return the share that is saved where these rows of `launches` do not wait; None where no replayed step holds one that does."""
        rows = np.asarray(launches, dtype=np.int64)
        graphs = self._analysis.graphs
        changed = [without_calls(graph, unchanged(graph), rows) for graph in graphs]
        if all(times is None for times in changed):
            return None
        pairs = zip(graphs, changed, strict=True)
        return self._share([changed_step_ns(graph, unchanged(graph) if times is None else times) for graph, times in pairs])

    def _of_settings(self, settings: Sequence[Setting]) -> float | None:
        """Return the share that those of `settings` save that are about something in the steps."""
        assert self.study is not None
        try:
            found = self.study.what_if(settings)
        except InputError:
            rest = [setting for setting in settings if self._applies(setting)]
            return self._of_settings(rest) if rest and len(rest) < len(settings) else None
        return self._share([after for _, _, after in found.per_step_ns])

    def _applies(self, setting: Setting) -> bool:
        assert self.study is not None
        try:
            self.study.what_if([setting])
        except InputError:
            return False
        return True

    def _share(self, changed: Sequence[float]) -> float:
        assert self.study is not None
        before = sum(weight * ns for weight, ns in zip(self._weights, self.study.step_ns, strict=True))
        after = sum(weight * ns for weight, ns in zip(self._weights, changed, strict=True))
        return min(max(1 - after / before, 0.0), 1.0) if before else 0.0

    @cached_property
    def _weights(self) -> list[int]:
        """Return how many of the analysed steps each replayed one stands for: those whose length is nearest to its own.

        A mean over the three alone would count a checkpoint in one step of a hundred as if it were in every third.
        """
        steps = self._analysis.steps.with_columns(length=pl.col("end_ns") - pl.col("start_ns"))
        own = steps["length"].gather([graph.step for graph in self._analysis.graphs]).to_numpy()
        every = steps.filter("analysed")["length"].to_numpy()
        nearest = np.abs(every[:, None] - own[None, :]).argmin(axis=1)
        return np.maximum(np.bincount(nearest, minlength=own.size), 1).tolist()  # type: ignore[no-any-return]


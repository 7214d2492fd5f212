"""Replays of the representative steps, as far as facts need them: how much of the analysed time a change takes away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

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
            self._known[settings] = _of_settings(self.study, parse(settings)) if self.study else None
        return self._known[settings]

    def with_kernels(self, new_ns: Floats) -> float | None:
        """Return the share that is saved where row k of `kernels` takes new_ns[k] ns (NaN: as it is)."""
        if self.study is None:
            return None
        busy_ns = self.study.context.busy_ns
        return _share(self.study, [kernel_times(graph, new_ns, busy_ns) for graph in self.study.graphs])

    def without_syncs(self, launches: Sequence[int]) -> float | None:
        """Return the share that is saved where these rows of `launches` do not wait; None where no replayed step holds one that does."""
        if self.study is None:
            return None
        rows, graphs = np.asarray(launches, dtype=np.int64), self.study.graphs
        changed = [without_calls(graph, unchanged(graph), rows) for graph in graphs]
        if all(times is None for times in changed):
            return None
        pairs = zip(graphs, changed, strict=True)
        return _share(self.study, [changed_step_ns(graph, unchanged(graph) if times is None else times) for graph, times in pairs])


def _of_settings(study: Study, settings: Sequence[Setting]) -> float | None:
    """Return the share that those of `settings` save that are about something in the steps; None where none is."""
    try:
        found = study.what_if(settings)
    except InputError:
        rest = [setting for setting in settings if _applies(study, setting)] if len(settings) > 1 else []
        return _of_settings(study, rest) if rest else None
    return _share(study, [after for _, _, after in found.per_step_ns])


def _applies(study: Study, setting: Setting) -> bool:
    try:
        study.what_if([setting])
    except InputError:
        return False
    return True


def _share(study: Study, changed_ns: Sequence[float]) -> float:
    """Return how much shorter the steps are, each counted for those that it stands for, 0..1."""
    before = float(np.average(study.step_ns, weights=study.weights))
    after = float(np.average(changed_ns, weights=study.weights))
    return min(max(1 - after / before, 0.0), 1.0) if before else 0.0

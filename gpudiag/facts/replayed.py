"""Replays of the analysed steps, as far as facts need them: how much of the analysed time a change takes away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.replay import WhatIf
from gpudiag.timeline.whatif.analysed import study_of
from gpudiag.timeline.whatif.pace import at_plain_pace
from gpudiag.timeline.whatif.registry import parse
from gpudiag.timeline.whatif.setting import Setting
from gpudiag.timeline.whatif.study import Study

Floats = npt.NDArray[np.float64]


class Replays:
    """What changes give in the analysed steps of one window, each what-if replayed once. None wherever there is nothing to replay."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._known: dict[tuple[bool, tuple[str, ...]], float | None] = {}

    @cached_property
    def study(self) -> Study | None:
        """Return the what-ifs of the steps; None where nothing can be replayed."""
        return study_of(self._analysis)

    @cached_property
    def plain(self) -> Study | None:
        """Return the what-ifs of the steps at the pace without the profiler; `study` where that is not known, or the CPU is the device."""
        slowdown = self._analysis.profiler_slowdown
        if self.study is None or slowdown is None or slowdown <= 1 or self._analysis.device_kind == "cpu":
            return self.study
        return at_plain_pace(self.study, slowdown)

    @property
    def whole(self) -> bool:
        """Return whether every analysed step is replayed."""
        run = self._analysis.run_graph
        return run is not None and run.step_count >= self._analysis.steps["analysed"].sum()

    @cached_property
    def standard(self) -> tuple[WhatIf, ...]:
        """Return every standard what-if that applies, the largest gain first."""
        return self.study.standard() if self.study else ()

    def saved_share(self, *settings: str, plain: bool = False) -> float | None:
        """Return the share of the time, 0..1, that `settings` (as `--set` takes them) save at once; None where none of them applies.

        `plain`: in steps at the pace without the profiler, as what saves work of the device is to be judged.
        """
        key = (plain, settings)
        if key not in self._known:
            study = self.plain if plain else self.study
            self._known[key] = _of_settings(study, parse(settings)) if study else None
        return self._known[key]

    def with_kernels(self, new_ns: Floats) -> float | None:
        """Return the share that is saved, at the pace without the profiler, where row k of `kernels` takes new_ns[k] ns (NaN: as it is)."""
        return None if self.plain is None else _saved(self.plain.kernels(new_ns, "kernels", "these kernels take another time"))

    def without_syncs(self, launches: Sequence[int]) -> float | None:
        """Return the share that is saved where these rows of `launches` do not wait; None where no replayed step holds one that does."""
        found = self.study.without_syncs(np.asarray(launches, dtype=np.int64)) if self.study else None
        return None if found is None else _saved(found)


def _saved(found: WhatIf) -> float:
    return min(max(found.share, 0.0), 1.0)


def _of_settings(study: Study, settings: Sequence[Setting]) -> float | None:
    """Return the share that those of `settings` save that are about something in the steps; None where none is."""
    try:
        return study.saved_share(settings)
    except InputError:
        rest = [setting for setting in settings if _applies(study, setting)] if len(settings) > 1 else []
        return _of_settings(study, rest) if rest else None


def _applies(study: Study, setting: Setting) -> bool:
    try:
        study.saved_share([setting])
    except InputError:
        return False
    return True

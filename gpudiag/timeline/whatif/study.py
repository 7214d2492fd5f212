"""The steps of an analysis with changes, replayed in a run that goes on like them, also at the pace of the run without the profiler.

A step that the slowed host holds up gains nothing from faster kernels, while the plain step may be all the device's: what a change of the
device's work gives has to be asked of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.graph import NODE_KINDS, Graph
from gpudiag.model.timeline import WhatIf
from gpudiag.timeline.replay import steady_step_ns
from gpudiag.timeline.whatif import registry
from gpudiag.timeline.whatif.base import Floats, Setting, Times, WhatIfContext, read_times, set_kernel_times
from gpudiag.timeline.whatif.host_time import find_host_nodes, remove_syncs


def replay_kernel_times(graph: Graph, new_ns: Floats, busy_ns: Floats) -> float:
    """Return the time of a step in ns with row k of `kernels` taking new_ns[k] ns instead of `busy_ns` (NaN: as it is).

    In a run that goes on like it.
    """
    return replay_changed_step(graph, set_kernel_times(graph, read_times(graph), new_ns, busy_ns))


def replay_changed_step(graph: Graph, times: Times) -> float:
    """Return the time of a step in ns with `times`; work on a lane of its own holds nobody up, but the step lasts as long as all of it."""
    duration = np.where(times.own_lane, 0, times.duration_ns)
    return max(steady_step_ns(graph, duration, times.lag_ns + times.free_ns, times.dropped), _measure_longest_lane(graph, times))


def _measure_longest_lane(graph: Graph, times: Times) -> float:
    """Return the largest total of the work on lanes of its own, for one step; without that of earlier steps.

    A lane is the work of one kind (copies, collectives) that came from one stream.
    """
    number = np.arange(graph.kind.size)
    alone = times.own_lane & (number > graph.carried)
    if not alone.any():
        return 0.0
    _, lane = np.unique(graph.lane[alone] * len(NODE_KINDS) + graph.kind[alone], return_inverse=True)
    return float(np.bincount(lane, weights=times.duration_ns[alone]).max()) / graph.step_count


class Study:
    """What-ifs on `run`, the steps in the order in which they ran; where it is None, on the representative steps `graphs`.

    `step_names`: by row of `steps`; `weights`: how many steps each of `graphs` stands for, else one; `notes`: what every result says.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        step_names: Mapping[int, str],
        context: WhatIfContext,
        weights: Sequence[int] | None = None,
        run: Graph | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.representatives = tuple(graphs)
        self.graphs = self.representatives if run is None else (run,)
        self.weights = (1,) if run is not None else tuple(weights or [1] * len(self.graphs))
        self.context = context
        self._names = step_names
        self._notes = notes
        self._alone = run is None
        self._known: dict[tuple[Setting, ...], WhatIf] = {}

    @cached_property
    def step_ns(self) -> tuple[float, ...]:
        """Return the time of a step of each of `graphs` in ns with nothing changed."""
        return tuple(steady_step_ns(graph) for graph in self.graphs)

    @property
    def mean_ns(self) -> float:
        """Return the mean time of a step in ns with nothing changed, each graph counted by its weight."""
        return float(np.average(self.step_ns, weights=self.weights))

    def with_graphs(self, change: Callable[[Graph], Graph]) -> Study:
        """Return what-ifs on the graphs that `change` returns for those of this one."""
        run = None if self._alone else change(self.graphs[0])
        return Study(tuple(map(change, self.representatives)), self._names, self.context, self.weights, run, self._notes)

    def what_if(self, settings: Sequence[Setting]) -> WhatIf:
        """Return the steps with all `settings` at once; raises InputError where one of them is about nothing that a step holds."""
        found = self._what_if(settings)
        return found if found.per_step_ns else msgspec.structs.replace(found, per_step_ns=self._each(settings))

    def saved_share(self, settings: Sequence[Setting]) -> float:
        """Return the share of the time, 0..1, that all `settings` save at once; raises InputError as what_if does."""
        return min(max(self._what_if(settings).share, 0.0), 1.0)

    def standard(self) -> tuple[WhatIf, ...]:
        """Return every standard what-if that applies to the steps, the largest gain first."""
        found = []
        for setting in registry.list_standard():
            try:
                found.append(self._what_if([setting]))
            except InputError:  # about nothing that these steps hold
                continue
        return tuple(sorted(found, key=lambda what_if: -what_if.share))

    def kernels(self, new_ns: Floats, name: str, words: str) -> WhatIf:
        """Return the steps with row k of `kernels` taking new_ns[k] ns (NaN: as it is)."""
        return self._result(name, words, [replay_kernel_times(graph, new_ns, self.context.busy_ns) for graph in self.graphs], 1.0)

    def without_syncs(self, launches: npt.NDArray[np.int64]) -> WhatIf | None:
        """Return the steps in which these rows of `launches` do not wait; None where the steps hold none that does."""
        changed = [remove_syncs(graph, read_times(graph), self.context, launches) for graph in self.graphs]
        if all(times is None for times in changed):
            return None
        pairs = zip(self.graphs, changed, strict=True)
        times = [replay_changed_step(graph, read_times(graph) if new is None else new) for graph, new in pairs]
        return self._result("sync", "these calls do not wait for the device", times, 1.0)

    def _what_if(self, settings: Sequence[Setting]) -> WhatIf:
        """Return the steps with all `settings`; each is replayed once, for facts and the table of standard what-ifs ask for the same."""
        key = tuple(settings)
        if key not in self._known:
            times = self._changed(self.graphs, settings)
            changed = [replay_changed_step(graph, new) for graph, new in zip(self.graphs, times, strict=True)]
            words = "; ".join(registry.KIND_BY_NAME[setting.name].words(setting) for setting in settings)
            self._known[key] = self._result(", ".join(map(str, settings)), words, changed, times[0].samples if times else 1.0)
        return self._known[key]

    def _changed(self, graphs: Sequence[Graph], settings: Sequence[Setting]) -> list[Times]:
        times = [read_times(graph) for graph in graphs]
        for setting in settings:
            times = self._with(graphs, times, setting)
        return times

    def _with(self, graphs: Sequence[Graph], times: Sequence[Times], setting: Setting) -> list[Times]:
        kind = registry.KIND_BY_NAME[setting.name]
        found = [kind.apply(graph, before, self.context, setting) for graph, before in zip(graphs, times, strict=True)]
        # what an earlier setting has taken away already is no error: fused may leave no copy to overlap
        if all(new is None for new in found) and not self._applies(setting):
            raise InputError(f"{setting}: does not apply: {kind.absent}", f"there are {registry.format_names()}")
        return [before if new is None else new for before, new in zip(times, found, strict=True)]

    def _applies(self, setting: Setting) -> bool:
        """Return whether the steps as measured hold anything that `setting` is about."""
        kind = registry.KIND_BY_NAME[setting.name]
        return any(kind.apply(graph, read_times(graph), self.context, setting) is not None for graph in self.graphs)

    def _each(self, settings: Sequence[Setting]) -> tuple[tuple[str, float, float], ...]:
        """Return (step, unchanged, changed) of each representative step, in a run that repeats it."""
        times = zip(self.representatives, self._changed(self.representatives, settings), strict=True)
        return tuple((self._name(graph), steady_step_ns(graph), replay_changed_step(graph, new)) for graph, new in times)

    def _name(self, graph: Graph) -> str:
        return self._names.get(graph.step, str(graph.step))

    def _result(self, name: str, words: str, changed: Sequence[float], samples: float) -> WhatIf:
        both = zip(self.graphs, self.step_ns, changed, strict=True)
        rows = tuple((self._name(graph), old, new) for graph, old, new in both) if self._alone else ()
        before, after = self.mean_ns, float(np.average(changed, weights=self.weights))
        share = 1 - after / samples / before if before else 0.0
        notes = (f"gain per sample: a step has {samples:g} x the samples",) if samples != 1 else ()
        return WhatIf(name, words, before, after, share, rows, (*notes, *self._notes))


FASTEST_FACTOR = 0.5
"""Least part of what the slow-down alone leaves of the host's time (heuristic: recording without stacks at most doubles it). Where the
device fills the plain step, the host can be this fast and nothing would show it."""

WITHIN_SHARE = 0.02
"""Part of the plain step by which a replay may be shorter and still meet it (heuristic: the scatter of a median of few steps)."""

_HALVINGS = 5
"""1/32 of the range that is searched: finer than the slow-down is known."""


def adjust_to_plain_pace(study: Study, slowdown: float) -> Study:
    """Return `study` with the host as fast as the steps without the profiler allow, those being `slowdown` (> 1) times as short."""
    plain = study.mean_ns / slowdown
    return _speed_up_host(study, _find_factor(study, plain * (1 - WITHIN_SHARE), FASTEST_FACTOR / slowdown, 1 / slowdown))


def _find_factor(study: Study, least_ns: float, low: float, high: float) -> float:
    """Return the smallest factor on the host's time, `low` to `high`, with which a step still takes `least_ns`.

    It takes longer with a slower host, never shorter; with `high`, 1 / slow-down, it is not shorter than the plain step, for no more than
    all of it can shrink by that.
    """
    if _speed_up_host(study, low).mean_ns >= least_ns:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _speed_up_host(study, middle).mean_ns >= least_ns else (middle, high)
    return high


def _speed_up_host(study: Study, factor: float) -> Study:
    return study.with_graphs(lambda graph: _scale_host(graph, factor))


def _scale_host(graph: Graph, factor: float) -> Graph:
    held = np.where(find_host_nodes(graph), np.rint(graph.duration_ns * factor), graph.duration_ns).astype(np.int64)
    return msgspec.structs.replace(graph, duration_ns=held)


def build_study(analysis: Analysis) -> Study | None:
    """Return what answers what-ifs on `analysis`; None where its steps cannot be replayed."""
    if not analysis.graphs:
        return None
    context = WhatIfContext(
        analysis.trace,
        on_cpu=analysis.device_kind == "cpu",
        device=analysis.device,
        syncs=analysis.syncs,
        samples=_find_batch_size(analysis.step_records),
    )
    names = dict(analysis.steps.select("id", "name").iter_rows())
    if analysis.run_graph is not None:
        return Study(analysis.graphs, names, context, run=analysis.run_graph, notes=_name_replayed(analysis.run_graph, analysis.steps))
    # How many of the analysed steps each of `rows` stands for: those whose length is nearest to its own, at least itself. A plain mean
    # over the three would count a checkpoint in one step of a hundred as if it were in every third
    rows = [graph.step for graph in analysis.graphs]
    length = (analysis.steps["end_ns"] - analysis.steps["start_ns"]).to_numpy()
    every = length[analysis.steps["analysed"].to_numpy()]
    nearest = np.abs(every[:, None] - length[list(rows)][None, :]).argmin(axis=1)
    return Study(analysis.graphs, names, context, tuple(np.maximum(np.bincount(nearest, minlength=len(rows)), 1).tolist()))


def _name_replayed(run: Graph, steps: pl.DataFrame) -> tuple[str, ...]:
    """Return which of the analysed steps are replayed, in words; () where all are."""
    count, last = int(steps["analysed"].sum()), run.step + run.step_count - 1
    if run.step_count >= count:
        return ()
    part = f"{steps['name'][run.step]} to {steps['name'][last]}"
    return (f"replayed: {part}, {run.step_count} of {count} steps; the others are taken to be like them",)


def _find_batch_size(records: pl.DataFrame | None) -> int | None:
    """Return the batch size that most steps had; None where none was recorded."""
    if records is None:
        return None
    found = records["samples"].drop_nulls().mode().sort()
    return int(found[-1]) if len(found) and found[-1] > 0 else None

"""The steps of an analysis with changes, replayed in a run that goes on like them, also at the pace of the run without the profiler.

A step that the slowed host holds up gains nothing from faster kernels, while the plain step may be all the device's: what a change of the
device's work gives has to be asked of the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.arrays import Floats
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.graph import NODE_KINDS, Graph
from gpudiag.model.timeline import Breakdown, WhatIf
from gpudiag.timeline.replay import steady_step_ns
from gpudiag.timeline.whatif import registry
from gpudiag.timeline.whatif.base import Setting, Times, WhatIfContext, read_times, set_kernel_times
from gpudiag.timeline.whatif.host_time import find_host_nodes, remove_waits


def replay_changed_step(graph: Graph, times: Times) -> float:
    """Return the time of a step in ns with `times`; work on a lane of its own holds nobody up, but the step lasts as long as all of it.

    Such a lane is the work of one kind (copies, collectives) that came from one stream, without that of earlier steps.
    """
    duration = np.where(times.own_lane, 0, times.duration_ns)
    step_ns = steady_step_ns(graph, duration, times.lag_ns + times.free_ns, times.dropped)
    alone = times.own_lane & (np.arange(graph.kind.size) > graph.carried)
    if not alone.any():
        return max(step_ns, 0.0)
    _, lane = np.unique(graph.lane[alone] * len(NODE_KINDS) + graph.kind[alone], return_inverse=True)
    return max(step_ns, float(np.bincount(lane, weights=times.duration_ns[alone]).max()) / graph.step_count)


class Study:
    """What-ifs on `run`, the steps in the order in which they ran; where it is None, on the representative steps `graphs`.

    `step_names`: by row of `steps`; `weights`: how many steps each of `graphs` stands for, else one; `notes`: what every result says;
    `breakdown`: of the analysed steps, whose causes limit what is gained.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        step_names: Mapping[int, str],
        context: WhatIfContext,
        weights: Sequence[int] | None = None,
        run: Graph | None = None,
        notes: tuple[str, ...] = (),
        breakdown: Breakdown | None = None,
    ) -> None:
        self.representatives = tuple(graphs)
        self.graphs = self.representatives if run is None else (run,)
        self.weights = (1,) if run is not None else tuple(weights or [1] * len(self.graphs))
        self.context = context
        self._names = step_names
        self._notes = notes
        self._breakdown = breakdown
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

    def with_host_time(self, factor: float) -> Study:
        """Return what-ifs on the same steps with the host's own time times `factor`."""
        graphs = []
        for graph in (*self.representatives, *(() if self._alone else self.graphs)):
            held = np.where(find_host_nodes(graph), np.rint(graph.duration_ns * factor), graph.duration_ns).astype(np.int64)
            graphs.append(msgspec.structs.replace(graph, duration_ns=held))
        run = None if self._alone else graphs.pop()
        return Study(graphs, self._names, self.context, self.weights, run, self._notes, self._breakdown)

    def what_if(self, settings: Sequence[Setting]) -> WhatIf:
        """Return the steps with all `settings` at once; raises InputError where one of them is about nothing that a step holds."""
        found = self._what_if(settings)
        if found.per_step_ns:
            return found
        # Each representative step, in a run that repeats it
        times = zip(self.representatives, self._apply(self.representatives, settings), strict=True)
        rows = tuple((self._name(graph), steady_step_ns(graph), replay_changed_step(graph, new)) for graph, new in times)
        return msgspec.structs.replace(found, per_step_ns=rows)

    def saved_share(self, settings: Sequence[Setting]) -> float:
        """Return the share of the time, 0..1, that all `settings` save at once; raises InputError as what_if does."""
        return min(max(self._what_if(settings).share, 0.0), 1.0)

    def standard(self) -> tuple[WhatIf, ...]:
        """Return every standard what-if that applies to the steps, the largest gain first."""
        found = []
        for setting in (Setting(kind.name, kind.standard) for kind in registry.KINDS if kind.standard is not None):
            try:
                found.append(self._what_if([setting]))
            except InputError:  # about nothing that these steps hold
                continue
        return tuple(sorted(found, key=lambda what_if: -what_if.share))

    def share_with_kernels(self, new_ns: Floats) -> float:
        """Return the share of the time that is saved with row k of `kernels` taking new_ns[k] ns (NaN: as it is)."""
        return self._share([set_kernel_times(graph, read_times(graph), new_ns, self.context.busy_ns) for graph in self.graphs])

    def scale_kernels(
        self, factor: Floats, groups: npt.NDArray[np.int64], count: int, settings: Sequence[Setting] = ()
    ) -> tuple[float, Floats]:
        """Return the mean time of a step in ns after `settings`, with row k of `kernels` taking factor[k] times as long.

        Beside it the time of the kernels of each of `count` groups in a step, row k of `kernels` being of groups[k].
        """
        by_row = np.append(factor, 1.0)  # the last: nodes that are no kernel
        changed, sums = [], []
        for graph, times in zip(self.graphs, self._apply(self.graphs, settings), strict=True):
            held = np.rint(times.duration_ns * by_row[graph.kernel]).astype(np.int64)
            changed.append(replay_changed_step(graph, msgspec.structs.replace(times, duration_ns=held)))
            own = (graph.kernel >= 0) & (np.arange(graph.kind.size) > graph.carried)
            sums.append(np.bincount(groups[graph.kernel[own]], held[own], minlength=count) / graph.step_count)
        return float(np.average(changed, weights=self.weights)), np.average(sums, axis=0, weights=self.weights)

    def count_samples(self, settings: Sequence[Setting]) -> float:
        """Return how many times the samples of the recorded step a step has after `settings`."""
        return self._apply(self.graphs, settings)[0].samples

    def share_without_syncs(self, launches: npt.NDArray[np.int64]) -> float | None:
        """Return the share of the time saved where these rows of `launches` do not wait; None where the steps hold none that does."""
        changed = [
            remove_waits(graph, read_times(graph), self.context, (graph.launch >= 0) & np.isin(graph.launch, launches))
            for graph in self.graphs
        ]
        if all(times is None for times in changed):
            return None
        return self._share([read_times(graph) if new is None else new for graph, new in zip(self.graphs, changed, strict=True)])

    def _share(self, times: Sequence[Times]) -> float:
        changed = [replay_changed_step(graph, new) for graph, new in zip(self.graphs, times, strict=True)]
        return 1 - float(np.average(changed, weights=self.weights)) / self.mean_ns if self.mean_ns else 0.0

    def _what_if(self, settings: Sequence[Setting]) -> WhatIf:
        """Return the steps with all `settings`; each is replayed once, for facts and the table of standard what-ifs ask for the same."""
        key = tuple(settings)
        if key not in self._known:
            times = self._apply(self.graphs, settings)
            changed = [replay_changed_step(graph, new) for graph, new in zip(self.graphs, times, strict=True)]
            kinds = [registry.KIND_BY_NAME[setting.name] for setting in settings]
            words = "; ".join(kind.words(setting) for kind, setting in zip(kinds, settings, strict=True))
            standard = len(kinds) == 1 and settings[0] == Setting(kinds[0].name, kinds[0].standard or "")
            most, samples = self._limit_saving_ns(settings, times), times[0].samples if times else 1.0
            found = self._result(", ".join(map(str, settings)), words, changed, samples, None if samples != 1 else most)
            self._known[key] = msgspec.structs.replace(found, short=kinds[0].short) if standard else found
        return self._known[key]

    def _limit_saving_ns(self, settings: Sequence[Setting], times: Sequence[Times]) -> float | None:
        """Return the most that a step can lose in ns: the idle time of the causes in the breakdown, and the device's work taken away.

        In the replay an earlier host would also use waits for something else: for results, for work outside the recording, or such as
        nothing explains. None: no limit (nothing runs beside the host of a CPU, and a change of the device's work gains no more than that).
        """
        breakdown = self._breakdown
        kinds = [kind for setting in settings if (kind := registry.KIND_BY_NAME[setting.name]).idle]
        if breakdown is None or self.context.on_cpu or breakdown.wall_ns <= 0 or not kinds:
            return None
        buckets, less = breakdown.buckets_ns, []
        idle_ns: dict[str, int] = {
            cause: getattr(buckets, cause) for kind in kinds if getattr(buckets, kind.idle[0]) for cause in kind.idle
        }
        for graph, new in zip(self.graphs, times, strict=True):
            own = (graph.kernel >= 0) & (np.arange(graph.kind.size) > graph.carried)
            less.append(float((graph.duration_ns - np.where(new.own_lane, 0, new.duration_ns))[own].sum()) / graph.step_count)
        return sum(idle_ns.values()) / breakdown.wall_ns * self.mean_ns + max(0.0, float(np.average(less, weights=self.weights)))

    def _apply(self, graphs: Sequence[Graph], settings: Sequence[Setting]) -> list[Times]:
        times = [read_times(graph) for graph in graphs]
        for setting in settings:
            kind = registry.KIND_BY_NAME[setting.name]
            found = [kind.apply(graph, before, self.context, setting) for graph, before in zip(graphs, times, strict=True)]
            # what an earlier setting has taken away already is no error (fused may leave no copy to overlap): the steps as measured decide
            if all(new is None for new in found) and all(
                kind.apply(graph, read_times(graph), self.context, setting) is None for graph in self.graphs
            ):
                raise InputError(f"{setting}: does not apply: {kind.absent}", f"there are {registry.format_names()}")
            times = [before if new is None else new for before, new in zip(times, found, strict=True)]
        return times

    def _name(self, graph: Graph) -> str:
        return self._names.get(graph.step, str(graph.step))

    def _result(self, name: str, words: str, changed: Sequence[float], samples: float, most: float | None = None) -> WhatIf:
        both = zip(self.graphs, self.step_ns, changed, strict=True)
        rows = tuple((self._name(graph), old, new) for graph, old, new in both) if self._alone else ()
        before, after = self.mean_ns, float(np.average(changed, weights=self.weights))
        notes = (f"gain per sample: a step has {samples:g} x the samples, and a training then differs",) if samples != 1 else ()
        if most is not None and after < before - most:
            after, notes = before - most, ("no more than the breakdown of the steps gives to these causes",)
        share = 1 - after / samples / before if before else 0.0
        return WhatIf(name, words, before, after, share, rows, (*notes, *self._notes))


FASTEST_FACTOR = 0.5
"""Least part of what the slow-down alone leaves of the host's time (heuristic: recording without stacks at most doubles it). Where the
device fills the plain step, the host can be this fast and nothing would show it."""

WITHIN_SHARE = 0.02
"""Part of the plain step by which a replay may be shorter and still meet it (heuristic: the scatter of a median of few steps)."""

_HALVINGS = 5
"""1/32 of the range that is searched: finer than the slow-down is known."""


def adjust_to_plain_pace(study: Study, slowdown: float) -> Study:
    """Return `study` with the host as fast as the steps without the profiler allow, those being `slowdown` (> 1) times as short.

    The smallest factor on the host's time with which a step still takes as long as the plain one. It takes longer with a slower host, never
    shorter; with 1 / slow-down it is not shorter than the plain step, for no more than all of it can shrink by that.
    """
    least_ns = study.mean_ns / slowdown * (1 - WITHIN_SHARE)
    low, high = FASTEST_FACTOR / slowdown, 1 / slowdown
    fastest = study.with_host_time(low)
    if fastest.mean_ns >= least_ns:
        return fastest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if study.with_host_time(middle).mean_ns >= least_ns else (middle, high)
    return study.with_host_time(high)


class WhatIfResults:
    """What changes give in the steps of one analysis, each what-if replayed once. None wherever there is nothing to replay."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._known: dict[tuple[str, ...], float | None] = {}

    @cached_property
    def study(self) -> Study | None:
        """Return the what-ifs of the steps; None where nothing can be replayed."""
        return build_study(self._analysis)

    @cached_property
    def standard(self) -> tuple[WhatIf, ...]:
        """Return every standard what-if that applies to the steps, the largest gain first."""
        return self.study.standard() if self.study else ()

    @cached_property
    def plain(self) -> Study | None:
        """Return the what-ifs of the steps at the pace without the profiler; `study` where that is not known, or the CPU is the device."""
        slowdown = self._analysis.profiler_slowdown
        if self.study is None or slowdown is None or slowdown <= 1 or self._analysis.device_kind == "cpu":
            return self.study
        return adjust_to_plain_pace(self.study, slowdown)

    def holds_all(self, *codes: str) -> bool:
        """Return whether what `codes` take away cannot stand in steps that are not replayed: all are, or it is work of the device."""
        run = self._analysis.run_graph
        whole = run is not None and run.step_count >= self._analysis.steps["analysed"].sum()
        return bool(whole) or _save_device_work(registry.parse_settings(codes))

    def saved_share(self, *codes: str) -> float | None:
        """Return the share of the time, 0..1, that `codes` (as `--set` takes them) save at once; None where none of them applies.

        What saves work of the device alone is judged in steps at the pace without the profiler.
        """
        if codes not in self._known:
            settings = registry.parse_settings(codes)
            share = self._replay(settings)
            if share is None and len(settings) > 1:  # some are about nothing in the steps
                applying = [setting for setting in settings if self._replay([setting]) is not None]
                share = self._replay(applying) if applying else None
            self._known[codes] = share
        return self._known[codes]

    def _replay(self, settings: Sequence[Setting]) -> float | None:
        try:
            share = self.study.saved_share(settings) if self.study else None
            return self.plain.saved_share(settings) if _save_device_work(settings) and self.plain else share
        except InputError:  # about nothing in the steps
            return None


def _save_device_work(settings: Sequence[Setting]) -> bool:
    return all(registry.KIND_BY_NAME[setting.name].of_device for setting in settings)


def run_what_ifs(analysis: Analysis, named: Iterable[tuple[str, ...]] = ()) -> WhatIfResults:
    """Replay the steps of `analysis` with every standard what-if, and with those that rules name by their codes."""
    what_ifs = WhatIfResults(analysis)
    for codes in dict.fromkeys(named):
        what_ifs.saved_share(*codes)
    if what_ifs.study and what_ifs.standard:
        what_ifs.study.context.forget_tables()
    return what_ifs


def build_study(analysis: Analysis) -> Study | None:
    """Return what answers what-ifs on `analysis`; None where its steps cannot be replayed."""
    if not analysis.graphs:
        return None
    samples = None
    if analysis.step_records is not None:  # the batch size that most steps had
        sizes = analysis.step_records["samples"].drop_nulls().mode().sort()
        samples = int(sizes[-1]) if len(sizes) and sizes[-1] > 0 else None
    on_cpu = analysis.device_kind == "cpu"
    context = WhatIfContext(analysis.trace, on_cpu=on_cpu, device=analysis.device, syncs=analysis.syncs, samples=samples)
    steps, run = analysis.steps, analysis.run_graph
    names = dict(steps.select("id", "name").iter_rows())
    if run is not None:
        count, notes = int(steps["analysed"].sum()), tuple[str, ...]()
        if run.step_count < count:
            part = f"{steps['name'][run.step]} to {steps['name'][run.step + run.step_count - 1]}"
            notes = (f"replayed: {part}, {run.step_count} of {count} steps; the others are taken to be like them",)
        return Study(analysis.graphs, names, context, run=run, notes=notes, breakdown=analysis.breakdown)
    # How many of the analysed steps each of `rows` stands for: those whose length is nearest to its own, at least itself. A plain mean
    # over the three would count a checkpoint in one step of a hundred as if it were in every third
    rows = [graph.step for graph in analysis.graphs]
    length = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    every = length[steps["analysed"].to_numpy()]
    nearest = np.abs(every[:, None] - length[list(rows)][None, :]).argmin(axis=1)
    weights = tuple(np.maximum(np.bincount(nearest, minlength=len(rows)), 1).tolist())
    return Study(analysis.graphs, names, context, weights, breakdown=analysis.breakdown)

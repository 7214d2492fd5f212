"""The steps of a run with changes, replayed in a run that goes on like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.errors import InputError
from gpudiag.model.graph import NODE_KINDS, Graph
from gpudiag.model.replay import WhatIf
from gpudiag.timeline.replay import steady_step_ns
from gpudiag.timeline.whatif import registry
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Setting
from gpudiag.timeline.whatif.syncs import without_calls
from gpudiag.timeline.whatif.times import Floats, Times, unchanged, with_kernels


def kernel_times(graph: Graph, new_ns: Floats, busy_ns: Floats) -> float:
    """Return the time of a step in ns with row k of `kernels` taking new_ns[k] ns instead of `busy_ns` (NaN: as it is).

    In a run that goes on like it.
    """
    return changed_step_ns(graph, with_kernels(graph, unchanged(graph), new_ns, busy_ns))


def changed_step_ns(graph: Graph, times: Times) -> float:
    """Return the time of a step in ns with `times`; work on a lane of its own holds nobody up, but the step lasts as long as all of it."""
    duration = np.where(times.own_lane, 0, times.duration_ns)
    return max(steady_step_ns(graph, duration, times.lag_ns + times.free_ns, times.dropped), _longest_lane_ns(graph, times))


def _longest_lane_ns(graph: Graph, times: Times) -> float:
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
        context: Context,
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
        for setting in registry.standard():
            try:
                found.append(self._what_if([setting]))
            except InputError:  # about nothing that these steps hold
                continue
        return tuple(sorted(found, key=lambda what_if: -what_if.share))

    def kernels(self, new_ns: Floats, name: str, words: str) -> WhatIf:
        """Return the steps with row k of `kernels` taking new_ns[k] ns (NaN: as it is)."""
        return self._result(name, words, [kernel_times(graph, new_ns, self.context.busy_ns) for graph in self.graphs], 1.0)

    def without_syncs(self, launches: npt.NDArray[np.int64]) -> WhatIf | None:
        """Return the steps in which these rows of `launches` do not wait; None where the steps hold none that does."""
        changed = [without_calls(graph, unchanged(graph), self.context, launches) for graph in self.graphs]
        if all(times is None for times in changed):
            return None
        pairs = zip(self.graphs, changed, strict=True)
        times = [changed_step_ns(graph, unchanged(graph) if new is None else new) for graph, new in pairs]
        return self._result("sync", "these calls do not wait for the device", times, 1.0)

    def _what_if(self, settings: Sequence[Setting]) -> WhatIf:
        """Return the steps with all `settings`; each is replayed once, for facts and the table of standard what-ifs ask for the same."""
        key = tuple(settings)
        if key not in self._known:
            self._known[key] = self._replayed(settings)
        return self._known[key]

    def _replayed(self, settings: Sequence[Setting]) -> WhatIf:
        times = self._changed(self.graphs, settings)
        changed = [changed_step_ns(graph, new) for graph, new in zip(self.graphs, times, strict=True)]
        words = "; ".join(registry.BY_NAME[setting.name].words(setting) for setting in settings)
        return self._result(", ".join(map(str, settings)), words, changed, times[0].samples if times else 1.0)

    def _changed(self, graphs: Sequence[Graph], settings: Sequence[Setting]) -> list[Times]:
        times = [unchanged(graph) for graph in graphs]
        for setting in settings:
            times = self._with(graphs, times, setting)
        return times

    def _with(self, graphs: Sequence[Graph], times: Sequence[Times], setting: Setting) -> list[Times]:
        kind = registry.BY_NAME[setting.name]
        found = [kind.apply(graph, before, self.context, setting) for graph, before in zip(graphs, times, strict=True)]
        # what an earlier setting has taken away already is no error: fused may leave no copy to overlap
        if all(new is None for new in found) and not self._applies(setting):
            raise InputError(f"{setting}: does not apply: {kind.absent}", f"there are {registry.names()}")
        return [before if new is None else new for before, new in zip(times, found, strict=True)]

    def _applies(self, setting: Setting) -> bool:
        """Return whether the steps as measured hold anything that `setting` is about."""
        kind = registry.BY_NAME[setting.name]
        return any(kind.apply(graph, unchanged(graph), self.context, setting) is not None for graph in self.graphs)

    def _each(self, settings: Sequence[Setting]) -> tuple[tuple[str, float, float], ...]:
        """Return (step, unchanged, changed) of each representative step, in a run that repeats it."""
        times = zip(self.representatives, self._changed(self.representatives, settings), strict=True)
        return tuple((self._name(graph), steady_step_ns(graph), changed_step_ns(graph, new)) for graph, new in times)

    def _name(self, graph: Graph) -> str:
        return self._names.get(graph.step, str(graph.step))

    def _result(self, name: str, words: str, changed: Sequence[float], samples: float) -> WhatIf:
        both = zip(self.graphs, self.step_ns, changed, strict=True)
        rows = tuple((self._name(graph), old, new) for graph, old, new in both) if self._alone else ()
        before, after = self.mean_ns, float(np.average(changed, weights=self.weights))
        share = 1 - after / samples / before if before else 0.0
        notes = (f"gain per sample: a step has {samples:g} x the samples",) if samples != 1 else ()
        return WhatIf(name, words, before, after, share, rows, (*notes, *self._notes))

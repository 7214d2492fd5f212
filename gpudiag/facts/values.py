"""The facts of one analysis, each measured at most once, and the catalogue of all facts."""

from __future__ import annotations

import math
from types import ModuleType

from gpudiag.facts import (
    accumulation,
    attention,
    batch_sizes,
    capacity,
    casts,
    causes,
    ceilings,
    communication,
    compiling,
    composites,
    convolution,
    copies,
    coverage,
    debug_features,
    elementwise,
    exchange,
    filling,
    gemm,
    generation,
    gradients,
    graph_breaks,
    hardware_state,
    history,
    host_copies,
    host_time,
    host_work,
    irregular,
    launch,
    link_rate,
    loader,
    loader_work,
    low_precision,
    memory,
    occupancy,
    offload,
    optimizer,
    padding,
    pipeline,
    precision,
    price,
    queue,
    ranks,
    recurrent,
    run_stalls,
    settings,
    shape_syncs,
    sql,
    steps,
    syncs,
    telemetry,
    trust,
    utilisation,
    vocabulary,
    waits,
)
from gpudiag.facts.places import PLACES
from gpudiag.facts.registry import Fact, NotKnownError, Unit
from gpudiag.facts.window import Window
from gpudiag.model.advice import advice
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue, Missing, Where
from gpudiag.trace.garbage import give_back

MODULES: tuple[ModuleType, ...] = (
    steps, coverage, trust, causes, launch, queue, syncs, waits, shape_syncs, host_time, run_stalls, compiling, graph_breaks,
    debug_features, loader, loader_work, host_copies, host_work, padding, batch_sizes, price, utilisation, occupancy,
    filling, precision, low_precision, gemm,
    convolution, recurrent, elementwise, composites, vocabulary, casts, irregular,
    attention, optimizer, copies, communication, gradients, exchange, link_rate, pipeline, ranks,
    history, memory, settings, telemetry, ceilings,
    capacity, accumulation, hardware_state, generation, offload,
)  # fmt: skip
"""Every module that defines facts, in the order of the catalogue."""


def collect(modules: tuple[ModuleType, ...]) -> dict[str, Fact]:
    """Return the facts of `modules` by name; raises ValueError for a name that two facts have."""
    found: dict[str, Fact] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Fact) and found.setdefault(value.name, value) is not value:
                raise ValueError(f"two facts are named {value.name}")
    return found


CATALOGUE: dict[str, Fact] = collect(MODULES)
"""Fact name -> fact."""

MOST_TABLE_BYTES = 32 << 20
"""Memory that the tables which facts share may take in B, but for the kernels: large traces (100,000 kernels) are the ones that pass it."""


class Facts:
    """The facts of one analysis: lazy, each measured once. A failure inside a fact is Missing, and listed in `errors`."""

    def __init__(self, analysis: Analysis) -> None:
        self._window = Window(analysis)
        self._known: dict[str, FactValue | Missing] = {}
        self._replayed: set[str] = set()
        self.errors: dict[str, str] = {}
        """Fact or provider name -> exception, for those that failed (a bug, not a gap in the recording)."""

    def value(self, name: str) -> FactValue | Missing:
        """Return the value of fact `name` in its unit, or why it is not known; raises KeyError for a name that is no fact."""
        if name not in self._known:
            self._known[name] = self._measure(CATALOGUE[name])
        return self._known[name]

    def query(self, name: str, text: str, unit: Unit) -> FactValue | Missing:
        """Return the value of the SQL query `text`, which defines the fact `name` of a rule, or why it is not known; asked once."""
        key = f"sql:{unit}:{text}"
        if key not in self._known:
            self._known[key] = self._measure(Fact(name, unit, "", lambda window: sql.measure(text, unit, window.tables)))
        return self._known[key]

    @property
    def window(self) -> Window:
        """Return what the facts are measured on."""
        return self._window

    def forget_tables(self) -> None:
        """Let go of the tables that facts share, which take more memory than the kernels of the trace; known values stay."""
        self._window = Window(self._window.analysis, self._window.replays)
        give_back()

    def replayed(self, name: str) -> bool:
        """Return whether fact `name` was measured and rests on a replay of the dependency graph."""
        return name in self._replayed

    def _measure(self, wanted: Fact) -> FactValue | Missing:
        self._window.replayed = False
        try:
            value = _finite(wanted(self._window))
            if self._window.replayed:
                self._replayed.add(wanted.name)
            return value
        except NotKnownError as unknown:
            return Missing(advice(unknown.reason, self._window.analysis.trace.meta.recorder))
        except Exception as error:  # noqa: BLE001 - one broken fact must not cost the report
            return Missing(f"fact {wanted.name} failed: {self._failed(wanted.name, error)}")
        finally:
            self._spare()

    def _spare(self) -> None:
        """Let go of the tables that facts share where they take much memory: those that are asked for again are made again."""
        if self._window.table_bytes > MOST_TABLE_BYTES:
            self._window = self._window.without_tables()

    def places(self, provider: str) -> tuple[Where, ...]:
        """Return the places of `provider`; none where they are not known. Raises KeyError for a name that is no provider."""
        find = PLACES[provider]
        try:
            return find(self._window)
        except NotKnownError:
            return ()
        except Exception as error:  # noqa: BLE001 - a finding without places is still a finding
            self._failed(provider, error)
            return ()

    def _failed(self, name: str, error: Exception) -> str:
        self.errors[name] = f"{type(error).__name__}: {error}"
        return type(error).__name__


def _finite(value: FactValue) -> FactValue:
    """Return `value`; raises NotKnownError for NaN and infinity, which no comparison of a rule would notice."""
    if isinstance(value, float) and not math.isfinite(value):
        raise NotKnownError("the recording yields no finite number for this")
    return value

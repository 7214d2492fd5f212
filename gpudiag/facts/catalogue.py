"""The catalogue of all facts, and their values over one analysis, each measured at most once."""

from __future__ import annotations

import math
import time
from types import ModuleType

from gpudiag.facts import (
    capacity,
    communication,
    compilations,
    cudnn_layers,
    data_parallel,
    efficiency,
    fused_kernels,
    hardware_state,
    host_time,
    idle_time,
    input_pipeline,
    loops,
    matrix_products,
    memory_bound,
    needless_work,
    optimizer,
    precision,
    ranks,
    settings,
    slow_ops,
    sql,
    telemetry,
    whole_run,
)
from gpudiag.facts.call_sites import CALL_SITE_PROVIDERS
from gpudiag.facts.fields import find_field
from gpudiag.facts.old_names import OLD_NAMES
from gpudiag.facts.registry import WHAT_IF_NS, Fact, NotKnownError, Unit
from gpudiag.facts.window import Window
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue, Missing, Where
from gpudiag.model.trace import adapt_advice
from gpudiag.timeline.whatif.study import WhatIfResults
from gpudiag.trace.table_store import release_memory

MODULES: tuple[ModuleType, ...] = (
    efficiency,
    idle_time,
    compilations,
    host_time,
    loops,
    whole_run,
    settings,
    input_pipeline,
    matrix_products,
    precision,
    cudnn_layers,
    memory_bound,
    needless_work,
    slow_ops,
    fused_kernels,
    optimizer,
    communication,
    data_parallel,
    ranks,
    hardware_state,
    telemetry,
    capacity,
)
"""Every module that defines facts, in the order of the catalogue."""


def collect_facts(modules: tuple[ModuleType, ...]) -> dict[str, Fact]:
    """Return the facts of `modules` by name; raises ValueError for a name that two facts have."""
    found: dict[str, Fact] = {}
    for fact in (fact for module in modules for fact in module.FACTS):
        if found.setdefault(fact.name, fact) is not fact:
            raise ValueError(f"two facts are named {fact.name}")
    return found


CATALOGUE: dict[str, Fact] = collect_facts(MODULES)
"""Fact name -> fact."""


def find_fact(name: str) -> Fact | None:
    """Return the fact of that name, also an old one, or the field at that path; None where there is none."""
    return CATALOGUE.get(name) or find_field(name) or OLD_NAMES.get(name)


MOST_TABLE_BYTES = 32 << 20
"""Memory that the tables which facts share may take in B, but for the kernels: large traces (100,000 kernels) are the ones that pass it."""


LONG_S = 0.03
"""A fact that took longer than this in s was made of large tables: what they took goes back to the system, which takes 5 ms."""


class Facts:
    """The facts of one analysis: lazy, each measured once. A failure inside a fact is Missing, and listed in `errors`."""

    def __init__(self, analysis: Analysis, what_ifs: WhatIfResults | None = None) -> None:
        self.window = Window(analysis, what_ifs)
        """What the facts are measured on."""
        self._known: dict[str, FactValue | Missing] = {}
        self._replayed: set[str] = set()
        self.errors: dict[str, str] = {}
        """Fact or provider name -> exception, for those that failed (a bug, not a gap in the recording)."""

    def value(self, name: str, *, as_recorded: bool = False) -> FactValue | Missing:
        """Return the value of fact `name` in its unit, or why it is not known; raises KeyError for a name that is no fact.

        `as_recorded`: with what the profiler added to the idle time, where the fact leaves it out.
        """
        fact = find_fact(name)
        if fact is None:
            raise KeyError(name)
        self.window.as_recorded = as_recorded
        try:
            return self._measure(f"{name} as recorded" if as_recorded else name, fact)
        finally:
            self.window.as_recorded = False

    def what_if_ns(self, codes: tuple[str, ...], otherwise: FactValue | Missing) -> FactValue | Missing:
        """Return the time in ns that the analysed steps save with `codes` at once: replayed, else `otherwise`; or why it is not known."""

        def read_formula() -> float:
            if isinstance(otherwise, Missing):
                raise NotKnownError(otherwise.reason)
            return float(otherwise)

        name = f"{WHAT_IF_NS} {' '.join(codes)}"
        return self._measure(name, Fact(name, "ns", "", lambda window: window.what_if_ns(*codes, otherwise=read_formula)))

    def query(self, name: str, text: str, unit: Unit) -> FactValue | Missing:
        """Return the value of the SQL query `text`, which defines the fact `name` of a rule, or why it is not known; asked once."""
        measured = Fact(name, unit, "", lambda window: sql.measure_query(text, unit, window.tables))
        return self._measure(f"sql:{unit}:{text}", measured)

    def forget_tables(self, *, keep_kernels: bool = False) -> None:
        """Let go of the tables that facts share, which take more memory than the kernels of the trace; known values stay."""
        self.window = self.window.without_tables() if keep_kernels else Window(self.window.analysis, self.window.what_ifs)
        release_memory()

    def replayed(self, name: str, codes: tuple[str, ...] = ()) -> bool:
        """Return whether fact `name`, or the what-if of `codes`, was measured and rests on a replay of the dependency graph."""
        return (f"{name} {' '.join(codes)}" if name == WHAT_IF_NS else name) in self._replayed

    def _measure(self, key: str, fact: Fact) -> FactValue | Missing:
        if key not in self._known:
            began = time.monotonic()
            self.window.replayed = False
            try:
                value = fact.measure(self.window)
                if isinstance(value, float) and not math.isfinite(value):  # no comparison of a rule would notice
                    raise NotKnownError("the recording yields no finite number for this")
                if self.window.replayed:
                    self._replayed.add(fact.name)
                self._known[key] = value
            except NotKnownError as unknown:
                self._known[key] = Missing(adapt_advice(unknown.reason, self.window.analysis.trace.meta.recorder))
            except Exception as error:  # noqa: BLE001 - one broken fact must not cost the report
                self.errors[fact.name] = f"{type(error).__name__}: {error}"
                self._known[key] = Missing(f"fact {fact.name} failed: {type(error).__name__}")
            finally:
                if self.window.table_bytes > MOST_TABLE_BYTES:
                    self.forget_tables(keep_kernels=True)
                elif time.monotonic() - began > LONG_S:
                    release_memory()
        return self._known[key]

    def places(self, provider: str) -> tuple[Where, ...]:
        """Return the places of `provider`; none where they are not known. Raises KeyError for a name that is no provider."""
        find = CALL_SITE_PROVIDERS[provider]
        try:
            return find(self.window)
        except NotKnownError:
            return ()
        except Exception as error:  # noqa: BLE001 - a finding without places is still a finding
            self.errors[provider] = f"{type(error).__name__}: {error}"
            return ()

"""The facts of one analysis, each measured at most once, and the catalogue of all facts."""

from __future__ import annotations

from types import ModuleType

from gpudiag.facts import (
    attention,
    causes,
    ceilings,
    communication,
    copies,
    coverage,
    elementwise,
    gemm,
    history,
    host_copies,
    launch,
    loader,
    memory,
    occupancy,
    optimizer,
    precision,
    queue,
    settings,
    steps,
    syncs,
    telemetry,
    trust,
    utilisation,
    waits,
)
from gpudiag.facts.places import PLACES
from gpudiag.facts.registry import Fact, NotKnownError
from gpudiag.facts.window import Window
from gpudiag.model.advice import advice
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue, Missing, Where

MODULES: tuple[ModuleType, ...] = (
    steps, coverage, trust, causes, launch, queue, syncs, waits, loader, host_copies, utilisation, occupancy, precision, gemm, elementwise,
    attention, optimizer, copies, communication, history, memory, settings, telemetry, ceilings,
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

    @property
    def window(self) -> Window:
        """Return what the facts are measured on."""
        return self._window

    def replayed(self, name: str) -> bool:
        """Return whether fact `name` was measured and rests on a replay of the dependency graph."""
        return name in self._replayed

    def _measure(self, wanted: Fact) -> FactValue | Missing:
        self._window.replayed = False
        try:
            value = wanted(self._window)
            if self._window.replayed:
                self._replayed.add(wanted.name)
            return value
        except NotKnownError as unknown:
            return Missing(advice(unknown.reason, self._window.analysis.trace.meta.recorder))
        except Exception as error:  # noqa: BLE001 - one broken fact must not cost the report
            return Missing(f"fact {wanted.name} failed: {self._failed(wanted.name, error)}")

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

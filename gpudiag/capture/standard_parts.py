"""The parts and options of a session unless it is told otherwise; NVTX ranges stand here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from gpudiag.capture.compile_log import CompileRecords
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.kept_tensors import KeptTensors
from gpudiag.capture.launch import choose_default_path
from gpudiag.capture.memory import Memory
from gpudiag.capture.phases import Phases
from gpudiag.capture.schedule import SESSION_OPTIONS, build_unknown_option_error
from gpudiag.capture.telemetry.sampler import DEFAULT_HZ, Telemetry
from gpudiag.hardware.peaks_cache import load_recording_peaks

AnyPath = str | os.PathLike[str]

NVTX_DOMAIN = "gpudiag"

MAX_NAMED_STEPS = 10_000
"""Steps with a name of their own: nvtx keeps every name for the life of the process. Later ones are 'step' with their number as payload."""


def _enter_phase(phase: str | None) -> Callable[..., None]:
    def enter(ranges: Ranges, *_: object) -> None:
        ranges._enter(phase)

    return enter


class Ranges(Hooks):
    """A process range for each step ('step 12') and a pushed range for each phase ('data', 'forward', 'backward', 'optimizer').

    At most one phase is open at a time: a phase ends where the next begins, at the end of its call, or with its step. So pushes and pops
    balance whatever the loop raises. 'forward' is the time from a batch to its backward pass: Python's own work on the batch included.
    Without a tool attached, a range costs about a microsecond.
    """

    def __init__(self) -> None:
        self._domain: Any = None
        self._step: Any = None
        self._phase: str | None = None
        self._names: dict[str, Any] = {}
        self._thread = 0

    def start(self, context: Context) -> None:
        """Open the domain."""
        try:
            import nvtx
        except ImportError:
            context.note("no NVTX ranges: the package nvtx is not installed (pip install 'gpudiag[train]')", None)
            return
        self._thread = threading.get_ident()
        self._domain = nvtx.get_domain(NVTX_DOMAIN)
        self._names = {name: self._domain.get_event_attributes(message=name) for name in ("data", "forward", "backward", "optimizer")}

    def step_began(self, number: int, at_ns: int) -> None:
        """Start the range of a step."""
        self._end_step()
        if self._domain is not None:
            name = f"step {number}" if number < MAX_NAMED_STEPS else "step"
            self._step = self._domain.start_range(self._domain.get_event_attributes(message=name, payload=number))

    def drop(self) -> None:
        """End what is open, and be silent from now on."""
        self._end_step()
        self._domain = None

    def _end_step(self, *_: Any, **__: Any) -> None:
        self._enter(None)
        step, self._step = self._step, None
        if step is not None:
            self._domain.end_range(step)

    step_ended = interrupted = close = _end_step

    def _enter(self, phase: str | None) -> None:
        """End the open phase and begin `phase`. NVTX keeps a stack for each thread: on another than the first nothing is done."""
        if self._domain is None or threading.get_ident() != self._thread:
            return
        if self._phase is not None:
            self._phase = None
            self._domain.pop_range()
        if phase is not None:
            self._domain.push_range(self._names[phase])
            self._phase = phase

    batch_asked = _enter_phase("data")
    batch_received = _enter_phase("forward")
    backward_began = _enter_phase("backward")
    optimizer_began = _enter_phase("optimizer")
    backward_ended = optimizer_ended = _enter_phase(None)


def make_standard_parts(*, telemetry_hz: float = DEFAULT_HZ, nvtx: bool = False, memory: bool = False, source: bool = True) -> list[Hooks]:
    """Return new parts for one session, in the order in which they hear of events.

    `telemetry_hz`: samples of clocks, power and load per second (0: none); `nvtx`: ranges for Nsight; `memory`: what memory is used for;
    `source`: reports may show lines of the program.
    Raises UsageError for what is no rate.
    """
    always = [Phases(), Telemetry(telemetry_hz), Inventory(source=source), KeptTensors(), CompileRecords()]
    return [*always, *([Ranges()] if nvtx else []), *([Memory()] if memory else [])]


def choose_session_path(path: AnyPath) -> Path:
    """Return `path`, or the default one where it is empty: runs/<time>, the same for all ranks of one torchrun."""
    return Path(os.fspath(path)) if os.fspath(path) else choose_default_path()


def build_session_options(options: Mapping[str, Any], what: str = "gpudiag.profile", more: Sequence[Hooks] = ()) -> dict[str, Any]:
    """Return the keyword arguments of a Session for the `options` given to `what`; the parts in `more` hear of events last.

    Without `parts` these are the standard ones, without `peaks` those measured before. Raises UsageError for an unknown option.
    """
    of_parts = signature(make_standard_parts).parameters.keys()
    for name in options:
        if name not in SESSION_OPTIONS and name not in of_parts:
            raise build_unknown_option_error(name, (*SESSION_OPTIONS, *of_parts), what)
    chosen = {"peaks": load_recording_peaks, **options}
    own = {name: chosen.pop(name) for name in of_parts & chosen.keys()}
    parts = chosen.pop("parts") if "parts" in chosen else make_standard_parts(**own)
    return {**chosen, "parts": [*parts, *more]}

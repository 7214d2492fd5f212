"""What records beside the steps (telemetry, phases, memory, ranges): each a Part, so that one that fails leaves the others at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpudiag.capture.hooks import Events, Listener, Note, Patches, find_overriding
from gpudiag.capture.schedule import WindowKind
from gpudiag.model.notices import Notice, NoticeCode

if TYPE_CHECKING:
    from gpudiag.capture.host_marks import HostMarks
    from gpudiag.capture.steps import StepRow


class Context(Protocol):
    """What a part may use of the session. `path` is the bundle's folder; it exists."""

    path: Path
    rank: int
    world_size: int
    patches: Patches
    """Whatever a part wraps through it is put back when the session ends."""
    events: Events
    marks: HostMarks

    def note(self, message: str, error: BaseException | None, code: NoticeCode = NoticeCode.FROM_MANIFEST, /) -> None:
        """Warn once, and keep `message` (with the kind of error, not its text) for the manifest."""

    def remember(self, message: str) -> bool:
        """Keep `message` for the manifest, without a warning; return whether it is new."""

    def notices(self) -> tuple[Notice, ...]:
        """Return what was noted so far, with codes."""

    def submit(self, target: Path, encode: Callable[[], bytes]) -> None:
        """Write encode() to `target` atomically, in the background."""

    def segment(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write `columns` as the next segment of `table` (model.trace), in the background."""


class Part(Listener):
    """Every method does nothing unless overridden, and is called on the training thread. One that raises switches the part off."""

    profile_memory = False
    """Whether the profiler of the site windows shall record the allocators' events for this part."""

    def start(self, context: Context) -> None:
        """Begin; the session has just been entered. Starting twice never happens."""

    def step_began(self, number: int, at_ns: int, unix_ns: int) -> None:
        """Step `number` begins at this mark (time.perf_counter_ns(), time.time_ns())."""

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """The running step ends; the part may fill in columns of `row`, later too if it sets `row.ready` to False meanwhile."""

    def interrupted(self) -> None:
        """The running step has no end (an epoch or the run is over): it leaves no row."""

    def window_began(self, index: int, kind: WindowKind) -> None:
        """A profiled window begins with its warm-up."""

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """The profiler of this window has stopped."""

    def flush(self) -> None:
        """Hand finished rows to context.segment(): called about every 10 s."""

    def close(self) -> None:
        """Finish and hand over what is left: the run is over, nothing else will be called but manifest() and drop()."""

    def drop(self) -> None:
        """Take everything back that the part has put into the process. Called last, always, also after a failure."""

    def manifest(self) -> Mapping[str, Any]:
        """Return fields of model.bundle.Manifest that this part knows."""
        return {}


class Parts:
    """The parts of one session; a call reaches every part that still works."""

    def __init__(self, parts: Sequence[Part], note: Note) -> None:
        self._note = note
        self._waiting = list(parts)
        self.working: list[Part] = []
        self._reached: dict[str, list[tuple[Part, Callable[..., None]]]] = {}
        self._events: Events | None = None

    def start(self, context: Context) -> None:
        """Start all parts and let them hear the events."""
        self._events = context.events
        self._events.failed = self._off
        for part in self._waiting:
            self.working.append(part)
            if self._guarded(part, part.start, context):
                self._events.add(part)

    def call(self, name: str, *args: object) -> None:
        """Call the method `name` of every part."""
        reached = self._reached.get(name)
        if reached is None:
            reached = self._reached[name] = find_overriding(self.working, Part, name)
        for part, method in reached:
            self._guarded(part, method, *args)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest fields of all parts."""
        fields: dict[str, Any] = {}
        for part in tuple(self.working):
            self._guarded(part, lambda part=part: fields.update(part.manifest()))
        return fields

    def drop(self) -> None:
        """Drop all parts; none works afterwards."""
        for part in tuple(self.working):
            self._off(part)

    def _guarded(self, part: Part, action: Callable[..., object], *args: object) -> bool:
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - a part that fails must stop neither the training nor the other parts
            self._off(part)
            self._note(f"{type(part).__name__.lower()} was switched off", error, NoticeCode.PART_SWITCHED_OFF)
            return False
        return True

    def _off(self, part: Listener) -> None:
        if not isinstance(part, Part) or part not in self.working:
            return
        self.working.remove(part)
        self._reached = {}
        if self._events is not None:
            self._events.remove(part)
        try:
            part.drop()
        except Exception as error:  # noqa: BLE001
            self._note(f"{type(part).__name__.lower()} could not be ended", error)

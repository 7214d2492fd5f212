"""How long the phases of every step took, profiled or not: columns of table step_records.

A step is the time between two marks, whoever sets them: steps(), step(), or `gpudiag run` at the end of an optimizer's step. Its time is
cut by the events of the training thread, so that no moment counts twice and the phases together never exceed the step:

* backward: inside Tensor.backward. optimizer: inside the step of a torch optimizer. One inside the other has the time (a closure's
  backward inside LBFGS, an optimizer that steps in a hook of the backward pass), the outer one keeps the rest.
* forward: from the moment from which nothing else was going on to the start of a backward pass, summed over micro-batches. It begins
  with a batch in hand, with the end of a backward pass or of an optimizer's step (the next micro-batch, the generator of a GAN), and,
  where no batch was seen since, with the mark: what fetches data without a DataLoader counts as forward.
* Nobody's: time that no backward pass follows within the step. A batch asked for gives up what came before it, so that waiting for
  batches, validation, logging and saving belong to no phase. Nor does it wait for a batch: a batch fetched ahead was in hand already.
* An open phase goes on over a mark. A step in which nothing was seen has null phases, not 0.

On runs that use a CUDA or HIP device when the step begins, the same edges are CUDA events on the current stream: the phases are times of
the device, which follows the host. Over a run they fit into the steps; in a single one they need not, since the host runs ahead. There,
copies from host to device are a phase of their own, taken out of that in which they stand on the same stream. The answers come later,
without waiting for them; a row that has none after MAX_WAITING steps stays null. So does a step with more spans than MAX_SPANS, and one
whose edges lie in the capture of a CUDA graph."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from gpudiag.capture.device_clock import DeviceClock, Stamp, install_copy_hooks
from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.schedule import WindowKind
from gpudiag.capture.steps import StepRow

MAX_WAITING = 64
"""Rows that wait for the device; a device is rarely more than a few steps behind. Older ones are given up, so that memory stays flat."""

MAX_SPANS = 128
"""Spans of one step that are timed on the device (two events each, a few us of the host): a step with an optimizer for each parameter."""

MAX_FULL = 3
"""Steps in succession with more spans than that after which the device is no longer asked."""

LATER = 128
"""Noted events that are worked out together: those of some 20 steps, in a quarter of a millisecond."""

MOST_NOTED = 4_096
"""Noted events that are worked out though no step has ended: where nobody marks steps, memory stays flat (0.7 ms)."""

MIN_SHARE = 0.8
"""Share of the distances between updates that must agree: an epoch's last group is often shorter."""

Noted = tuple[Callable[[int, Any], None], int, Any]
"""What happened, as the method that works it out, with its time and the row or optimizer."""


class Span(NamedTuple):
    """A phase between two stamps; a stamp is None where none could be taken."""

    phase: Phase
    begin: Stamp | None
    end: Stamp | None


CopySpan = tuple[Stamp | None, Any, int]
"""A copy that has begun, and what was known then: if any of it has changed at its end, another copy was timed inside it."""


class Accumulation:
    """Tells from the rows of a run whether gradients are accumulated over what is counted as a step."""

    def __init__(self) -> None:
        self._steps = self._with_backward = 0
        self._last: int | None = None
        self._gaps: Counter[int] = Counter()

    def add(self, row: StepRow) -> None:
        """Count a step, and its distance from the last that updated."""
        self._steps += 1
        self._with_backward += bool(row.backwards)
        if row.optimizer_steps:
            if self._last is not None:
                self._gaps[row.step - self._last] += 1
            self._last = row.step

    def interrupt(self) -> None:
        """An epoch is over: the distance across its end says nothing."""
        self._last = None

    def find_group(self) -> int | None:
        """Return how many counted steps make one update; None where each does, or no pattern shows."""
        total = sum(self._gaps.values())
        # Updates in the same distance before it is called a pattern: two may be chance (a skipped step of a GradScaler)
        if total < 3 or self._with_backward < MIN_SHARE * self._steps:
            return None
        distance, count = self._gaps.most_common(1)[0]
        return distance if distance > 1 and count >= MIN_SHARE * total else None

    def describe(self) -> str:
        """Return what to say of it; '' where nothing is accumulated."""
        group = self.find_group()
        if group is None:
            return ""
        ending = "th" if group % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(group % 10, "th")
        ordinal = {2: "second", 3: "third"}.get(group, f"{group}{ending}")
        return (
            f"the optimizer stepped in every {ordinal} step only: gradients are accumulated, and what is called "
            f"a step here is one batch of {group}; steps(loader, accumulation={group}) counts whole updates"
        )


class Phases(Hooks):
    """Fills h2d, forward, backward, optimizer, and their counts. `clock`: for tests.

    By the host's clock an event is a time and nothing else, so it is only noted: in the middle of a step each function that runs costs
    several times what it costs in a loop of its own. What was noted is worked out every LATER events, and before rows are written.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = DeviceClock() if clock is None else clock
        self._on_device = self._running = self._marked = self._full = self._in_window = False
        self._full_in_succession = self._nested = 0
        self._host: dict[Phase, int] = {}
        self._device: list[Span] = []
        self._waiting: deque[tuple[StepRow, list[Span]]] = deque()
        self._cutter: PhaseSpans[Any] = PhaseSpans(self._emit, 0)
        self._accumulation = Accumulation()
        self._noted: list[Noted] = []
        self._hear: Callable[[Noted], object] = self._noted.append
        self._clear()

    def start(self, context: Context) -> None:
        """Begin: what happens before the first mark may be the first step."""
        self._context = context
        self.step_began(0, time.perf_counter_ns())

    def step_began(self, number: int, at_ns: int) -> None:
        """Begin the step; it goes on with what is open where the one before it has just ended."""
        device_takes_over = not self._on_device and self._clock.usable  # this process uses a device now
        if device_takes_over:
            self._work_out()
            self._on_device, self._hear = True, _apply
            install_copy_hooks(self._context.patches, self.copy_begins, self.copy_ended)
        if device_takes_over or not self._running or not self._marked:  # nothing comes over from the step before
            self._running = True
            self._hear((self._begin, at_ns, None))
        self._marked = False

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """Fill in `row`; on a device once it has answered."""
        self._marked = True
        self._hear((self._end, at_ns, row))
        if len(self._noted) >= LATER and not self._in_window:
            self._work_out()

    def interrupted(self) -> None:
        """Forget the step: it leaves no row."""
        self._running = self._marked = False
        self._hear((self._interrupt, 0, None))

    def window_began(self, index: int, kind: WindowKind) -> None:
        """Work nothing out in the steps that are profiled."""
        self._in_window = True

    def window_ended(self, index: int, kind: WindowKind) -> None:
        """Work things out again."""
        self._in_window = False

    def close(self) -> None:
        """Ask the device once more; what has no answer stays unknown."""
        self.flush()
        self._give_up(0)
        if text := self._accumulation.describe():
            self._context.remember(text)

    def drop(self) -> None:
        """Hear no more, and let go of the rows that wait."""
        self._running = False
        self._work_out()
        self._clear()
        self._give_up(0)

    def batch_asked(self, at_ns: int) -> None:
        """Give up what came before."""
        if self._running:
            self._hear((self._restart, at_ns, None))
            self._bound_noted()

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """Begin with a batch in hand."""
        if self._running:
            self._hear((self._restart, at_ns, None))

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Begin a backward pass; one inside another is the same."""
        if self._running:
            self._hear((self._begin_backward, at_ns, None))
            self._bound_noted()

    def backward_ended(self, at_ns: int) -> None:
        """End the backward pass that began last."""
        if self._running:
            self._hear((self._end_backward, at_ns, None))

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """Begin the step of an optimizer; one inside another (a wrapper) is the same."""
        if self._running:
            self._hear((self._begin_optimizer, at_ns, id(optimizer)))
            self._bound_noted()

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """End the step of this optimizer."""
        if self._running:
            self._hear((self._end_optimizer, at_ns, id(optimizer)))

    def _bound_noted(self) -> None:
        if len(self._noted) >= MOST_NOTED:
            self._work_out()

    def _work_out(self) -> None:
        """Go through what was noted since the last time."""
        noted = self._noted[:]
        self._noted.clear()
        for one in noted:
            _apply(one)

    def _begin(self, at_ns: int, _: None) -> None:
        self._clear()
        self._cutter.restart(self._clock.stamp() if self._on_device else at_ns)

    def _end(self, at_ns: int, row: StepRow) -> None:
        self._cutter.cut(self._take_moment(at_ns))
        row.backwards, row.optimizer_steps = self._backwards, self._optimizer_steps
        self._accumulation.add(row)
        if self._on_device:
            # Let `row` wait for the device, and take what it has reached of those before
            if self._full_in_succession < MAX_FULL:
                self._full_in_succession = self._full_in_succession + 1 if self._full else 0
                if self._full_in_succession == MAX_FULL:
                    self._context.note(f"phases are no longer timed: {MAX_FULL} steps in succession had more than {MAX_SPANS}", None)
            if self._device and not self._full and not any(None in span for span in self._device):
                row.ready = False
                self._waiting.append((row, self._device))
            self._take_answers()
            self._give_up(MAX_WAITING)
        elif self._host:
            _fill(row, self._host, "host")
        self._clear()

    def _interrupt(self, *_: Any) -> None:
        self._accumulation.interrupt()
        self._clear()

    def _restart(self, at_ns: int, _: None) -> None:
        self._cutter.restart(self._take_moment(at_ns))

    def _begin_backward(self, at_ns: int, _: None) -> None:
        if self._cutter.inside("backward"):
            self._nested += 1
            return
        self._nested = 0
        self._backwards += 1
        self._cutter.begin("backward", 0, self._take_moment(at_ns))

    def _end_backward(self, at_ns: int, _: None) -> None:
        if self._nested:
            self._nested -= 1
        else:
            self._cutter.end("backward", 0, self._take_moment(at_ns))

    def _begin_optimizer(self, at_ns: int, optimizer: int) -> None:
        self._optimizer_steps += self._cutter.begin("optimizer", optimizer, self._take_moment(at_ns))

    def _end_optimizer(self, at_ns: int, optimizer: int) -> None:
        self._cutter.end("optimizer", optimizer, self._take_moment(at_ns))

    def copy_begins(self) -> CopySpan | None:
        """Return what is to be known at the end of the copy; None on another thread, between steps, or where no more is timed."""
        if not (self._running and self._on_device and not self._full and self._context.events.here):
            return None
        return self._clock.stamp(), self._cutter.since, len(self._device)

    def copy_ended(self, token: CopySpan) -> None:
        """Keep the time of the copy."""
        begin, since, spans = token
        if not self._running or (since, spans) != (self._cutter.since, len(self._device)):
            return
        end = self._clock.stamp()
        if begin is not None and since is not None and begin.stream != since.stream:
            self._emit("h2d", begin, end)  # beside the phase, not in it
        else:
            self._cutter.insert("h2d", begin, end)

    def _take_moment(self, at_ns: int) -> Any:
        """Return the moment of an event. On the host never one before the last: a mark may be set while an event is told of."""
        if self._on_device:
            return None if self._full else self._clock.stamp()
        since = self._cutter.since
        return at_ns if at_ns > since else since

    def _emit(self, phase: Phase, begin: Any, end: Any) -> None:
        if not self._on_device:
            if end > begin:
                self._host[phase] = self._host.get(phase, 0) + end - begin
        elif len(self._device) < MAX_SPANS:
            self._device.append(Span(phase, begin, end))
        else:
            self._full = True

    def _clear(self) -> None:
        if self._host:
            self._host = {}
        if self._device:
            self._device = []
        self._full = self._full_in_succession >= MAX_FULL
        self._backwards = self._optimizer_steps = 0

    def flush(self) -> None:
        """Fill in the rows: on a device those that it has reached."""
        self._work_out()
        self._take_answers()

    def _take_answers(self) -> None:
        while self._waiting:
            row, spans = self._waiting[0]
            # the last first: it tells soonest that the device is not there yet
            if not self._clock.answered(stamp for span in reversed(spans) for stamp in (span.end, span.begin) if stamp is not None):
                break
            self._waiting.popleft()
            sums: Counter[Phase] = Counter()
            for phase, begin, end in spans:
                length = self._clock.between(begin, end) if begin is not None and end is not None else None
                if length is None:
                    break
                sums[phase] += length
            else:  # all can be told
                _fill(row, sums, "device")
            row.ready = True
        if self._clock.broken is not None and self._full_in_succession < MAX_FULL:
            self._full_in_succession, self._full = MAX_FULL, True
            self._give_up(0)
            self._context.note("phases are no longer timed", self._clock.broken)

    def _give_up(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft()[0].ready = True


def _apply(noted: Noted) -> None:
    method, at_ns, what = noted
    method(at_ns, what)


def _fill(row: StepRow, sums: Mapping[Phase, int], clock: str) -> None:
    row.phase_clock = clock
    row.h2d_ns, row.forward_ns = sums.get("h2d"), sums.get("forward")
    row.backward_ns, row.optimizer_ns = sums.get("backward"), sums.get("optimizer")


Phase = Literal["h2d", "forward", "backward", "optimizer"]

Moment = TypeVar("Moment")


class PhaseSpans(Generic[Moment]):
    """Calls emit(phase, begin, end) for spans that never overlap; the rules stand in gpudiag.capture.phases.

    Moments must come in the order of time. At any moment either phases are open, one inside another (the innermost has the time), or
    none is: that time is forward if a backward pass follows, else nobody's.
    """

    def __init__(self, emit: Callable[[Phase, Moment, Moment], Any], now: Moment) -> None:
        self._emit = emit
        self._open: list[tuple[Phase, int]] = []
        self._before: list[tuple[Moment, Moment]] = []
        """Spans outside all phases that may turn out to be forward."""
        self.since = now
        """Where the running span began."""

    def restart(self, now: Moment) -> None:
        """Nothing is open and nothing is kept: a batch is asked for, or has come."""
        self._open.clear()
        self._before.clear()
        self.since = now

    def cut(self, now: Moment) -> None:
        """A step ends here and the next begins: an open phase goes on in it."""
        self._close(now)
        self._before.clear()

    def inside(self, phase: Phase) -> bool:
        """Return whether `phase` is open."""
        return bool(self._open) and any(name == phase for name, _ in self._open)

    def begin(self, phase: Phase, identity: int, now: Moment) -> bool:
        """Return whether no other of this phase is open; it begins, inside what is open. `identity` tells optimizers apart."""
        if (phase, identity) in self._open:  # the earlier one has raised: it never told its end
            del self._open[self._open.index((phase, identity)) :]
            self.since = now
        self._close(now)
        if phase == "backward":
            for span in self._before:
                self._emit("forward", *span)
        self._before.clear()
        outermost = not self.inside(phase)
        self._open.append((phase, identity))
        return outermost

    def end(self, phase: Phase, identity: int, now: Moment) -> None:
        """`phase` ends, and with it what was opened inside it and did not tell its end; nothing happens where it is not open."""
        if (phase, identity) in self._open:
            self._close(now)
            while self._open.pop() != (phase, identity):
                pass

    def insert(self, phase: Phase, begin: Moment, end: Moment) -> None:
        """`phase` lasted from `begin` to `end`, and nothing else happened in between."""
        self._close(begin)
        self._emit(phase, begin, end)
        self.since = end

    def _close(self, now: Moment) -> None:
        if self._open:
            self._emit(self._open[-1][0], self.since, now)
        else:
            self._before.append((self.since, now))
        self.since = now

"""Hooks in the training process: replaced attributes of torch that are put back, and the events that the parts of a recording hear."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol

from gpudiag.capture.schedule import WindowKind
from gpudiag.model.bundle import WORKERS_STARTED
from gpudiag.model.notices import Notice, NoticeCode

if TYPE_CHECKING:
    from gpudiag.capture.host_marks import HostMarks
    from gpudiag.capture.steps import StepRow


def skip_frame(function: Callable[..., Any], *, inner: bool = False) -> None:
    """Have torch.compile run the frames of `function` as they are (`inner`: and whatever they call), instead of compiling them.

    After a graph break the compiled program calls our wrappers as it would call torch, whose own frames are skipped: compiling ours takes
    time, warns of clocks, and counts as a recompilation. The interface is private and differs by version; torch._dynamo is not imported.
    """
    code = getattr(function, "__code__", None)
    if code is None or "torch" not in sys.modules:
        return
    with suppress(Exception):  # a version of torch that has neither: the frame is compiled, which is slower and no fault
        from torch._C import _dynamo

        eval_frame: Any = _dynamo.eval_frame
        if hasattr(eval_frame, "_FrameExecStrategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if inner else action.DEFAULT)
            eval_frame.set_code_exec_strategy(code, strategy)
        else:
            eval_frame.skip_code(code)


class StandIn:
    """A method that is called in place of another one. Whoever asks the class for the method gets the original.

    torch hands `torch.Tensor.backward` to `__torch_function__`, where subclasses and modes look it up in their tables or compare it
    by identity: they must find what they found without us. Only a call on an instance comes to `wrapper`.
    """

    def __init__(self, original: Any, wrapper: Callable[..., Any], below: Any) -> None:
        self._original, self.wrapper = original, wrapper
        self.below = below
        """What stood in the class before; None where the method was inherited."""
        self.ended = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._original if instance is None else MethodType(self.wrapper, instance)


class Patches:
    """Replaced attributes; `restore` puts every original back unless someone else has replaced it since."""

    def __init__(self) -> None:
        self._undo: list[Callable[..., object]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any], *, homes: Sequence[Any] = ()) -> None:
        """Replace `owner.name` by make(original); does nothing where this version of torch has no such attribute.

        `homes`: where else the same object stands under this name. pickle looks a function up where it was defined, and refuses it where
        it finds another one.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(original))
        skip_frame(wrapper)
        for place in (owner, *homes):
            if getattr(place, name, None) is original:
                setattr(place, name, wrapper)

                def undo(place: Any = place) -> None:
                    if getattr(place, name, None) is wrapper:
                        setattr(place, name, original)

                self._undo.append(undo)

    def wrap_method(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Have make(original) called for `instance.name()`, while `owner.name` stays what it is; does nothing where there is none."""
        original, own = getattr(owner, name, None), vars(owner).get(name)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(own.wrapper if isinstance(own, StandIn) else original))
        skip_frame(wrapper)
        skip_frame(StandIn.__get__)
        method = StandIn(original, wrapper, own)
        setattr(owner, name, method)

        def undo() -> None:
            method.ended = True
            top = vars(owner).get(name)
            if not isinstance(top, StandIn):
                return  # somebody else has replaced it since
            while isinstance(top, StandIn) and top.ended:  # one that was put on later may end later: it uncovers nothing that has ended
                top = top.below
            if top is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, top)

        self._undo.append(undo)

    def on_restore(self, undo: Callable[..., object]) -> None:
        """Call `undo` when the originals are put back."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put the originals back, the last one first."""
        while self._undo:
            self._undo.pop()()


class Note(Protocol):
    """Says once what is not recorded, and keeps it for the manifest; `code`: where readers decide by it."""

    def __call__(self, message: str, error: BaseException | None, code: NoticeCode = NoticeCode.FROM_MANIFEST, /) -> None:
        """Note `message` and the kind of `error`."""


class Switch(Protocol):
    """What turns the events on and off, and keeps marks of waits: HostMarks in a session."""

    on: bool

    def waited(self, what: str, wait_ns: int) -> None:
        """A wait for a batch has just ended."""


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


class Hooks:
    """What a part of the recording may hear: the one protocol of all that records beside the steps, and of what follows a trial.

    Every method does nothing unless overridden, and is called on the training thread; times are those of time.perf_counter_ns(). A part
    that raises is switched off alone; the training goes on.
    """

    profile_memory = False
    """Whether the profiler of the site windows shall record the allocators' events for this part."""

    def start(self, context: Context) -> None:
        """Begin; the session has just been entered. Starting twice never happens."""

    def step_began(self, number: int, at_ns: int) -> None:
        """Step `number` begins at this mark."""

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """The running step ends; the part may fill in columns of `row`, later too if it sets `row.ready` to False meanwhile."""

    def interrupted(self) -> None:
        """The running step has no end (an epoch or the run is over): it leaves no row."""

    def batch_asked(self, at_ns: int) -> None:
        """A batch is asked for: a DataLoader's __next__ begins, or that of the iterable given to steps()."""

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """A batch has come after `wait_ns`. `iterator`: what gave it (a _BaseDataLoaderIter, or the iterable given to steps())."""

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tensor.backward is called on `loss`."""

    def backward_ended(self, at_ns: int) -> None:
        """Tensor.backward has returned or raised."""

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """The step of a torch optimizer begins (before its closure, where it has one)."""

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """The step of a torch optimizer has ended."""

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


P = ParamSpec("P")


class Event(Generic[P]):
    """One method of Hooks; a call of it reaches the parts that override it: a call that does nothing costs too, in every step."""

    def __init__(self, pick: Callable[[Hooks], Callable[P, None]], fail: Callable[[Hooks, Exception], object]) -> None:
        self._pick, self._fail = pick, fail
        self._silent = pick(Hooks()).__func__  # type: ignore[attr-defined]  # a bound method
        self._hearing: list[tuple[Hooks, Callable[P, None]]] = []

    def add(self, part: Hooks) -> None:
        """Let `part` hear it, after those that were added before."""
        method = self._pick(part)
        if getattr(method, "__func__", None) is not self._silent:
            self._hearing = [*self._hearing, (part, method)]

    def remove(self, part: Hooks) -> None:
        """Let `part` hear it no more."""
        self._hearing = [(one, method) for one, method in self._hearing if one is not part]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell the parts; one that raises is handed to `fail`, and the others hear it all the same."""
        for part, method in self._hearing:
            try:
                method(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a part that fails must stop neither the training nor the other parts
                self._fail(part, error)


class Events:
    """The parts of one session, and what the training thread tells them: each event is called as the method of Hooks is.

    `on` is the marks' own switch, so that nothing is told before the session began, after it ended, or in a forked child.
    """

    def __init__(self, marks: Switch, note: Note) -> None:
        self.parts: list[Hooks] = []
        """Those that work."""
        self.failed: Callable[[Hooks, Exception], object] = self._switch_off
        """Called with a part that raised, and what."""
        self.thread = threading.get_ident()
        self.muted = False
        """True while steps() asks for a batch: it tells of the two events itself."""
        self._marks, self._note = marks, note
        self._hooked = False
        self._waited_ns = 0

        self._all: list[Event[Any]] = []
        self.step_began = self._make(lambda part: part.step_began)
        self.step_ended = self._make(lambda part: part.step_ended)
        self.interrupted = self._make(lambda part: part.interrupted)
        self.batch_asked = self._make(lambda part: part.batch_asked)
        self.batch_received = self._make(lambda part: part.batch_received)
        self.backward_began = self._make(lambda part: part.backward_began)
        self.backward_ended = self._make(lambda part: part.backward_ended)
        self.optimizer_began = self._make(lambda part: part.optimizer_began)
        self.optimizer_ended = self._make(lambda part: part.optimizer_ended)
        self.window_began = self._make(lambda part: part.window_began)
        self.window_ended = self._make(lambda part: part.window_ended)
        self.flush = self._make(lambda part: part.flush)
        self.close = self._make(lambda part: part.close)

    def _make(self, pick: Callable[[Hooks], Callable[P, None]]) -> Event[P]:
        event = Event(pick, lambda part, error: self.failed(part, error))
        self._all.append(event)
        return event

    def add(self, part: Hooks) -> None:
        """Let `part` hear all events from now on, after those that were added before."""
        self.parts.append(part)
        for event in self._all:
            event.add(part)

    def remove(self, part: Hooks) -> None:
        """Let `part` hear nothing more; does nothing where it was not added."""
        if part in self.parts:
            self.parts.remove(part)
            for event in self._all:
                event.remove(part)

    def start(self, part: Hooks, context: Context) -> None:
        """Start `part` and let it hear; one that cannot start is switched off."""
        self.add(part)  # before it starts: one that failed half way has something to take back
        try:
            part.start(context)
        except Exception as error:  # noqa: BLE001
            self.failed(part, error)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest fields of all parts."""
        fields: dict[str, Any] = {}
        for part in tuple(self.parts):
            try:
                fields |= part.manifest()
            except Exception as error:  # noqa: BLE001
                self.failed(part, error)
        return fields

    def drop(self) -> None:
        """Drop all parts; none hears anything afterwards."""
        for part in tuple(self.parts):
            self._drop(part)

    def _switch_off(self, part: Hooks, error: Exception) -> None:
        if part in self.parts:
            self._note(f"{type(part).__name__.lower()} was switched off", error, NoticeCode.PART_SWITCHED_OFF)
            self._drop(part)

    def _drop(self, part: Hooks) -> None:
        self.remove(part)
        try:
            part.drop()
        except Exception as error:  # noqa: BLE001
            self._note(f"{type(part).__name__.lower()} could not be ended", error)

    @property
    def here(self) -> bool:
        """Return whether an event on this thread is to be told."""
        return self._marks.on and threading.get_ident() == self.thread

    def install(self, patches: Patches) -> None:
        """Put the wrappers in place; what this version of torch does not have is left out."""
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        skip_frame(Event.__call__, inner=True)  # the parts too: none of them is part of the program
        skip_frame(vars(Events)["here"].fget)
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._wrap_next)
        patches.wrap(dataloader.DataLoader, "__iter__", self._wrap_iter)

        def wrap_backward(original: Any) -> Any:
            def noted_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
                if not self.here:
                    return original(loss, *args, **kwargs)
                self.backward_began(perf_counter_ns(), loss)
                try:
                    return original(loss, *args, **kwargs)
                finally:
                    self.backward_ended(perf_counter_ns())

            return noted_backward

        patches.wrap_method(torch.Tensor, "backward", wrap_backward)

        def make_hook(event: Event[[int, Any]]) -> Callable[..., None]:
            def hook(optimizer: Any, *_: Any) -> None:
                if self.here:
                    self._hooked = True
                    try:
                        event(perf_counter_ns(), optimizer)
                    finally:
                        self._hooked = False

            hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch._dynamo.disable sets it: a compiled step() leaves it out
            return hook

        for name, event in (("pre_hook", self.optimizer_began), ("post_hook", self.optimizer_ended)):
            register = getattr(optimizer, f"register_optimizer_step_{name}", None)
            if register is not None:
                handle = register(make_hook(event))
                # while torch goes through its hooks one less there raises in the training: it stays, and does nothing
                patches.on_restore(lambda handle=handle: None if self._hooked else handle.remove())

    def _wrap_next(self, original: Any) -> Any:
        def timed_next(iterator: Any) -> Any:
            if self.muted or not self.here:
                return original(iterator)
            self.batch_asked(perf_counter_ns())
            begun = perf_counter_ns()
            try:
                batch = original(iterator)
            except StopIteration:  # its workers have ended by now
                self._note_wait(iterator, begun)
                raise
            wait = self._note_wait(iterator, begun)
            self._waited_ns = 0
            self.batch_received(perf_counter_ns(), wait, batch, iterator)
            return batch

        return timed_next

    def _wrap_iter(self, original: Any) -> Any:
        def timed_iter(loader: Any) -> Any:
            begun = perf_counter_ns()
            iterator = original(loader)  # starts its workers
            if not self.muted and self.here:
                self._note_wait(iterator, begun, WORKERS_STARTED)
            return iterator

        return timed_iter

    def _note_wait(self, iterator: object, begun: int, call: str = "") -> int:
        wait = perf_counter_ns() - begun
        self._waited_ns += wait
        with suppress(Exception):  # a mark that fails is left out
            self._marks.waited(type(iterator).__name__ + call, wait)
        return self._waited_ns

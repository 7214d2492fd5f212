"""Hooks in the training process: replaced attributes of torch that are put back, and the events that they emit to listeners."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType, MethodType
from typing import Any, Protocol, TypeVar

from gpudiag.model.bundle import WORKERS_STARTED
from gpudiag.model.notices import NoticeCode


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

    def waited(self, what: str, wait_ns: int, frame: FrameType | None) -> None:
        """A wait for a batch has just ended; `frame`: whoever asked for it."""


class Listener:
    """Hears what the training thread does. Every method does nothing unless overridden; times are those of time.perf_counter_ns()."""

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


Hearer = TypeVar("Hearer")


def find_overriding(objects: Iterable[Hearer], base: type, name: str) -> list[tuple[Hearer, Callable[..., None]]]:
    """Return (object, its method `name`) for those whose class overrides that of `base`: a call that does nothing costs too, every step."""
    return [(item, getattr(item, name)) for item in objects if getattr(type(item), name) is not getattr(base, name)]


class Events:
    """Emits the events of one thread to the listeners that were added, in their order.

    A listener that raises is taken off with one warning; the wrapped call goes on in any case. `on` is the marks' own switch, so that
    nothing is emitted before the session began, after it ended, or in a forked child.
    """

    def __init__(self, marks: Switch, note: Note) -> None:
        self.failed: Callable[[Listener], None] = lambda _: None
        """Called with a listener that was taken off because it raised."""
        self.thread = threading.get_ident()
        self.muted = False
        """True while steps() asks for a batch: it emits the two events itself."""
        self._marks, self._note = marks, note
        self._hooked = False
        self._waited_ns = 0
        self._listeners: list[Listener] = []
        self._hearing: dict[str, list[tuple[Listener, Callable[..., None]]]] = {}

    def add(self, listener: Listener) -> None:
        """Let `listener` hear all events from now on, after those that were added before."""
        self._listeners.append(listener)
        self._hearing = {}

    def remove(self, listener: Listener) -> None:
        """Let `listener` hear nothing more; does nothing where it was not added."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._hearing = {}

    def clear(self) -> None:
        """Let nobody hear anything more."""
        self._listeners, self._hearing = [], {}

    @property
    def here(self) -> bool:
        """Return whether an event on this thread is to be emitted."""
        return self._marks.on and threading.get_ident() == self.thread

    def emit(self, name: str, *args: object) -> None:
        """Call `name`(now, *args) of every listener."""
        hearing = self._hearing.get(name)
        if hearing is None:
            hearing = self._hearing[name] = find_overriding(self._listeners, Listener, name)
        if not hearing:
            return
        at = time.perf_counter_ns()
        for listener, method in hearing:
            try:
                method(at, *args)
            except Exception as error:  # noqa: BLE001 - the training run comes first
                self.remove(listener)
                self._note(f"{type(listener).__name__.lower()} was switched off", error, NoticeCode.PART_SWITCHED_OFF)
                self.failed(listener)

    def install(self, patches: Patches) -> None:
        """Put the wrappers in place; what this version of torch does not have is left out."""
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        skip_frame(Events.emit, inner=True)  # the listeners too: none of them is part of the program
        skip_frame(vars(Events)["here"].fget)
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        patches.wrap(dataloader.DataLoader, "__iter__", self._iter)

        def wrap_backward(original: Any) -> Any:
            def noted_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
                if not self.here:
                    return original(loss, *args, **kwargs)
                self.emit("backward_began", loss)
                try:
                    return original(loss, *args, **kwargs)
                finally:
                    self.emit("backward_ended")

            return noted_backward

        patches.wrap_method(torch.Tensor, "backward", wrap_backward)

        def make_hook(event: str) -> Callable[..., None]:
            def hook(optimizer: Any, *_: Any) -> None:
                if self.here:
                    self._hooked = True
                    try:
                        self.emit(event, optimizer)
                    finally:
                        self._hooked = False

            hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch._dynamo.disable sets it: a compiled step() leaves it out
            return hook

        for name, event in (("pre_hook", "optimizer_began"), ("post_hook", "optimizer_ended")):
            register = getattr(optimizer, f"register_optimizer_step_{name}", None)
            if register is not None:
                handle = register(make_hook(event))
                # while torch goes through its hooks one less there raises in the training: it stays, and does nothing
                patches.on_restore(lambda handle=handle: None if self._hooked else handle.remove())

    def _next(self, original: Any) -> Any:
        def timed_next(iterator: Any) -> Any:
            if self.muted or not self.here:
                return original(iterator)
            self.emit("batch_asked")
            begun = time.perf_counter_ns()
            try:
                batch = original(iterator)
            except StopIteration:  # its workers have ended by now
                self._note_wait(iterator, begun, sys._getframe(1))
                raise
            wait = self._note_wait(iterator, begun, sys._getframe(1))
            self._waited_ns = 0
            self.emit("batch_received", wait, batch, iterator)
            return batch

        return timed_next

    def _iter(self, original: Any) -> Any:
        def timed_iter(loader: Any) -> Any:
            begun = time.perf_counter_ns()
            iterator = original(loader)  # starts its workers
            if not self.muted and self.here:
                self._note_wait(iterator, begun, sys._getframe(1), WORKERS_STARTED)
            return iterator

        return timed_iter

    def _note_wait(self, iterator: object, begun: int, frame: FrameType, call: str = "") -> int:
        wait = time.perf_counter_ns() - begun
        self._waited_ns += wait
        with suppress(Exception):  # a mark that fails is left out
            self._marks.waited(type(iterator).__name__ + call, wait, frame)
        return self._waited_ns

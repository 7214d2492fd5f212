"""Records a script that knows nothing of it: watches for training to begin, and marks the steps by the boundary rule.

`watch` is called in every process of `gpudiag run` that imports torch. Only one that trains gets a session: at its first backward pass,
or where it has none at an optimizer's step. The session ends with the interpreter. What a session
needs is imported then: launchers and workers import torch too.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from inspect import signature
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import msgspec

from gpudiag.capture.hooks import Hooks, Patches
from gpudiag.capture.run_script.plan import Plan, append_journal

if TYPE_CHECKING:
    from gpudiag.capture.hooks import Events
    from gpudiag.capture.run_script.driver import Driver
    from gpudiag.capture.session import Session

_watch: Watch | None = None


class Ending(Hooks):
    """Ends the recording of a program that goes on, once its windows are recorded: the last of the parts.

    It ends where torch goes through no hooks of an optimizer, and where nothing is being written that would have to be waited for.
    """

    def __init__(self, watching: Watch) -> None:
        self._watching = watching
        self._late = 0

    def batch_asked(self, at_ns: int) -> None:
        """End, where it is time."""
        if self._watching.is_over():
            self._watching.finish()

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """End, where it is time."""
        self.batch_asked(at_ns)

    def step_began(self, number: int, at_ns: int) -> None:
        """End in a loop that has neither batches nor backward passes: an optimizer's hook stays then, and does nothing."""
        self._late = self._late + 1 if self._watching.is_over() else 0
        if self._late > 2:
            self._watching.finish()


class Watch:
    """Waits in one process for training to begin, then records it to its end; with `passing` some steps of one that goes on."""

    def __init__(self, plan: Plan, *, passing: bool = False) -> None:
        self.plan, self._passing = plan, passing
        self._abandoned = False
        self.driver: Driver | None = None
        self._session: Session | None = None
        self._patches = Patches()
        self._begun = False
        self._owner_pid = 0
        self._hook: Any = None
        self._hooks: Any = None
        self._finalizer: Any = None

    def install(self) -> None:
        """Put the two wrappers in place that see training begin."""
        import torch
        from torch.optim import optimizer

        def wrap_backward(original: Any) -> Any:
            def first_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
                events = None if self._begun else self._begin()
                if self._hook is not None:  # not from inside the hook: torch is going through them then
                    self._hook.remove()
                    self._hook = None
                if events is None:
                    return original(loss, *args, **kwargs)
                events.backward_began(perf_counter_ns(), loss)  # the session's own wrapper is in place for the next one only
                try:
                    return original(loss, *args, **kwargs)
                finally:
                    events.backward_ended(perf_counter_ns())

            return first_backward

        def first_step(optimizer: Any, *_: Any) -> None:
            # torch goes through its hooks right now: adding one is safe only for the last of them
            if not self._begun and next(reversed(self._hooks)) == self._hook.id:
                events = self._begin()
                if events is not None:  # the session's own hook hears of the next one only
                    events.optimizer_began(perf_counter_ns(), optimizer)

        self._patches.wrap_method(torch.Tensor, "backward", wrap_backward)
        if self._passing:  # from another thread: one hook more, while torch goes through those of an optimizer, raises in the training
            return
        first_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch._dynamo.disable sets it
        register = getattr(optimizer, "register_optimizer_step_pre_hook", None)
        if register is not None:
            self._hooks = optimizer._global_optimizer_pre_hooks
            self._hook = register(first_step)

    def _begin(self) -> Events | None:
        self._begun = True
        self._patches.restore()
        self._owner_pid = os.getpid()
        try:
            return self._enter()
        except Exception as error:  # noqa: BLE001 - the training run comes first
            append_journal(self.plan, "failed", f"{type(error).__name__}: {error}")
            return None

    def _enter(self) -> Events | None:
        environ = dict(os.environ)
        from gpudiag.capture import session
        from gpudiag.capture.run_script.driver import Driver
        from gpudiag.capture.standard_parts import make_standard_parts

        # os.environ as it was: polars sets a variable of its allocator when it is imported
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        for name, value in environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        append_journal(self.plan, "training")
        if session._active is not None and session._active._owner_pid == os.getpid():
            append_journal(self.plan, "aside")
            return None
        driver = Driver(self.plan)
        options: dict[str, Any] = dict(self.plan.options)
        of_parts = {name: options.pop(name) for name in signature(make_standard_parts).parameters.keys() & options.keys()}
        parts = [*make_standard_parts(**of_parts), driver, *([Ending(self)] if self._passing else [])]
        recorder = session.Session(self.plan.path, parts=parts, gives_way=True, **options)
        driver.session = self._session = recorder
        recorder._recording.say = lambda text: append_journal(self.plan, "warned", text.removeprefix("gpudiag: "), recorder.rank)
        recorder.__enter__()
        if not recorder.recording:
            driver.ending = True
            recorder.__exit__(None, None, None)
            append_journal(self.plan, "failed", "; ".join(recorder.warnings))
            return None
        recorder.pause()  # until the rule knows where a step begins
        self.driver = driver
        append_journal(self.plan, "bundle", str(recorder.path), recorder.rank)
        atexit.register(self.finish)
        # multiprocessing children that were forked end without atexit before Python 3.13
        util = sys.modules.get("multiprocessing.util")
        process = sys.modules.get("multiprocessing.process")
        if util is not None and process is not None and process.parent_process() is not None:
            self._finalizer = util.Finalize(None, self.finish, exitpriority=100)
        return driver.events

    def marked(self, samples: int | None) -> None:
        """The script has called gpudiag.step()."""
        if not self._begun:
            self._begin()
        if self.driver is not None and os.getpid() == self._owner_pid:
            self.driver.marked(samples)

    def is_over(self) -> bool:
        """Return whether a recording of some steps has them all, with nothing left to write, or nobody waits for it any more."""
        session = self._session
        return self._passing and session is not None and (self._abandoned or session.has_recorded_all)

    def abandon(self) -> None:
        """Take back what waits for training to begin; end a recording that has begun, at its next step. From any thread."""
        global _watch
        self._abandoned = True
        if not self._begun:
            self._begun = True
            self._patches.restore()
            _watch = None if _watch is self else _watch
        elif self._session is not None and not self._session.recording:  # it has failed, or another session has taken over
            atexit.unregister(self.finish)

    def finish(self) -> None:
        """Finish the bundle: the script is over, however it ended, or the steps that were asked for are recorded."""
        global _watch
        driver, session = self.driver, self._session
        if driver is None or session is None or os.getpid() != self._owner_pid:
            return
        self.driver, driver.ending = None, True
        reason = driver.reason()
        if reason is not None and session.recording:
            session.warnings.append(reason)
            append_journal(self.plan, "note", reason, session.rank)
        error = getattr(sys, "last_exc", None)  # Python 3.12
        kind = type(error) if error is not None else getattr(sys, "last_type", None)  # None where no exception ended the script
        with suppress(Exception):
            session.__exit__(kind, None, None)
        short = None if reason or kind or self._passing else session.describe_short_loop(driver.count_steps())
        if short is not None:
            append_journal(self.plan, "note", short, session.rank)
        if self._passing:
            atexit.unregister(self.finish)
            if self._finalizer is not None:
                self._finalizer.cancel()
            _watch = None if _watch is self else _watch
            append_journal(self.plan, "ended", rank=session.rank)


def attach(text: str) -> tuple[str, Watch | None]:
    """Watch this running process for some steps from its next backward pass on. Return why not, or the watch. For any thread."""
    global _watch
    from gpudiag.capture import session

    recorded = session._active is not None and session._active._owner_pid == os.getpid()
    if recorded or (_watch is not None and not _watch._begun):
        return "it is being recorded already, by gpudiag run, gpudiag.profile or another attach", None
    watching = Watch(msgspec.json.decode(text, type=Plan), passing=True)
    watching.install()
    _watch = watching
    return "", watching


def watch(text: str) -> None:
    """Watch this process, whose torch has just been imported, by the plan in `text`."""
    global _watch
    if _watch is None:
        plan = msgspec.json.decode(text, type=Plan)
        append_journal(plan, "torch")
        watching = Watch(plan)
        watching.install()
        _watch = watching

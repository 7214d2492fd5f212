"""Marks the steps of a session in a script that knows nothing of it: by the boundary rule, or by gpudiag.step()."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from gpudiag.capture.hooks import Context, Hooks
from gpudiag.capture.run_script.plan import Plan, append_journal
from gpudiag.capture.run_script.step_boundary import ParameterSentinel, StepBoundary
from gpudiag.capture.torch_profiler import silence_kineto
from gpudiag.model.notices import Notice, NoticeCode

if TYPE_CHECKING:
    from gpudiag.capture.hooks import Events
    from gpudiag.capture.steps import StepRow

MORE_BATCHES = 2
"""Batches beyond the usual number between two backward passes that make a validation pass of what comes (a loader may run ahead by one)."""

MAX_PAUSES = 3
"""Steps in a row that may be taken for a pause: a loop that draws such batches in each step does so as a part of the step."""

BY_HAND = "gpudiag.step() in the loop marks the steps by hand"


class MarkedSession(Protocol):
    """What has its steps marked: a session, or the trial of an experiment."""

    rank: int

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of so far."""

    def step(self) -> None:
        """A step ends, and the next begins."""

    def pause(self) -> None:
        """The step that runs is none."""


class Driver(Hooks):
    """Marks the steps of a session by the boundary rule, or by gpudiag.step() once that is called. The last of the parts."""

    def __init__(self, plan: Plan) -> None:
        self.rule = StepBoundary()
        self.session: MarkedSession | None = None
        self.events: Events | None = None
        self.ending = False
        self._notices: Callable[[], tuple[Notice, ...]] = tuple
        self._plan = plan
        self._sentinel = ParameterSentinel()
        self._optimizers: dict[tuple[str, int], int] = {}
        self._numbers: dict[int, int] = {}  # by the id of an optimizer; whose it is now, its holder tells
        self._holders: dict[int, weakref.ref[Any]] = {}
        self._keys: dict[int, tuple[str, int]] = {}  # number -> its key in _optimizers
        self._gone: dict[tuple[str, int], dict[int, None]] = {}  # numbers without a holder, by class and count of parameters
        self._inside = self._stepping = self._due = self._settled = self._by_hand = False
        self._samples: int | None = None
        self._batches = self._usual_batches = self._pauses_in_a_row = 0
        self._paused = self._gradless = False

    def start(self, context: Context) -> None:
        """Keep where the events come from; hear of updates that a gradient scaler leaves out."""
        from torch import amp

        self.events, self._notices = context.events, context.notices
        silence_kineto(context.patches, errors_too=True)

        def wrap_scaler_step(original: Any) -> Any:
            def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                before = self.rule.optimizer_steps
                result = original(scaler, optimizer, *args, **kwargs)
                events = self.events
                # the scaler did not let the optimizer make its step: the iteration is over all the same
                if events is not None and events.here and self.rule.optimizer_steps == before:
                    with suppress(Exception):  # the training run comes first
                        self.optimizer_ended(0, optimizer)
                return result

            return step

        if hasattr(amp, "GradScaler"):  # torch 2.3; that of torch.cuda.amp is a subclass
            context.patches.wrap(amp.GradScaler, "step", wrap_scaler_step)

    def manifest(self) -> Mapping[str, Any]:
        """Return the command that was recorded."""
        return {} if self._plan.command is None else {"command": self._plan.command}

    def drop(self) -> None:
        """Tell `gpudiag run` of a recording that has ended before the script: another session took over, or it failed."""
        if not self.ending and self.session is not None:
            off = (NoticeCode.RECORDING_SWITCHED_OFF, NoticeCode.PART_SWITCHED_OFF)
            failed = [str(notice.params["text"]) for notice in self._notices() if notice.code in off]
            append_journal(self._plan, "failed" if failed else "aside", "; ".join(failed), self.session.rank)

    def batch_asked(self, at_ns: int) -> None:
        """Look whether the update of the last step has been made; those within an optimizer's step, of a line search, are part of it."""
        if not self.rule.optimizer_steps and not self._stepping and self._sentinel.changed() and self.rule.updated():
            self._follow()
            self._due = True
            self._mark_if_due()

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """Count the batch; one of a validation pass ends the step that had begun.

        Its batches come without gradients, or more of them than a step ever had.
        """
        import torch

        training = bool(torch.is_grad_enabled())
        self._batches += 1
        if not self._settled:  # one to learn from
            self._gradless = self._gradless or not training
            return
        other = (not training and not self._gradless) or self._batches > self._usual_batches + MORE_BATCHES
        if other and not self._paused and self._pauses_in_a_row < MAX_PAUSES:
            self._paused = True
            if not self._by_hand:
                self._pause()

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tell the rule."""
        self.batch_asked(at_ns)
        self._inside = True
        self.rule.backward()
        if not self._settled:
            self._usual_batches = max(self._usual_batches, self._batches)
        self._batches = 0  # those that came belong to this pass
        if not self.rule.optimizer_steps and self.rule.backwards > 1:
            self._sentinel.look(loss)
        self._follow()

    def backward_ended(self, at_ns: int) -> None:
        """Mark the step that an optimizer ended inside the backward pass."""
        self._inside = False
        if not self.rule.optimizer_steps:
            self._sentinel.remember()
        self._mark_if_due()

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """A closure may follow."""
        self._stepping = True

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Tell the rule; mark the step, unless a backward pass is under way: its marks would lie across autograd's."""
        self._stepping = False
        self._due = self.rule.stepped(self.number(optimizer)) or self._due
        self._follow()
        if not self._inside:
            self._mark_if_due()

    def step_ended(self, row: StepRow, at_ns: int) -> None:
        """Write down how many samples the script said that the step had."""
        if self._samples is not None:
            row.samples, self._samples = self._samples, None

    def marked(self, samples: int | None) -> None:
        """The script has marked the end of a step itself: the rule is not asked any more."""
        if not self._by_hand:
            self._by_hand = True
            self._pause()
        self._samples = samples
        if self.session is not None:
            self.session.step()
        self._samples = None

    def number(self, optimizer: Any) -> int:
        """Return the number of an optimizer; one that is made anew keeps it: for the same parameters, or where the one before it is gone
        (a learner for each task)."""
        known = self._numbers.get(id(optimizer))
        if known is not None and self._holders[known]() is optimizer:
            return known
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kind = type(optimizer).__name__
        key = kind, id(parameters[0] if parameters else optimizer)
        gone = self._gone.setdefault((kind, len(parameters)), {})
        if key in self._optimizers:
            number = self._optimizers[key]
            gone.pop(number, None)
        else:
            number = gone.popitem()[0] if gone else len(self._holders)
            self._optimizers.pop(self._keys.get(number, key), None)  # of the one that is gone: its parameter's id may be another's by now
        self._optimizers[key] = self._numbers[id(optimizer)] = number
        self._keys[number] = key
        self._holders[number] = weakref.ref(optimizer, lambda _: gone.setdefault(number))
        return number

    def _follow(self) -> None:
        settled = self.rule.settled
        if self._settled and not settled and not self._by_hand:
            self._pause()
        self._settled = settled

    def _mark_if_due(self) -> None:
        due, self._due = self._due, False
        if due and not self._by_hand and self.session is not None:
            self.session.step()
            if self._pauses_in_a_row < MAX_PAUSES:
                self._pauses_in_a_row = self._pauses_in_a_row + 1 if self._paused else 0
            self._paused = False

    def _pause(self) -> None:
        if self.session is not None:
            self.session.pause()

    def count_steps(self) -> int:
        """Return how many steps the script has made, with those that it took to tell what a step is; 0 where it marks them itself."""
        return 0 if self._by_hand else self.rule.optimizer_steps // len(self.rule.cycle) if self.rule.cycle else self.rule.updates

    def told_by(self) -> str:
        """Return how the steps are known, in a few words; '' where none were found."""
        if self._by_hand:
            return "gpudiag.step()"
        if not self.rule.cycle:
            return "updates of a parameter" if self._settled else ""
        names = {number: name for (name, _), number in self._optimizers.items()}
        runs = [(names.get(number, "optimizer"), len(list(run))) for number, run in groupby(self.rule.cycle)]
        return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)

    def reason(self) -> str | None:
        """Return why no step was found, in one line; None where steps were."""
        if self._settled or self._by_hand:
            return None
        backwards, steps = self.rule.backwards, self.rule.optimizer_steps
        seen = f"{backwards} backward pass{'es' if backwards != 1 else ''}, {steps} optimizer step{'s' if steps != 1 else ''}"
        return f"no steps were found ({seen}): a step is known when it has come three times in a row; {BY_HAND}"

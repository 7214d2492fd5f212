"""Records a parity run in the process of an arm: losses, gradients and settings of a few steps from a known start.

All events are kept from the first backward pass on, and told apart into steps when enough of them are known: the boundary rule needs
three before it marks one. A parity run measures no time, so that figures are read from the device at once.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpudiag.capture.hooks import Listener, Patches
from gpudiag.capture.run_script.driver import Driver
from gpudiag.experiment.trial import fingerprint
from gpudiag.experiment.trial.exit import TrialExit
from gpudiag.experiment.trial.fingerprint import BUCKETS, compute_squared_norm, sketch_gradient
from gpudiag.experiment.trial.known_start import KnownStart
from gpudiag.experiment.trial.protocol import Control, Evidence, Over, ParityPlan, ParityRun, ParityStep, TrialPlan, write_row
from gpudiag.fixes.fix import Site, around

SKETCH_FILE = "sketch.npy"

CLIPPING, LOSS, SKIPPED = "clipping of gradients", "type of the loss", "updates left out by a gradient scaler"

_NO_SETTINGS = {"parameters", "foreach", "error_if_nonfinite", "total_norm"}
"""Arguments of torch's clipping that are no settings of the training."""


class ParityRecorder(Listener):
    """Stands where a trial does. `install` when torch has just been imported, before any fix; `follow` when training begins.

    It then hears all events, before the driver does, and is the driver's session. When its steps are complete it writes their rows, the
    evidence of the fixes and one ParityRun, and leaves, with all ranks.
    """

    def __init__(self, plan: TrialPlan) -> None:
        self.rank = 0
        self._plan, self._parity = plan, plan.parity or ParityPlan()
        self._start = KnownStart(self._parity, self._fetched)
        self.warnings: list[str] = []
        self._events: list[Event] = []
        self._by_hand = self._done = False
        self._clipping: set[str] = set()
        self._losses: set[str] = set()
        self._settings: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._gradients = _GradientReader()
        self._backwards = self._skipped = self._slowest_ns = self._last_ns = 0
        self._followed = False

    def install(self, site: Site, patches: Patches) -> None:
        import torch
        from torch.nn import utils
        from torch.nn.utils import clip_grad

        def scale(original: Any, scaler: Any, outputs: Any) -> Any:
            found = original(scaler, outputs)
            if isinstance(found, torch.Tensor) and scaler.is_enabled() and not torch.compiler.is_compiling():
                setattr(found, _SCALE_ATTRIBUTE, float(scaler.get_scale()))
            return found

        def step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # an update that the scaler leaves out: the optimizer's own hooks do not hear of it
            before = len(self._events)
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._done and self._backwards and before == len(self._events):
                self._skipped += 1
                self._record_step(optimizer)
            return result

        self._site = site
        self._start.install(site, patches)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.wrap(clip_grad, name, around(partial(self._clip, name)), homes=(utils,))
        patches.wrap(utils, "clip_grads_with_norm_", around(partial(self._clip, "clip_grads_with_norm_")))
        patches.wrap(torch.amp.GradScaler, "scale", around(scale))
        patches.wrap(torch.amp.GradScaler, "step", around(step))

    def follow(self, driver: Driver, leaving: TrialExit, evidence: Callable[[], list[Evidence]] = list) -> None:
        """Training begins in this process; `driver` marks its steps, `evidence` is asked once, after them."""
        self._driver, self._leaving, self._evidence, self._followed = driver, leaving, evidence, True
        self._control = Control.open(self._plan.folder)
        self._last_ns = time.perf_counter_ns()

    # -- what the script does ---------------------------------------------------------------------------------------

    def _fetched(self, samples: int | None) -> None:
        if not self._done:
            self._events.append(Fetched(samples))

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Keep the loss, without the factor of a scaler. What stepped before any backward pass was an engine that is being built."""
        import torch

        self._control.beat(self._slowest_ns)
        if self._done:
            return
        if not self._backwards:
            self._events = [event for event in self._events if isinstance(event, Fetched)]
            self._settings, self._modules, self._gradients = {}, {}, _GradientReader()
        self._backwards += 1
        self._losses.add(str(loss.dtype).removeprefix("torch."))
        single = loss.numel() == 1 and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        value = float(loss.detach()) / float(getattr(loss, _SCALE_ATTRIBUTE, 1.0)) if single else None
        self._events.append(Backward(value))

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """Read the gradients, unless they were read before they were clipped."""
        if self._done:
            return
        self._start.perturb(list_parameters(optimizer))
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which takes the scaler's factor out itself
        self._gradients.read(list_parameters(optimizer), self._backwards, 1.0 if scale is None else 1 / float(scale))
        self._skipped += bool(getattr(optimizer, "found_inf", None))

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """Keep the step; the backward passes of one with a closure ran inside of it, so that its gradients are read now."""
        if not self._done:
            self._record_step(optimizer)

    def _record_step(self, optimizer: Any) -> None:
        number, parameters = self._driver.number(optimizer), list_parameters(optimizer)
        self._gradients.read(parameters, self._backwards)
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None)
        self._events.append(Stepped(number, self._gradients.take(number, parameters), rates))
        if f"optimizer {number + 1}" not in self._settings:
            self._settings |= fingerprint.describe_optimizer(number + 1, optimizer)
        if not self._modules:
            known = [parameter for one in (*self._site.optimizers, optimizer) for parameter in list_parameters(one)]
            self._modules = fingerprint.describe_modules(self._site.roots, known)

    def _clip(self, name: str, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not (self._done or not self._followed or torch.compiler.is_compiling()):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            given = inspect.signature(original).bind(parameters, *args, **kwargs).arguments
            self._clipping.add(fingerprint.format_call(name, {key: value for key, value in given.items() if key not in _NO_SETTINGS}))
            self._gradients.read(parameters, self._backwards)
        return original(parameters, *args, **kwargs)

    # -- marks --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        now = time.perf_counter_ns()
        self._slowest_ns, self._last_ns = max(self._slowest_ns, now - self._last_ns), now
        self._control.beat(self._slowest_ns)
        self._leaving.marks += 1
        if not self._done:
            self._by_hand = self._by_hand or not self._driver.rule.settled
            self._events.append(Marked())
            if len(self._build_steps()) >= self._parity.steps:
                self._write_rows()
                self._control.stopped = 1
        self._leaving.look()

    def set_samples(self, samples: int) -> None:
        """The script says how many samples the step had that ends next, whatever its loaders gave."""
        last = next((at for at in reversed(range(len(self._events))) if isinstance(self._events[at], Marked)), -1)
        self._events[last + 1 :] = [event for event in self._events[last + 1 :] if not isinstance(event, Fetched)]
        self._fetched(samples)

    def pause(self) -> None:
        """What follows is no step: nothing is timed here, and the events stay."""

    def finish(self, reason: str | None) -> None:
        if not self._done and self._build_steps():
            self._write_rows()
        write_row(self._plan, Over(len(self._build_steps()), reason))

    def _build_steps(self) -> list[Any]:
        return build_steps(self._events, self._driver.rule.cycle, by_hand=self._by_hand)

    def _write_rows(self) -> None:
        self._done = True
        for row in self._build_steps()[: self._parity.steps]:
            write_row(self._plan, row)
        for evidence in self._evidence():
            write_row(self._plan, evidence)
        rows = self._gradients.rows()
        if rows is not None:
            np.save(os.path.join(self._plan.folder, SKETCH_FILE), rows, allow_pickle=False)
        seen = {LOSS: self._losses, CLIPPING: self._clipping}
        said = {what: ", ".join(sorted(names)) or fingerprint.NO_SETTING for what, names in seen.items()}
        found = {**self._settings, **self._modules, **said, SKIPPED: str(self._skipped)}
        write_row(self._plan, ParityRun(found, "" if rows is None else SKETCH_FILE))


class _GradientReader:
    """Squared norms of the gradients that will be stepped by next, and the sketches of each parameter's first ones."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[int, float]] = {}
        """By the id of a parameter: number of the backward pass after which its gradient was read, and the sum of squares."""
        self._sketches: dict[int, tuple[Any, NDArray[np.float64]]] = {}
        """By the id of a parameter, which is kept: that of one that is gone could be another's."""
        self._first: dict[int, list[Any]] = {}
        """The parameters of each optimizer, by its number, at its first step."""
        self._stepped: set[int] = set()

    def read(self, parameters: Iterable[Any], backwards: int, factor: float = 1.0) -> None:
        """Read the gradients of `parameters`, times `factor`; what was read after the same backward pass already may be clipped by now."""
        for parameter in parameters:
            key = id(parameter)
            if parameter.grad is None or (key in self._squares and self._squares[key][0] == backwards):
                continue
            self._squares[key] = backwards, compute_squared_norm(parameter.grad) * factor**2
            if key not in self._stepped:
                self._sketches[key] = parameter, sketch_gradient(parameter.grad) * factor

    def take(self, number: int, parameters: list[Any]) -> float | None:
        """Take the sum of squares of the gradients that optimizer `number` has stepped by; None: there were none."""
        self._first.setdefault(number, parameters)
        keys = [id(parameter) for parameter in parameters]
        self._stepped.update(keys)
        found = [self._squares.pop(key)[1] for key in keys if key in self._squares]
        return sum(found) if found else None

    def rows(self) -> NDArray[np.float64] | None:
        """Return the sketches, one row for each parameter of each optimizer, zeros where it had no gradient; None: there are none."""
        keys = [id(parameter) for number in sorted(self._first) for parameter in self._first[number]]
        nothing = np.zeros(BUCKETS)
        return np.stack([self._sketches[key][1] if key in self._sketches else nothing for key in keys]) if self._sketches and keys else None


def list_parameters(optimizer: Any) -> list[Any]:
    """List the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_SCALE_ATTRIBUTE = "_gpudiag_scale"
"""Of a scaled loss: what it was multiplied by."""


class Backward(NamedTuple):
    """A backward pass, and its loss."""

    loss: float | None


class Stepped(NamedTuple):
    """An optimizer has stepped; `square`: the sum of squares of its gradients, `rates`: the learning rates of its groups."""

    optimizer: int
    square: float | None
    rates: tuple[float, ...] = ()


class Fetched(NamedTuple):
    """A batch of so many samples."""

    samples: int | None


class Marked(NamedTuple):
    """The end of a step, as the session was told."""


Event = Backward | Stepped | Fetched | Marked


def build_steps(events: Sequence[Event], cycle: tuple[int, ...], *, by_hand: bool) -> list[ParityStep]:
    """Build the complete steps.

    `cycle`: the optimizers of a step in their order (Boundary.cycle). Without any, the marks tell the steps; then, unless the script makes
    them itself (`by_hand`), what comes before the first one is left out: it is several steps.
    """
    by_cycle = bool(cycle) and not by_hand
    parts: list[list[Event]] = [[]]
    place = 0
    for event in events:
        parts[-1].append(event)
        ends = isinstance(event, Marked) and not by_cycle
        if by_cycle and isinstance(event, Stepped) and event.optimizer in cycle:
            ahead = next((at for at in range(place, len(cycle)) if cycle[at] == event.optimizer), cycle.index(event.optimizer))
            place = (ahead + 1) % len(cycle)
            ends = place == 0
        if ends:
            parts.append([])
    steps = []
    for part in parts[:-1] if by_cycle or by_hand else parts[1:-1]:
        stepped = [event for event in part if isinstance(event, Stepped)]
        losses = [event.loss for event in part if isinstance(event, Backward) and event.loss is not None]
        squares = [event.square for event in stepped if event.square is not None]
        samples = [event.samples for event in part if isinstance(event, Fetched) and event.samples is not None]
        loss, square = (sum(losses) if losses else None), (sum(squares) if squares else None)
        finite_loss, finite_square = (value if value is not None and math.isfinite(value) else None for value in (loss, square))
        steps.append(
            ParityStep(
                finite_loss,
                None if finite_square is None else math.sqrt(finite_square),
                sum(samples) if samples else None,
                tuple(rate for event in stepped for rate in event.rates),
                finite=(finite_loss, finite_square) == (loss, square),
            )
        )
    return steps

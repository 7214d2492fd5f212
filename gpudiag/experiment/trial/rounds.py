"""The steps of a parity run, told from its events when it is over: the rule of the step boundary knows them only after three of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpudiag.experiment.trial.protocol import ParityStep


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


def steps(events: Sequence[Event], cycle: tuple[int, ...], *, by_hand: bool) -> list[ParityStep]:
    """Return the complete steps.

    `cycle`: the optimizers of a step in their order (Boundary.cycle). Without any, the marks tell the steps; then, unless the script makes
    them itself (`by_hand`), what comes before the first one is left out: it is several steps.
    """
    if cycle and not by_hand:
        return [_step(part) for part in _by_cycle(events, cycle)]
    parts = _by_marks(events)
    return [_step(part) for part in (parts if by_hand else parts[1:])]


def _by_marks(events: Iterable[Event]) -> list[list[Event]]:
    parts: list[list[Event]] = []
    part: list[Event] = []
    for event in events:
        part.append(event)
        if isinstance(event, Marked):
            parts.append(part)
            part = []
    return parts


def _by_cycle(events: Iterable[Event], cycle: tuple[int, ...]) -> list[list[Event]]:
    parts: list[list[Event]] = []
    part: list[Event] = []
    place = 0
    for event in events:
        part.append(event)
        if not isinstance(event, Stepped) or event.optimizer not in cycle:
            continue
        ahead = next((at for at in range(place, len(cycle)) if cycle[at] == event.optimizer), cycle.index(event.optimizer))
        place = (ahead + 1) % len(cycle)
        if place == 0:
            parts.append(part)
            part = []
    return parts


def _step(part: list[Event]) -> ParityStep:
    losses = [event.loss for event in part if isinstance(event, Backward) and event.loss is not None]
    stepped = [event for event in part if isinstance(event, Stepped)]
    squares = [event.square for event in stepped if event.square is not None]
    samples = [event.samples for event in part if isinstance(event, Fetched) and event.samples is not None]
    loss, square = (sum(losses) if losses else None), (sum(squares) if squares else None)
    return ParityStep(
        _finite(loss),
        None if (known := _finite(square)) is None else math.sqrt(known),
        sum(samples) if samples else None,
        tuple(rate for event in stepped for rate in event.rates),
        finite=_finite(loss) == loss and _finite(square) == square,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

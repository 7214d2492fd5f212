"""Facts about what a step costs, in money and in energy (EFF-02)."""

from __future__ import annotations

from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.timeline.history import MIN_FOR_PACE

SECONDS_PER_HOUR = 3600
THOUSAND = 1000


def _price(window: Window) -> float:
    if window.analysis.gpu_hour_price is None:
        raise NotKnownError("what an hour of the device costs is not known: give --gpu-hour-price, for example 2.00")
    return window.analysis.gpu_hour_price


def plain_step_ns(window: Window) -> float:
    """Return the mean wall time of a step in ns: of the unprofiled steps where there are enough, else of the analysed ones."""
    found = window.history
    if found is None or found.plain < MIN_FOR_PACE or window.analysis.step_records is None:
        return window.wall_ns / max(1, window.steps.height)
    plain = window.analysis.step_records.filter(window.analysis.step_records["window"] == "plain")["wall_ns"]
    settled = plain[2:] if len(plain) > 2 + MIN_FOR_PACE else plain
    return float(settled.sum()) / len(settled)


def _cost_of(window: Window, steps: float) -> float:
    """Return what `steps` steps cost on all ranks: idle ones cost the same."""
    ranks = window.analysis.manifest.world_size if window.analysis.manifest else 1
    return steps * ranks * _price(window) * plain_step_ns(window) / 1e9 / SECONDS_PER_HOUR


def money(amount: float) -> str:
    """Return an amount in dollars with two digits that say something: $0.31, $0.0042, $1,234."""
    if amount >= 100:
        return f"${amount:,.0f}"
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.2g}"


@fact("gpu_hour_price", unit="count")
def gpu_hour_price(window: Window) -> float:
    """Price of one hour of one device in dollars (or whatever currency), as given by --gpu-hour-price."""
    return _price(window)


@fact("thousand_steps_cost", unit="text")
def thousand_steps_cost(window: Window) -> str:
    """What 1,000 steps cost on all ranks at gpu_hour_price, by the unprofiled steps where there are some."""
    return money(_cost_of(window, THOUSAND))


@fact("ranks", unit="count")
def ranks(window: Window) -> int:
    """Processes of the run, each with a device of its own."""
    manifest = window.analysis.manifest
    if manifest is None:
        raise NotKnownError("a trace does not hold the number of processes: record with gpudiag.profile")
    return manifest.world_size


@fact("planned_steps", unit="count")
def planned_steps(window: Window) -> int:
    """Steps of the whole run, as given by --planned-steps."""
    if window.analysis.planned_steps is None:
        raise NotKnownError("how many steps the run is to have is not known: give --planned-steps")
    return window.analysis.planned_steps


@fact("planned_cost", unit="text")
def planned_cost(window: Window) -> str:
    """What planned_steps steps cost on all ranks at gpu_hour_price."""
    if window.analysis.planned_steps is None:
        raise NotKnownError("how many steps the run is to have is not known: give --planned-steps")
    return money(_cost_of(window, window.analysis.planned_steps))


@fact("tenth_of_planned_cost", unit="text")
def tenth_of_planned_cost(window: Window) -> str:
    """What a tenth of planned_cost is: the worth of steps that are 10 % shorter."""
    if window.analysis.planned_steps is None:
        raise NotKnownError("how many steps the run is to have is not known: give --planned-steps")
    return money(_cost_of(window, window.analysis.planned_steps / 10))

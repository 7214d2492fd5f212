"""Facts about all steps of a run, profiled or not: their phases, padding, drift and slow steps."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.history import StepHistory
from gpudiag.timeline.history import MIN_FOR_DRIFT, MIN_FOR_PACE, SETTLED_AFTER

NO_RECORDS = "a trace does not hold the steps outside it: record with gpudiag.profile"


def _history(window: Window) -> StepHistory:
    if window.history is None:
        raise NotKnownError(NO_RECORDS)
    return window.history


def _share(window: Window, column: str, what: str) -> float:
    """Return the summed `column` over the wall time of the plain steps whose phases were seen."""
    _history(window)
    records = window.analysis.step_records
    plain = (pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain") & pl.col("phase_clock").is_not_null()
    seen = pl.DataFrame() if records is None else records.filter(plain)
    require(seen.height >= MIN_FOR_PACE, f"fewer than {MIN_FOR_PACE} unprofiled steps whose phases were seen: let the recording run on")
    require(seen[column].null_count() < seen.height, f"no {what} was seen in the unprofiled steps")
    return min(1.0, int(seen[column].sum()) / max(1, int(seen["wall_ns"].sum())))


@fact("run_forward_share", unit="share")
def run_forward_share(window: Window) -> float:
    """Time from a batch in hand to its backward pass over the wall time of the unprofiled steps; loss and own data code included."""
    return _share(window, "forward_ns", "forward pass with a backward pass")


@fact("run_backward_share", unit="share")
def run_backward_share(window: Window) -> float:
    """Time in Tensor.backward over the wall time of the unprofiled steps (on a GPU: time of the device)."""
    return _share(window, "backward_ns", "Tensor.backward")


@fact("run_optimizer_share", unit="share")
def run_optimizer_share(window: Window) -> float:
    """Time in the steps of torch optimizers over the wall time of the unprofiled steps (on a GPU: time of the device)."""
    return _share(window, "optimizer_ns", "step of a torch optimizer")


@fact("run_h2d_share", unit="share")
def run_h2d_share(window: Window) -> float:
    """Copies from host to device that the training thread asks for, over the wall time of the unprofiled steps."""
    window.require_accelerator()
    return _share(window, "h2d_ns", "copy from host to device")


@fact("padded_share", unit="share")
def padded_share(window: Window) -> float:
    """Padding among the positions of the batches, by their masks or lengths; all steps."""
    found = _history(window).padded_share
    if found is None:
        raise NotKnownError("no batch told its padding: a field attention_mask, padding_mask or lengths on the CPU does")
    return found


@fact("step_drift_share", unit="share")
def step_drift_share(window: Window) -> float:
    """How much longer an unprofiled step takes in the last quarter of the run than in the first; 0 where that may be noise.

    Negative where steps became faster. See gpudiag.timeline.history.drift for the test.
    """
    found = _history(window).drift
    if found is None:
        raise NotKnownError(f"fewer than {MIN_FOR_DRIFT} unprofiled steps: let the recording run on")
    return found.share if found.real else 0.0


@fact("slow_step_share", unit="share")
def slow_step_share(window: Window) -> float:
    """Time of slow unprofiled steps (over 1.5 times the median) beyond the median, over the wall time of the unprofiled steps."""
    found = _history(window).slow_share
    if found is None:
        raise NotKnownError(f"fewer than {MIN_FOR_PACE} unprofiled steps: let the recording run on")
    return found

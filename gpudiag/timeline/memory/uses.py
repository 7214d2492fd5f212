"""What each block of memory was used for: by its owner where that is known, else by the passes that allocated and freed it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.nesting import innermost, nearest, nest
from gpudiag.model.trace import Trace
from gpudiag.timeline.memory.lives import Ints, Lives

Texts = npt.NDArray[np.object_]

_FAR = np.iinfo(np.int64).max


class Moments(NamedTuple):
    """The allocator's events of one device beside the ops of their trace."""

    t_ns: Ints
    op: Ints
    """Innermost op that was open, -1: none."""
    outermost: Ints
    """The op around it that stands in no other, -1: none."""
    over_ns: Ints
    """End of the outermost op around it; the moment itself where there is none."""
    phase: Texts
    """Phase of that op; None: not known."""


def moments(trace: Trace, events: pl.DataFrame) -> Moments:
    """Return the moments of `events` (rows of allocations) among the ops of `trace` (stage 'link')."""
    nesting = nest(trace.ops)
    t_ns = events["t_ns"].to_numpy()
    op = innermost(nesting, events["thread"].fill_null(-2).to_numpy(), t_ns)
    outermost = np.append(nearest(nesting.parent, nesting.parent < 0), -1)[op]
    over = np.where(op >= 0, np.append(nesting.end_ns, 0)[outermost], t_ns)
    phase = _or_none(trace.ops["phase"].to_list())[op]
    return Moments(t_ns, op, outermost, over, phase)


def _or_none(texts: list[str | None]) -> Texts:
    """Return `texts` with None after the last, for rows of -1."""
    return np.array([*texts, None], dtype=object)


def uses(trace: Trace, lives: Lives, at: Moments) -> Texts:
    """Return the category of each block by its life; blocks of before the recording are `before_recording`.

    * freed before the outermost op that made it has returned: temporary;
    * made forward, freed when a backward pass had begun (or never): activations; freed earlier: temporary;
    * made forward where no backward pass was recorded, and not freed by its own op: forward_held;
    * made backward, in use when the next forward pass or optimizer began: gradients; freed earlier: temporary;
    * made by the optimizer, in use when it was through: optimizer_state; made while data was moved: inputs.

    As torch.profiler's own memory profile does (torch/profiler/_memory_profiler.py), but by time: it needs no shapes.
    """
    made = np.maximum(lives.born, 0)
    phase, born_ns = _or_none(at.phase.tolist())[made], np.append(at.t_ns, 0)[made]
    freed_ns = np.append(at.t_ns, _FAR)[lives.died]
    roots = trace.ops.filter(pl.col("parent").is_null())
    found = np.full(len(made), "unknown", dtype=object)
    kept_forward = np.where(_kept_forward(roots, born_ns, freed_ns), _held_by_forward(roots), "temporary")
    found[phase == "forward"] = kept_forward[phase == "forward"]
    for maker, others, kept in (
        ("backward", ("forward", "optimizer"), "gradients"),
        ("optimizer", ("forward", "backward", "data"), "optimizer_state"),
    ):
        lasting = freed_ns >= _next(roots, others, born_ns)
        found[phase == maker] = np.where(lasting, kept, "temporary")[phase == maker]
    found[phase == "data"] = "inputs"
    found[freed_ns <= np.append(at.over_ns, 0)[made]] = "temporary"
    found[lives.born < 0] = "before_recording"
    return found


def _held_by_forward(roots: pl.DataFrame) -> str:
    """Return the category of what the forward pass keeps: without any backward pass (inference) nothing is known to wait for one."""
    return "activations" if (roots["phase"].cast(pl.String) == "backward").any() else "forward_held"


def _kept_forward(roots: pl.DataFrame, born_ns: Ints, freed_ns: Ints) -> npt.NDArray[np.bool_]:
    """Return which blocks were still in use when the next backward pass began; all that outlived their op where none came."""
    backward = _next(roots, ("backward",), born_ns)
    kept: npt.NDArray[np.bool_] = (freed_ns >= backward) | (backward == _FAR)
    return kept


def _next(roots: pl.DataFrame, phases: tuple[str, ...], after_ns: Ints) -> Ints:
    """Return when the next op of one of `phases` begins after each moment; the end of time where none does."""
    starts = np.append(np.sort(roots.filter(pl.col("phase").is_in(phases))["start_ns"].to_numpy()), _FAR)
    found: Ints = starts[np.searchsorted(starts[:-1], after_ns, side="right")]
    return found

"""The design of a comparison: who runs when, for how long, and after how many pairs one may look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from gpudiag.model.experiment import ALPHA, FixCall

_LEVELS = {
    (4, 6, 8, 12): 0.0174,
    (3, 4, 5, 6, 8, 10, 12): 0.0117,
    (5, 8, 12): 0.0212,
    (4, 8): 0.0276,
}
"""Constant level of each look that keeps 5 % over all of them: a Pocock boundary for the t statistic, as Pocock's (1977,
Biometrika 64(2)), found by simulation of paired t tests: 4.94 to 5.02 % of 200,000 experiments without any effect are called one."""


SandboxMode = Literal["auto", "overlay", "block", "off"]
SANDBOX_MODES: tuple[SandboxMode, ...] = get_args(SandboxMode)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """How two arms are compared. Times are in seconds."""

    looks: tuple[int, ...] = (4, 6, 8, 12)
    """Numbers of pairs after which the result is looked at; the last is the end."""
    blocks: int = 6
    """Blocks of each arm in a pair."""
    block_steps: int = 12
    block_s: float = 1.5
    """A block has as many steps as it takes for both, and twice what the loader has prefetched."""
    dropped_steps: int = 2
    """Of each block, not measured: caches and queues fill again."""
    warm_steps: int = 10
    """At least; more until the steps are steady."""
    warm_limit_s: float = 60.0
    """From the first step; what is not steady by then is measured all the same, and called unstable."""
    start_limit_s: float = 300.0
    """Until the first step, and between two signs of life while an arm warms up (it may compile)."""
    silent_limit_s: float = 60.0
    """Between two signs of life in a block; 20 times the slowest step where that is more."""
    min_effect: float = 0.01
    """Smaller effects are none."""
    block_saves: bool = False
    """Whether nothing that saves checkpoints writes any, in both arms; loggers write to a folder of the arm."""
    sandbox: SandboxMode = "off"
    """How the folder of the program is kept as it is (isolation.wrap_in_sandbox)."""
    shared_ok: bool = False
    """Whether to measure although other processes compute on the same GPU."""
    memory_limit_bytes: int | None = None
    """Resident memory that an arm's processes may take together; None: what the machine can spare (host_memory.compute_reserve_bytes)."""
    deadline: float | None = None
    """Value of time.monotonic() after which no pair is begun, and one that runs is broken off; None: none."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training: a command with its environment (on top of this process's) and working directory (None: this process's)."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = {}
    cwd: Path | None = None
    fixes: tuple[FixCall, ...] = ()


def find_level(looks: tuple[int, ...]) -> float:
    """Find the level of significance of each look that keeps ALPHA over all: tabulated, else ALPHA shared out (Bonferroni)."""
    return _LEVELS.get(looks, ALPHA / len(looks))


def order_arms(pair: int) -> tuple[int, int]:
    """Return the arms of a pair in the order in which they start: it alternates, so that a drift favours neither."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


def schedule_turns(pair: int, blocks: int) -> list[int]:
    """Schedule the arm of each block of a pair: ABBA ABBA ... in the order of order_arms(). A linear drift cancels in each two blocks."""
    first, second = order_arms(pair)
    return [arm for block in range(blocks) for arm in ((first, second) if block % 2 == 0 else (second, first))]


LEAST_BLOCKS, LEAST_BLOCK_STEPS = 2, 6
"""Of a pair of a short script: one turn each way, and three times what is dropped. Its interval is wider, and as honest: the unit is the
pair."""


def shorten_design(design: Design, steps: int, warm: int, prefetched: int) -> Design | None:
    """Return the design with blocks as long as a script of `steps` steps has room for, of which the warm-up took `warm`; None: it has none.

    The warm-up of a variant may take twice as long. Fewer blocks come before blocks of fewer steps than usual.
    """
    counts = range(design.blocks, LEAST_BLOCKS - 1, -2)
    for blocks, least in (*((count, design.block_steps) for count in counts), (LEAST_BLOCKS, LEAST_BLOCK_STEPS)):
        room = (steps - 2 * warm) // blocks - design.dropped_steps
        if room >= max(least, 2 * prefetched):
            return msgspec.structs.replace(design, blocks=blocks, block_steps=room, block_s=0.0)
    return None


def count_least_steps(design: Design, warm: int, prefetched: int) -> int:
    """Return the fewest steps behind its first ones that a script needs for a pair."""
    return 2 * warm + LEAST_BLOCKS * (design.dropped_steps + max(LEAST_BLOCK_STEPS, 2 * prefetched))


def count_block_steps(design: Design, step_ns: float, prefetched: int) -> int:
    """Return the measured steps of a block of steps of `step_ns`, with `prefetched` batches made ahead.

    A block of fewer steps than twice the queue would be fed by what was made before it, and flatter an arm that waits for its loader.
    """
    return max(design.block_steps, math.ceil(design.block_s * 1e9 / step_ns) if step_ns > 0 else 0, 2 * prefetched)

"""Runs a comparison: pairs of processes that are alive together and take turns."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from gpudiag.experiment import guard
from gpudiag.experiment.arm import ArmError, LiveArm
from gpudiag.experiment.design import Arm, Design, block_steps, starting, turns
from gpudiag.experiment.stats import compared, decided
from gpudiag.experiment.trial.protocol import Block, Warmed
from gpudiag.model.experiment import Comparison, Pair, Unit

Progress = Callable[[str], None]


def compare(first: Arm, second: Arm, design: Design | None = None, *, progress: Progress | None = None) -> Comparison:
    """Return how much faster `second` trains than `first`, as throughput.

    An arm that fails makes the verdict `failed`; what was measured until then is kept. Raises InputError where a command cannot be
    started. Whatever happens, no process of an arm is left. Linux only (/proc).
    """
    design, tell = design or Design(), progress or (lambda _: None)
    mark = uuid.uuid4().hex
    pairs: list[Pair] = []
    steady: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="gpudiag-ab-") as scratch, _guarded(mark):
        for number in range(design.looks[-1]):
            tell(f"pair {number + 1} of {design.looks[-1]} at most")
            try:
                pair, was_steady = _pair((first, second), design, number, Path(scratch), mark)
            except ArmError as error:
                return _failed(pairs, design, error)
            pairs.append(pair)
            steady.append(was_steady)
            if number + 1 in design.looks[:-1] and decided(compared(pairs, design, steady=all(steady))):
                break
    notes = () if all(steady) else (f"steps were not steady after {design.warm_limit_s:.0f} s of warm-up",)
    return compared(pairs, design, steady=all(steady), notes=notes)


def _failed(pairs: list[Pair], design: Design, error: ArmError) -> Comparison:
    notes = (error.message, *([error.detail] if error.detail else []))
    found = compared(pairs, design, notes=notes) if pairs else Comparison(verdict="failed", notes=notes)
    return msgspec.structs.replace(found, verdict="failed", reason=error.reason)


@contextmanager
def _guarded(mark: str) -> Iterator[None]:
    """Have a process of its own end all arms when this process is gone, however that came about: a frozen arm cannot see it."""
    command = [sys.executable, "-I", "-S", guard.__file__, f"{mark}."]
    process = subprocess.Popen(  # noqa: S603 - our own file; in a session of its own, which Ctrl-C does not reach
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        process.wait()


def _pair(arms: tuple[Arm, Arm], design: Design, number: int, scratch: Path, mark: str) -> tuple[Pair, bool]:
    """Return one pair, and whether both arms were steady after their warm-up."""
    with ExitStack() as alive:
        live: dict[int, LiveArm] = {}
        warm: dict[int, tuple[Warmed, float]] = {}
        for arm in starting(number):  # one after the other: what one compiles would disturb the other
            live[arm] = LiveArm(arms[arm], design, scratch / f"{number}-{arm}", f"{mark}.{number}-{arm}")
            alive.callback(live[arm].kill)
            warm[arm] = live[arm].warmed()
            live[arm].freeze()
        lengths = {arm: block_steps(design, row.step_ns, row.prefetched) for arm, (row, _) in warm.items()}
        blocks: dict[int, list[Block]] = {0: [], 1: []}
        for arm in turns(number, design.blocks):
            live[arm].thaw()
            blocks[arm].append(live[arm].block(lengths[arm]))
            live[arm].freeze()
        for process in live.values():
            process.end()
    return _measured(blocks, warm), all(row.steady for row, _ in warm.values())


def _measured(blocks: dict[int, list[Block]], warm: dict[int, tuple[Warmed, float]]) -> Pair:
    unit: Unit = "samples" if all(_samples(block, warm[arm][0]) for arm in blocks for block in blocks[arm]) else "steps"
    first, second = (tuple(_rate(block, warm[arm][0], unit) for block in blocks[arm]) for arm in (0, 1))
    return Pair(first, second, unit, warm[0][0].step_ns, warm[1][0].step_ns, warm[0][1], warm[1][1])


def _samples(block: Block, warm: Warmed) -> float | None:
    """Return the samples of a block: those that a loader gave, else those that the model was given in the warm-up."""
    if block.samples is not None:
        return float(block.samples)
    return None if warm.samples_per_step is None else warm.samples_per_step * block.steps


def _rate(block: Block, warm: Warmed, unit: Unit) -> float:
    amount = (_samples(block, warm) or 0.0) if unit == "samples" else float(block.steps)
    return amount / block.wall_ns * 1e9 if block.wall_ns > 0 else 0.0

"""One run of the program as it is: its steps, samples, memory, warm-up, what it writes, and how much its processes differ."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.experiment import busy, gpustate, runner, sandbox
from gpudiag.experiment.arm import LiveArm
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.pairs import MANY_FAULTS, Run
from gpudiag.experiment.trial.protocol import Row, Saved
from gpudiag.hardware.cpu import cpu_model_name
from gpudiag.model.experiment import Baseline, Pair, pair_log_ratio

Progress = Callable[[str], None]

MAX_FILES = 20_000
"""Entries of the program's folder that are looked at."""

MAX_NAMED = 10
"""Files that are named; more are counted."""

PASSED_OVER = frozenset({".git", "__pycache__", "node_modules", ".venv", "venv"})


def probe(
    arm: Arm,
    design: Design | None = None,
    *,
    pairs: int = 0,
    progress: Progress | None = None,
    on_pair: Callable[[Pair], None] | None = None,
) -> Baseline:
    """Return what one run of `arm` shows. `pairs`: so many pairs of it against itself are measured for the noise (two or more tell).

    Raises ArmError where it does not train for long enough, or fails; InputError where it cannot be started.
    """
    design, tell = design or Design(), progress or (lambda _: None)
    tell("one run of the program as it is")
    cwd = arm.cwd or Path.cwd()
    before, others = written(cwd), busy.note()
    baseline = _one_run(arm, design)
    changed = [name for name, state in sorted(written(cwd).items()) if before.get(name) != state]
    noise, notes = _noise(arm, design, pairs, tell, on_pair)
    return msgspec.structs.replace(
        baseline,
        command=arm.command,
        side_effects=(*baseline.side_effects, *_named(changed)),
        noise_share=noise,
        notes=(*baseline.notes, *([others] if others else []), *notes),
    )


def _one_run(arm: Arm, design: Design) -> Baseline:
    gpu = gpustate.Watch()
    with runner.experiment() as (scratch, mark), runner.room(scratch):
        arm, kept = runner.boxed(runner.with_caches(arm, scratch), design, scratch)
        live = LiveArm(arm, design, scratch / "probe", f"{mark}.probe", looked=gpu.look)
        try:
            row, start_s = live.warmed()
            live.freeze()
            gpu.follow(row.gpu)
            run = Run(live, row, start_s, design)
            run.turn(gpu, 0)
            live.end()
            found = _baseline(run, live.rows(), gpu)
            effects = (*found.side_effects, *_named(list(sandbox.kept(scratch))))
            return msgspec.structs.replace(found, side_effects=effects, notes=(*([kept] if kept else []), *found.notes))
        finally:
            live.kill()


def _baseline(run: Run, rows: Iterable[Row], gpu: gpustate.Watch) -> Baseline:
    block, row = run.blocks[0], run.row
    samples = run.samples(block)
    return Baseline(
        command=(),
        step_ns=round(block.wall_ns / block.steps) if block.steps else row.step_ns,
        samples_per_step=samples / block.steps if samples is not None and block.steps else None,
        steps_marked_by=row.marked_by,
        warm_steps=row.steps,
        start_s=run.start_s,
        peak_bytes=run.peak_bytes,
        device=cpu_model_name() if row.device == "cpu" else row.device,
        side_effects=saves(rows),
        notes=tuple(_notes(run, gpu)),
    )


def saves(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return what the program saved, or would have, by what it called."""
    found = next((row for row in rows if isinstance(row, Saved)), None)
    if found is None:
        return ()
    held = ", held back" if found.blocked else ""
    return tuple(f"{what} ({count} {'call' if count == 1 else 'calls'}{held})" for what, count in sorted(found.counts.items()))


def _notes(run: Run, gpu: gpustate.Watch) -> list[str]:
    notes = []
    if not run.row.steady:
        notes.append("steps were not steady at the end of the warm-up")
    if run.faults is not None and run.faults >= MANY_FAULTS:
        notes.append(f"{run.faults:,.0f} page faults a step: processes differ by them; `--steady-malloc` keeps memory in both arms")
    if gpu.strangers:
        notes.append(f"other processes computed on this GPU ({', '.join(map(str, sorted(gpu.strangers)))})")
    throttled = run.states[0].throttled
    if throttled:
        notes.append(f"the GPU throttled ({throttled})")
    return notes


def _noise(
    arm: Arm, design: Design, pairs: int, tell: Progress, on_pair: Callable[[Pair], None] | None
) -> tuple[float | None, tuple[str, ...]]:
    """Return the standard deviation of the log ratio of a pair of unchanged processes, and notes; None where it was not measured."""
    if pairs < 2:
        return None, ()
    found = runner.compare(arm, arm, msgspec.structs.replace(design, looks=(pairs,)), progress=tell, on_pair=on_pair)
    ratios = [ratio for pair in found.measured if (ratio := pair_log_ratio(pair)) is not None]
    if len(ratios) < 2:
        return None, ("the noise is not known", *found.notes)
    return statistics.stdev(ratios), found.notes


# -- files ------------------------------------------------------------------------------------------------------------


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files below `folder` with time of change (ns) and size, at most MAX_FILES; folders of tools are passed over."""
    found: dict[str, tuple[int, int]] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in PASSED_OVER)
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                state = os.stat(path, follow_symlinks=False)
                found[os.path.relpath(path, folder)] = (state.st_mtime_ns, state.st_size)
            if len(found) >= MAX_FILES:
                return found
    return found


def _named(changed: list[str]) -> tuple[str, ...]:
    """Return what to say of files that appeared or changed while the program ran."""
    more = len(changed) - MAX_NAMED
    named = tuple(f"writes {name}" for name in changed[:MAX_NAMED])
    return named if more <= 0 else (*named, f"writes {more} more files")

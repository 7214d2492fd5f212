"""Runs a comparison: pairs of processes that are alive together and take turns. Runs parity runs too."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpudiag.errors import InputError
from gpudiag.experiment import guard
from gpudiag.experiment.arm import ArmError, BudgetError, LiveArm, NotAppliedArmError, find_refusal
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.isolation import wrap_command
from gpudiag.experiment.pairs import Pairs
from gpudiag.experiment.stats import DECIDED, judge_pairs
from gpudiag.experiment.trial.protocol import ParityPlan, ParityRun, ParityStep
from gpudiag.model.experiment import Comparison, Pair
from gpudiag.units import CountedProgress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Progress = Callable[[str], None]

COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Folders of each arm's own: its first pair compiles with cold caches, the later ones share what that has compiled. Those of the user stay
as they are: an arm that is killed while it compiles may leave half a file."""

FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)

MORE_MEMORY = "the program fails without any change too: measure again when more of the machine's memory is free"


def compare_arms(
    first: Arm,
    second: Arm,
    design: Design | None = None,
    *,
    progress: Progress | None = None,
    on_pair: Callable[[Pair], None] | None = None,
    done: Sequence[Pair] = (),
) -> Comparison:
    """Return how much faster `second` trains than `first`, as throughput.

    `on_pair` is given each pair as soon as it is measured; `done` are pairs of an earlier run, which are not measured again. An arm that
    fails makes the verdict `failed`, a fix without evidence `not_applied`; what was measured until then is kept. Raises InputError where a
    command cannot be started, or others compute on the GPU. Whatever happens, no process of an arm is left. Linux only (/proc).
    """
    design, tell, keep = design or Design(), progress or (lambda _: None), on_pair or (lambda _: None)
    pairs, error, steady = list(done), None, all(pair.steady for pair in done)
    with open_experiment() as (scratch, mark):
        first, _ = wrap_in_sandbox(first, design, scratch, caches=scratch / "first")
        second, _ = wrap_in_sandbox(second, design, scratch, caches=scratch / "second")
        run = Pairs((first, second), design, scratch, mark)
        for number in range(len(pairs), design.looks[-1]):
            if len(pairs) in design.looks and judge_pairs(pairs, design, steady=steady).verdict in DECIDED:
                break
            tell(CountedProgress(f"pair {number + 1} of {design.looks[-1]} at most", number, design.looks[-1]))
            try:
                if design.deadline is not None and time.monotonic() >= design.deadline:
                    raise BudgetError(f"pair {number + 1}")
                with catch_full_disk(scratch):
                    pair = run.measure(number)
            except ArmError as failure:
                error = failure
                break
            pairs.append(pair)
            steady = steady and pair.steady
            keep(pair)
    notes = run.last_notes(pairs)
    if isinstance(error, BudgetError) and pairs:  # time that was over is no failure where there are pairs
        notes, error = (*notes, f"the time was over after {len(pairs)} pair{'s' * (len(pairs) > 1)}"), None
    if error is not None:
        notes = (error.message, *([error.detail] if error.detail else []), *notes)
        if error.arm is first and error.reason in ("crash", "oom", "hang"):
            notes = (*notes, MORE_MEMORY if error.crowded else "the program fails without any change")
    found = Comparison(verdict="failed", notes=notes)
    if pairs:
        unsteady = () if steady else (f"steps were not steady after {design.warm_limit_s:.0f} s of warm-up",)
        judged = judge_pairs(pairs, design, steady=steady, notes=(*notes, *unsteady))
        found = msgspec.structs.replace(judged, evidence=run.evidence, slow_dtype=run.slow_dtype or msgspec.UNSET)
    if error is None:
        return found
    verdict = "not_applied" if isinstance(error, NotAppliedArmError) else "failed"
    failed = error.arm is first and verdict == "failed" and error.reason != "timeout" and not error.crowded
    return msgspec.structs.replace(found, verdict=verdict, reason=error.reason, baseline_failed=failed)


def wrap_in_sandbox(arm: Arm, design: Design, scratch: Path, *, caches: Path | None = None) -> tuple[Arm, str]:
    """Return `arm` as it runs in its sandbox, and what that keeps. `caches`: where its compilers' are, unless it names others itself.

    Raises InputError where the sandbox that is asked for does not work here.
    """
    command, cwd, note = wrap_command(design.sandbox, arm.command, arm.cwd, scratch)
    own = {} if caches is None else {name: str(caches / folder) for name, folder in COMPILER_CACHES.items()}
    return msgspec.structs.replace(arm, command=command, cwd=cwd, environ={**own, **arm.environ}), note


@contextmanager
def catch_full_disk(folder: Path) -> Iterator[None]:
    """Have a full disk raise ArmError, in one line."""
    try:
        yield
    except OSError as failure:
        if failure.errno not in FULL_DISK_ERRNOS:
            raise
        raise ArmError("crash", f"cannot write to {folder}: {failure.strerror}; TMPDIR names a folder with more room") from None


@contextmanager
def open_experiment() -> Iterator[tuple[Path, str]]:
    """Give a folder for temporary files, and a mark for processes: all of them are ended, and the folder removed, at the end, even where
    this process is killed.

    Raises InputError where there is no room for a folder.
    """
    mark = uuid.uuid4().hex
    try:
        made = tempfile.TemporaryDirectory(prefix="gpudiag-ab-", ignore_cleanup_errors=True)
    except OSError as error:  # tempfile tries several places, and says which
        raise InputError(f"no temporary folder: {error.strerror or error}", "TMPDIR names one with room") from None
    with made as folder, guard_processes(mark, folder):
        yield Path(folder), mark


@contextmanager
def guard_processes(mark: str, folder: str = "") -> Iterator[None]:
    """Have a process of its own end all arms when this process is gone, however that came about: a frozen arm cannot see it.

    `folder`: of temporary files, which it then removes.
    """
    command = [sys.executable, "-I", "-S", guard.__file__, f"{mark}.", folder]
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


class ParityRecord(NamedTuple):
    """What a parity run wrote down."""

    steps: tuple[ParityStep, ...]
    run: ParityRun
    sketch: NDArray[np.float64] | None
    """Of the gradients of the first step, a row a parameter; None: it wrote none."""


def record_parity(arm: Arm, plan: ParityPlan, design: Design, scratch: Path) -> ParityRecord:
    """Return what `arm` does in the first steps of a run by `plan`. Its files are in a folder of its own in `scratch`.

    Raises ArmError where the run does not come to its end, NotAppliedArmError where a fix has nothing to show.
    """
    mark = uuid.uuid4().hex
    boxed_arm, _ = wrap_in_sandbox(arm, design, scratch, caches=scratch)  # of their own: an arm that is killed may leave half a file
    with guard_processes(mark), catch_full_disk(scratch):
        folder = Path(tempfile.mkdtemp(prefix="parity-", dir=scratch)) / "arm"
        live = LiveArm(boxed_arm, design, folder, mark, parity=plan)
        try:
            rows = live.wait_for_rows()
            if (refusal := find_refusal(rows)) is not None:
                raise refusal
            run = next((row for row in rows if isinstance(row, ParityRun)), None)
            if run is None:
                raise live.explain_end()
            live.end()
        finally:
            live.kill()
    sketch = None
    if run.sketch:
        import numpy

        # the arm wrote the name: it stands for no other folder
        sketch = numpy.load(folder / os.path.basename(run.sketch), allow_pickle=False)
    return ParityRecord(tuple(row for row in rows if isinstance(row, ParityStep)), run, sketch)

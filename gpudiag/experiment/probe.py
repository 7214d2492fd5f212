"""One run of the program as it is, before anything is compared: its steps, samples, memory, noise and side effects; or a recording of
it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gpudiag.capture.run_script.plan import Plan, read_journal
from gpudiag.cores import find_usable_cores
from gpudiag.experiment import gpu_state, guard
from gpudiag.experiment.arm import ArmError, LiveArm, read_tail, start_arm
from gpudiag.experiment.compare import MANY_FAULTS
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.isolation import catch_full_disk, guard_processes, list_layer_files, open_experiment, wrap_in_sandbox
from gpudiag.experiment.trial.protocol import LOG, Row, Saved
from gpudiag.experiment.trial.record import RECORD_WATCHER, RecordPlan
from gpudiag.fixes.registry import list_registered
from gpudiag.hardware.cpu import read_cpu_model
from gpudiag.model.experiment import Baseline

MAX_FILES = 20_000
"""Entries of the program's folder that are looked at."""

MAX_NAMED = 10
"""Files that are named; more are counted."""

SKIPPED_FOLDERS = frozenset({".git", "__pycache__", "node_modules", ".venv", "venv"})


def probe_program(arm: Arm, design: Design | None = None) -> Baseline:
    """Return what one run of `arm` shows.

    Raises ArmError where it does not train for long enough, or fails; InputError where it cannot be started.
    """
    design, command, cwd = design or Design(), arm.command, arm.cwd or Path.cwd()
    before, others, gpu = list_written_files(cwd), describe_busy_processors(), gpu_state.GpuWatch()
    with open_experiment() as (scratch, mark), catch_full_disk(scratch):
        arm, sandbox = wrap_in_sandbox(arm, design, scratch, caches=scratch)
        live = LiveArm(arm, design, scratch / "probe", f"{mark}.probe", gpu=gpu)
        try:
            live.wait_until_warm()
            gpu.follow(live.warmed.gpu)
            begun_s = time.monotonic()
            live.measure_block(gpu, 0)
            trial_s = design.blocks * (time.monotonic() - begun_s)
            if design.deadline is None or 4 * trial_s < design.deadline - time.monotonic():  # else no pair would come to its end either
                for at in range(1, design.blocks):  # does the program have the steps of a trial?
                    live.measure_block(gpu, at)
            live.end()
            saves = describe_saves(live.read_rows())
            layered = list(list_layer_files(scratch))
        finally:
            live.kill()
    changed = [name for name, state in sorted(list_written_files(cwd).items()) if before.get(name) != state]
    row, block, samples, faults = live.warmed, live.blocks[0], live.list_samples()[0], live.faults
    notes = [sandbox] if sandbox else []
    if not row.steady:
        notes.append("steps were not steady at the end of the warm-up")
    if faults is not None and faults >= MANY_FAULTS:
        notes.append(f"{faults:,.0f} page faults a step: processes differ by them; `--steady-malloc` keeps memory in both arms")
    if gpu.strangers:
        notes.append(f"other processes computed on this GPU ({', '.join(map(str, sorted(gpu.strangers)))})")
    if throttled := live.states[0].throttled:
        notes.append(f"the GPU throttled ({throttled})")
    return Baseline(
        command=command,
        step_ns=round(block.wall_ns / block.steps) if block.steps else row.step_ns,
        samples_per_step=samples / block.steps if samples is not None and block.steps else None,
        steps_marked_by=row.marked_by,
        warm_steps=row.steps,
        start_s=live.start_s,
        peak_bytes=live.peak_bytes,
        device=read_cpu_model() if row.device == "cpu" else row.device,
        side_effects=(*saves, *_describe_written_files(layered), *_describe_written_files(changed)),
        notes=tuple([*notes, others] if others else notes),
    )


def describe_saves(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return what the program saved, or would have, by what it called."""
    found = next((row for row in rows if isinstance(row, Saved)), None)
    if found is None:
        return ()
    held = ", held back" if found.blocked else ""
    return tuple(f"{what} ({count} {'call' if count == 1 else 'calls'}{held})" for what, count in sorted(found.counts.items()))


# -- files ------------------------------------------------------------------------------------------------------------


def list_written_files(folder: Path) -> dict[str, tuple[int, int]]:
    """List the files below `folder` with time of change (ns) and size, at most MAX_FILES; folders of tools are passed over."""
    found: dict[str, tuple[int, int]] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                state = os.stat(path, follow_symlinks=False)
                found[os.path.relpath(path, folder)] = (state.st_mtime_ns, state.st_size)
            if len(found) >= MAX_FILES:
                return found
    return found


def _describe_written_files(changed: list[str]) -> tuple[str, ...]:
    more = len(changed) - MAX_NAMED
    named = tuple(f"writes {name}" for name in changed[:MAX_NAMED])
    return named if more <= 0 else (*named, f"writes {more} more files")


BUSY_LOOK_S = 0.5
"""Fifty ticks of the kernel's accounting on each processor."""

BUSY_SHARE = 0.25
"""Of the processors that this process may use: from then on a program with a thread on each of them waits for others again and again."""


def describe_busy_processors() -> str:
    """Return what to say of other programs, '' where they do little or that is not known. Call it before anything is started."""
    import psutil

    ours = find_usable_cores()
    busy = sum(share for number, share in enumerate(psutil.cpu_percent(BUSY_LOOK_S, percpu=True)) if number in ours) / 100
    if busy < BUSY_SHARE * len(ours):
        return ""
    return f"other programs kept {busy:.1f} of {len(ours)} processors busy before it ran: pairs differ more, so that more are needed"


RECORDING_LIMIT_S = 900.0
"""Of a recording: some 35 steps, two traces, and the start of the program. What was recorded until then is read."""

POLL_S, LOOK_S = 0.05, 1.0


def record_arm(arm: Arm, design: Design, folder: Path, scratch: Path, shown: Sequence[str] = ()) -> Path:
    """Return the bundle of a recording of `arm`, at `folder`; what it prints, saves and logs goes to `scratch`. `shown`: for the manifest.

    Raises ArmError where nothing was recorded, InputError where the command cannot be started. No process of it is left.
    """
    home = scratch / f"recorded-{uuid.uuid4().hex[:8]}"
    home.mkdir()
    journal = home / "journal"
    journal.touch()
    plan = Plan(os.path.abspath(folder), tuple(shown) or None, {}, str(journal))
    own = list_registered(call.id for call in arm.fixes)
    watched = RecordPlan(plan, arm.fixes, ends=True, quiet_folder=str(home) if design.block_saves else "", registered=own)
    mark = uuid.uuid4().hex
    arm, _ = wrap_in_sandbox(arm, design, home)
    with guard_processes(mark):
        process = start_arm(arm, home, watched.text(), RECORD_WATCHER, mark)
        family = guard.Family(f"{mark}.", frozenset({process.pid}))
        try:  # to its end, or to that of its time; then what is left of it is ended
            end_s = min(time.monotonic() + RECORDING_LIMIT_S, design.deadline or float("inf"))
            looked_s = time.monotonic()
            while process.poll() is None and time.monotonic() < end_s:
                if time.monotonic() - looked_s > LOOK_S:
                    family.members()  # what has no mark is known by its parent, which will be gone in the end
                    looked_s = time.monotonic()
                time.sleep(POLL_S)
        finally:
            family.kill()
            process.wait()
    begun = sorted((entry for entry in read_journal(journal) if entry.what == "bundle"), key=lambda entry: entry.rank)
    if not begun:
        why = next((f": {entry.text}" for entry in read_journal(journal) if entry.what in ("failed", "note") and entry.text), "")
        raise ArmError("no_steps", f"{arm.name}: nothing was recorded{why}", read_tail(home / LOG))
    return Path(begun[0].text)

"""Records an arm as `gpudiag run` would, for the report that a search begins with; it is ended when the recording is complete."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gpudiag.capture.unmodified.injected import injected
from gpudiag.capture.unmodified.plan import Entry, Plan, read_journal
from gpudiag.errors import InputError
from gpudiag.experiment import guard
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.ending import ArmError, tail_of
from gpudiag.experiment.fixes.registered import registered
from gpudiag.experiment.launch import environment, expendable, free_port, separated
from gpudiag.experiment.runner import boxed, guarded
from gpudiag.experiment.trial.record import RecordPlan

WATCHER = "gpudiag.experiment.trial.record"

LIMIT_S = 900.0
"""Of a recording: some 35 steps, two traces, and the start of the program. What was recorded until then is read."""

POLL_S, LOOK_S = 0.05, 1.0


def record(arm: Arm, design: Design, folder: Path, scratch: Path, shown: Sequence[str] = ()) -> Path:
    """Return the bundle of a recording of `arm`, at `folder`; what it prints, saves and logs goes to `scratch`. `shown`: for the manifest.

    Raises ArmError where nothing was recorded, InputError where the command cannot be started. No process of it is left.
    """
    home = scratch / f"recorded-{uuid.uuid4().hex[:8]}"
    home.mkdir()
    journal = home / "journal"
    journal.touch()
    plan = Plan(os.path.abspath(folder), tuple(shown) or None, {}, str(journal))
    own = registered(call.id for call in arm.fixes)
    text = RecordPlan(plan, arm.fixes, ends=True, quiet_folder=str(home) if design.block_saves else "", registered=own).text()
    _run(arm, design, text, home)
    begun = sorted((entry for entry in read_journal(journal) if entry.what == "bundle"), key=lambda entry: entry.rank)
    if not begun:
        raise ArmError("no_steps", f"{arm.name}: nothing was recorded{_why(read_journal(journal))}", tail_of(home / "log"))
    return Path(begun[0].text)


def _why(entries: list[Entry]) -> str:
    said = [entry.text for entry in entries if entry.what in ("failed", "note") and entry.text]
    return f": {said[0]}" if said else ""


def _run(arm: Arm, design: Design, text: str, home: Path) -> None:
    """Run the command to its end, or to that of its time; then end what is left of it."""
    mark, port = uuid.uuid4().hex, free_port()
    arm, _ = boxed(arm, design, home)
    environ = injected(text, {**environment(arm, home, port), guard.MARK: f"{mark}."}, WATCHER)
    with guarded(mark), open(home / "log", "wb") as log:
        process = _started(separated(arm.command, port), environ, arm.cwd, log)
        expendable(process.pid)
        family = guard.Family(f"{mark}.", frozenset({process.pid}))
        try:
            _wait(process, family, min(time.monotonic() + LIMIT_S, design.deadline or float("inf")))
        finally:
            family.kill()
            process.wait()


def _started(command: tuple[str, ...], environ: dict[str, str], cwd: Path | None, log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - the user's own command
            command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        raise InputError(f"cannot start {command[0]}: {error.strerror or error}") from None


def _wait(process: subprocess.Popen[bytes], family: guard.Family, end_s: float) -> None:
    looked_s = time.monotonic()
    while process.poll() is None and time.monotonic() < end_s:
        if time.monotonic() - looked_s > LOOK_S:
            family.members()  # what has no mark is known by its parent, which will be gone in the end
            looked_s = time.monotonic()
        time.sleep(POLL_S)

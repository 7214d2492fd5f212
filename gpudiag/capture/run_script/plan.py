"""What `gpudiag run` tells the processes of a script, and what they tell it: plan and environment go down, the journal comes back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.capture.run_script.inject import sitecustomize
from gpudiag.capture.run_script.inject.sitecustomize import PLAN, SHADOWED, WATCHER

OptionValue = bool | int | float | tuple[int, ...] | None

JournalEvent = Literal["torch", "training", "bundle", "aside", "failed", "note", "warned", "ended"]


class Plan(msgspec.Struct, frozen=True):
    """How a script is to be recorded: where to, and with which options of a session."""

    path: str
    """Folder of the bundle, absolute."""
    command: tuple[str, ...] | None = None
    """The arguments of `gpudiag run`, for the manifest."""
    options: dict[str, OptionValue] = {}
    """Of gpudiag.profile, by name."""
    journal: str = ""
    """File to which each process appends what became of it; '' for none."""

    def text(self) -> str:
        """Return the plan as the value of an environment variable."""
        return msgspec.json.encode(self).decode()


class JournalEntry(msgspec.Struct, frozen=True):
    """One line of the journal: torch was imported, training began, a bundle was begun, the recording stepped aside, failed or ended, a
    note, or what a session of gpudiag.profile would warn of: the script's own warnings are not ours to write to."""

    what: JournalEvent
    text: str = ""
    rank: int = 0


def append_journal(plan: Plan, what: JournalEvent, text: str = "", rank: int = 0) -> None:
    """Append a line to the journal; where that fails (it is gone when `gpudiag run` has ended) nobody is told."""
    if not plan.journal:
        return
    line = msgspec.json.encode(JournalEntry(what, text, rank)) + b"\n"
    with suppress(OSError):
        descriptor = os.open(plan.journal, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
        try:
            os.write(descriptor, line)  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)


def read_journal(path: Path) -> list[JournalEntry]:
    """Return the entries in their order; lines that cannot be read are left out."""
    try:
        with open(path, "rb") as file:
            # More is not read: a process writes a few lines, and a launcher starts some thousand processes at most
            lines = file.read(1 << 20).splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        with suppress(msgspec.MsgspecError):
            entries.append(msgspec.json.decode(line, type=JournalEntry))
    return entries


INJECT_FOLDER = Path(sitecustomize.__file__).parent


def build_environment(plan: str, base: Mapping[str, str], watcher: str = "") -> dict[str, str]:
    """Return `base` with the text of a plan and the injector.

    `watcher`: the module whose watch(plan) is called once torch has been imported; '' for the one that records.
    """
    environ = {**base, PLAN: plan}
    for name in (SHADOWED, WATCHER):
        environ.pop(name, None)
    if watcher:
        environ[WATCHER] = watcher
    before = base.get("PYTHONPATH")
    if before is not None:
        environ[SHADOWED] = before
    environ["PYTHONPATH"] = f"{INJECT_FOLDER}{os.pathsep}{before}" if before else str(INJECT_FOLDER)
    return environ

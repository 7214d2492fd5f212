"""What `gpudiag run` tells the processes of a script, and what they tell it: the plan goes down, the journal comes back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

MAX_JOURNAL_BYTES = 1 << 20
"""More is not read: a process writes a few lines, and a launcher starts some thousand processes at most."""

Option = bool | int | float | tuple[int, ...] | None

What = Literal["torch", "training", "bundle", "aside", "failed", "note", "warned"]


class Plan(msgspec.Struct, frozen=True):
    """How a script is to be recorded: where to, and with which options of a session."""

    path: str
    """Folder of the bundle, absolute."""
    command: tuple[str, ...] | None = None
    """The arguments of `gpudiag run`, for the manifest."""
    options: dict[str, Option] = {}
    """Of gpudiag.profile, by name."""
    journal: str = ""
    """File to which each process appends what became of it; '' for none."""

    def text(self) -> str:
        """Return the plan as the value of an environment variable."""
        return msgspec.json.encode(self).decode()


def plan_of(text: str) -> Plan:
    """Return the plan of an environment variable. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=Plan)


class Entry(msgspec.Struct, frozen=True):
    """One line of the journal: torch was imported, training began, a bundle was begun, the recording stepped aside or failed, a note, or
    what a session of gpudiag.profile would warn of: the script's own warnings are not ours to write to."""

    what: What
    text: str = ""
    rank: int = 0


def tell(plan: Plan, what: What, text: str = "", rank: int = 0) -> None:
    """Append a line to the journal; where that fails (it is gone when `gpudiag run` has ended) nobody is told."""
    if not plan.journal:
        return
    line = msgspec.json.encode(Entry(what, text, rank)) + b"\n"
    with suppress(OSError):
        descriptor = os.open(plan.journal, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
        try:
            os.write(descriptor, line)  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)


def read_journal(path: Path) -> list[Entry]:
    """Return the entries in their order; lines that cannot be read are left out."""
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_JOURNAL_BYTES).splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        with suppress(msgspec.MsgspecError):
            entries.append(msgspec.json.decode(line, type=Entry))
    return entries

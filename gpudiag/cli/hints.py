"""What a person most likely meant by a word that is no command, or by an option that other tools have."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from gpudiag.errors import UsageError

_SCRIPT = (".py",)
_RECORDING = (".json", ".json.gz", ".json.zst", ".gz", ".zst", ".sqlite")
_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")
_RULE = re.compile(r"[A-Za-z]{3}-?\d{1,2}")
_FORMATS = {"--html": ".html", "--md": ".md", "--markdown": ".md", "--json": ".json", "--format": ".html", "--pdf": ".html"}
"""Options of other tools that choose a format -> the suffix that does so here."""


def check_command(group: str | None, words: Sequence[str], known: Iterable[str]) -> None:
    """Raise UsageError where the first of `words` is no command of `group` but what a command takes, with the call that was meant."""
    if not words or words[0] in known:
        return
    if words[0] == "help" and group is None:
        raise UsageError("help is no command", "gpudiag --help, or gpudiag COMMAND --help")
    meant = _meant(group, words)
    if meant:
        raise UsageError(f"{words[0]} is no command", f"gpudiag {meant}")


def _meant(group: str | None, words: Sequence[str]) -> str:
    """Return the call without `gpudiag`; '' where nothing suggests itself."""
    word, call = words[0], shlex.join(words)
    if group == "rules":
        return f"rules show {call}" if _RULE.fullmatch(word) else ""
    readable = word.lower().endswith(_RECORDING) or os.path.exists(word)
    if group == "export":
        return f"export perfetto {shlex.quote(word)} -o timeline.json.gz" if readable else ""
    if group is not None:
        return ""
    if word.lower().endswith(_SCRIPT) or word in _LAUNCHERS:
        return f"run {call}"
    return f"report {call}" if readable else ""


def check_format(command: str | None, words: Sequence[str]) -> None:
    """Raise UsageError where `words` choose the format of a report by an option: here the name of the file does."""
    for word in words if command == "report" else ():
        name = word.partition("=")[0]
        if name in _FORMATS:
            raise UsageError(f"no such option: {name}", f"the name of the file says the format: -o report{_FORMATS[name]}")

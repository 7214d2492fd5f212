"""The process of one target under atheris: `python -m fuzz.one MODULE TARGET COVERS [options of libFuzzer] [folders of inputs]`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import Any

import atheris
from fuzz.targets.target import Target

HANGS_AFTER_S = 5
"""CPU time for one input: libFuzzer's own limit counts the time in which other processes run, too."""


class HangError(BaseException):
    """An input that takes too long; no code under test may catch it."""


def _hangs(*_: object) -> None:
    raise HangError(f"{HANGS_AFTER_S} s of CPU time for one input")


def _loaded(module: str, name: str, covers: str) -> Target:
    """Return a target that has run on its first inputs, so that what is read once a process counts for none of those to come."""
    with atheris.instrument_imports(include=covers.split(",")):
        found: dict[str, Target] = {target.name: target for target in import_module(module).TARGETS}
        for seed in found[name].seeds():  # within: what is imported on first use is covered, too
            found[name].run(seed)
    return found[name]


def main(arguments: list[str]) -> None:
    """Run until libFuzzer ends the process."""
    target = _loaded(*arguments[1:4])
    signal.signal(signal.SIGPROF, _hangs)

    def bounded(data: bytes) -> Any:
        signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER_S)
        try:
            target.run(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    again = " ".join([sys.executable, "-m", "fuzz.one", *arguments[1:4]])  # libFuzzer's way to start itself for a merge
    atheris.Setup([again, *arguments[4:]], bounded)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)

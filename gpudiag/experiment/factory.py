"""`python -m gpudiag.experiment.factory MODULE:FUNCTION`: the program of an arm of `gpudiag.ab`; it trains what a function builds.

For the engine it is a program like any other: fixes are put in place when torch is imported, and its steps are marked by gpudiag.step().
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import msgspec

from gpudiag.errors import GpudiagError, InputError
from gpudiag.experiment.task import TASK_HINT, Loop, Task
from gpudiag.experiment.trial.protocol import TRIAL_WATCHER
from gpudiag.fixes.code_location import CodeLocation, load_code
from gpudiag.fixes.knobs import ACCUM, KNOB_FIXES, KNOB_STATE, Knobs, call_build
from gpudiag.fixes.registry import replace_appliers

PROGRAM = "gpudiag.experiment.factory"

ALONE_STEPS = 60
"""Steps of a run that is no trial: as many as a recording takes with its standard windows, and some until steps are known."""


def build_command(where: CodeLocation, knobs: Mapping[str, Any], seed: int) -> tuple[str, ...]:
    """Build the command of an arm that trains what the function at `where` builds. Raises InputError for knobs that are no JSON."""
    folder = ("--folder", where.folder) if where.folder else ()
    given = ("--knobs", encode_knobs(knobs)) if knobs else ()
    return (sys.executable, "-m", PROGRAM, where.target, *folder, *given, "--seed", str(seed))


def turn_knobs(program: Sequence[str]) -> AbstractContextManager[None]:
    """Return what has batch-size and accumulation turn knobs of a `build` while it lasts, where the command `program` is one."""
    return replace_appliers(KNOB_FIXES) if PROGRAM in program else nullcontext()


def encode_knobs(knobs: Mapping[str, Any]) -> str:
    """Return knobs as one argument. Raises InputError for values that a command line cannot carry."""
    try:
        return msgspec.json.encode(dict(knobs)).decode()
    except (TypeError, msgspec.MsgspecError) as error:
        raise InputError(f"knobs: {error}", "they go to another process: numbers, texts, truth values, lists or dicts") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: train until the trial is over, or for --steps steps."""
    asked = _build_parser().parse_args(arguments)
    try:
        loop, knobs = _build_loop(asked)
        KNOB_STATE.loop = loop
        steps = asked.steps if asked.steps is not None or TRIAL_WATCHER in sys.modules else ALONE_STEPS
        done = loop.run(steps, first=knobs.check_all_read)  # by build and the first step
        sys.stderr.write(f"gpudiag: trained {done} steps\n")
    except GpudiagError as error:
        sys.stderr.write(f"gpudiag: {error}\n")
        return error.exit_code
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description="Trains what a function builds.")
    parser.add_argument("target", help="FILE.py:FUNCTION or MODULE:FUNCTION; it returns a gpudiag.Task")
    parser.add_argument("--folder", default="", help="put on sys.path for MODULE")
    parser.add_argument("--knobs", action="append", default=[], help="JSON; a later one is laid over those before it")
    parser.add_argument("--seed", type=int, default=0, help="of random, numpy and torch")
    parser.add_argument("--steps", type=int, help=f"steps to train (default: until the trial is over; outside of one {ALONE_STEPS})")
    return parser


def _build_loop(asked: argparse.Namespace) -> tuple[Loop, Knobs]:
    """Build the loop over the Task of the user's function, and its knobs; where that reads the knob of accumulation, it splits the batches
    itself. Raises InputError for what is no Task."""
    import torch  # here and first: the fixes are put in place now, before a file of the user is executed

    random.seed(asked.seed)  # two arms build and draw the same
    torch.manual_seed(asked.seed)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(asked.seed % 2**32)
    build = load_code(CodeLocation(asked.target, asked.folder))
    given: dict[str, Any] = {}
    for text in asked.knobs:
        try:
            given.update(msgspec.json.decode(text, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise InputError(f"--knobs {text}: {error}", "a JSON object: NAME: VALUE") from None
    standard = {"device": "cuda" if torch.cuda.is_available() else "cpu", "seed": asked.seed}

    def knobs(declared: Mapping[str, Any]) -> Knobs:
        KNOB_STATE.knobs = Knobs(given, {**standard, **declared}, KNOB_STATE.turns)
        return KNOB_STATE.knobs

    task, read = call_build(build, knobs)
    if not isinstance(task, Task):
        raise InputError(f"{asked.target} returned a {type(task).__name__}", TASK_HINT)
    return Loop(task, 1 if read.read.get(ACCUM) else read.get(ACCUM)), read


if __name__ == "__main__":
    sys.exit(main())

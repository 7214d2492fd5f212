"""Closes annotations in a later recording than the one in which they were opened: torch 2.13 then writes to memory that was freed.

Arguments: where to record; what closes them: `ours` (the next window), `foreign` (the program's own profiler) or `twice` (no recording of
ours at all: two of torch's own, which crashes torch 2.13).
"""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpudiag.capture.session import Session

FILL = 3000
"""Ops before an annotation is opened: its event then lies in memory that is used again once it is freed."""


def work(count: int) -> None:
    """Call some ops."""
    for _ in range(count):
        torch.ones(8)


def plain() -> Any:
    """Return a profiler of the program's own."""
    return profile(activities=[ProfilerActivity.CPU])


def recorded(path: Path, *, foreign: bool) -> None:
    """Train a loop whose annotations, opened in step 2, are closed in the second window or in a profiler of the program."""
    mark, stack, closed = record_function("mine"), ExitStack(), 0
    with Session(path, skip=0, warm=1, record=3, sites=0, repeat=1 if foreign else 2, wait=1) as prof:
        for number in prof.steps(range(2000)):
            work(FILL if number == 2 else 2)
            if number == 2:
                mark.__enter__()
                stack.enter_context(record_function("stacked"))
            with plain() if foreign and number == 8 else nullcontext():
                if number > 7 and not closed and torch._C._autograd._profiler_enabled():
                    mark.__exit__(None, None, None)
                    stack.close()
                    closed = number
            work(2)
            if closed and number == closed + 3:
                break
            time.sleep(0 if closed else 0.005)  # a further window waits until the first trace is compressed
    assert closed


def twice() -> None:
    """Do the same with torch alone."""
    mark = record_function("mine")
    with plain() as first:
        work(FILL)
        mark.__enter__()
    with plain() as second:
        mark.__exit__(None, None, None)
        work(2)
    del first, second


def main(path: str, closed_by: str) -> None:
    """Do it, and free everything."""
    gc.disable()  # torch's own results of a recording are then freed in the end, whoever wrote into them
    twice() if closed_by == "twice" else recorded(Path(path), foreign=closed_by == "foreign")
    gc.collect()
    sys.stdout.write("whole\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

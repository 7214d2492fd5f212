"""Trains and presses Ctrl-C after some seconds, wherever Python is then: also inside the session's own code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from gpudiag.capture.session import Session


def interrupted(path: Path, delay_s: float) -> None:
    """Record a loop that is interrupted, then one that is not."""
    came: list[bool] = []

    def interrupt(*_: object) -> None:
        came.append(True)
        os.kill(os.getpid(), signal.SIGINT)

    before, own = signal.signal(signal.SIGALRM, interrupt), torch.save
    prof = Session(path, skip=0, warm=1, record=2, sites=1, repeat=8, wait=0)
    ended = False
    try:
        with prof:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            for _ in prof.steps(iter(int, 1)):
                torch.ones(8).sum()
                if came:  # Python drops an exception that is raised in a destructor or in the garbage collector: a second Ctrl-C
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        ended = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended
    assert not torch._C._autograd._profiler_enabled()
    assert torch.save is own
    assert not prof.recording
    with Session(path.with_name(path.name + "-after")) as after:
        list(after.steps(range(20)))


if __name__ == "__main__":
    for number, delay in enumerate(sys.argv[2:]):
        interrupted(Path(sys.argv[1]) / str(number), float(delay))

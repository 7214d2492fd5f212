"""Ends a long command in order also where it is told to end by a signal other than Ctrl-C's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""How schedulers, `timeout` and `kill` end a program, and how a terminal that is closed does. Windows has no SIGHUP."""

OF_A_SIGNAL = 128
"""Exit code of a program that a signal ended, less the number of the signal, as shells count."""


@contextmanager
def stopping() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, and make each the exit code 128 + its number.

    Only the first does: schedulers and terminals send several, and what is being brought into order is not to be interrupted (Ctrl-C still
    does). A signal that was to be ignored, as by nohup, stays so.
    """
    number = signal.SIGINT

    def stop(received: int, _frame: FrameType | None) -> None:
        nonlocal number
        number = signal.Signals(received)
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in SIGNALS if signal.getsignal(one) is signal.SIG_DFL}
    for one in before:
        signal.signal(one, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(OF_A_SIGNAL + number) from None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

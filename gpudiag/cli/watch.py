"""`gpudiag report BUNDLE --watch`: a run followed while it is recorded, until it has finished, is gone, or Ctrl-C is pressed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from gpudiag.cli import terminal
from gpudiag.errors import GpudiagError
from gpudiag.report import whole_run as words

if TYPE_CHECKING:
    from rich.live import Live

    from gpudiag.model.bundle import Moment

EVERY_S = 1.0
"""Between two looks; each is a listing of three folders and reads only files that are new."""

SETTLED_S = 3.0
"""A report waits until no further window has come for this long: the one with stacks follows that of the times within steps."""


def watch_run(look: Callable[[], Moment], report: Callable[[], None], *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show what `look` sees until the run is over or Ctrl-C is pressed; `report` writes the whole report, once the windows have changed.

    Raises InputError of `look` where the bundle cannot be read; what fails in `report` is said.
    """
    with suppress(OSError, AttributeError):
        # How much this process steps back for the training (nice)
        os.nice(5)  # the training goes first on a machine that it shares with this process
    pane = _Pane() if terminal.is_drawable(sys.stdout) else _LinePane()
    windows: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    looks = 0  # since the windows changed
    try:
        with pane:
            while True:
                moment = look()
                over = moment.status in words.ENDED_STATES
                pane.show(moment)
                looks = looks + 1 if moment.windows == windows else 0
                windows = moment.windows
                if over or (looks * EVERY_S >= SETTLED_S and windows != reported):
                    reported = windows
                    with pane.aside():
                        try:
                            report()
                        except GpudiagError as error:
                            terminal.write_note(f"gpudiag: no report yet: {error}")
                if over:
                    return
                sleep(EVERY_S)
    except KeyboardInterrupt:
        terminal.write_note("gpudiag: no longer watching; the run goes on")


class _LinePane(nullcontext[None]):
    _last = ""

    def show(self, moment: Moment) -> None:
        seen = f"{moment.status} {moment.version}"
        if seen != self._last:
            self._last = seen
            terminal.write_result(f"{time.strftime('%H:%M:%S')}  {words.format_watch_line(moment)}\n")

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Pane:
    def __init__(self) -> None:
        self._live: Live | None = None
        self._moment: Moment | None = None

    def __enter__(self) -> _Pane:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, no_color=not terminal.is_coloured())
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()
        if self._moment is not None and kind is None:
            terminal.write_result(f"{terminal.make_writable(words.format_watch_line(self._moment), sys.stdout)}\n")

    def show(self, moment: Moment) -> None:
        from rich.console import Group
        from rich.text import Text

        self._moment = moment
        rows = [(words.format_watch_status(moment), "bold" if moment.status == "recording" else "bold yellow")]
        if moment.status != "waiting":
            rows += [(words.format_watch_pace(moment), ""), (words.format_watch_device(moment), "")]
        profiled = f"profiled: {', '.join(moment.windows)}" if moment.windows else "no window was recorded yet"
        rows += [(f"{profiled}; Ctrl-C stops watching, not the run", "bright_black")]
        if self._live is not None:
            with suppress(OSError):  # a terminal that was closed
                self._live.update(
                    Group(*(Text(terminal.make_writable(text, sys.stdout), style=style) for text, style in rows if text)), refresh=True
                )

    @contextmanager
    def aside(self) -> Iterator[None]:
        live = self._live
        if live is not None:
            live.stop()
        yield
        if live is not None:
            terminal.write_result("\n")
            live.start()

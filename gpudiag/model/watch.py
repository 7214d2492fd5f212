"""What is known of a run at one moment while it is being recorded."""

from __future__ import annotations

from typing import Literal

import msgspec

WatchStatus = Literal["waiting", "recording", "silent", "gone", "stopped", "finished"]
"""waiting: not begun; recording: it writes; silent: for longer than a run that records; gone: so long that it was killed;
stopped: it trains on, unrecorded."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is being recorded, as its bundle tells it. None: not known."""

    version: int
    """Another number wherever the bundle has changed."""
    status: WatchStatus
    reason: str = ""
    """Why it is not recorded any longer, '' where it is or has finished."""
    silent_s: float = 0.0
    """Seconds since the newest file of the recording was written."""
    steps: int = 0
    step_ns: float | None = None
    """Median wall time of the latest unprofiled steps."""
    over: int = 0
    """How many steps that median is over."""
    loader_share: float | None = None
    """Part of these steps that was spent waiting for batches."""
    samples_per_s: float | None = None
    sampled: dict[str, float] = {}
    """The latest value of each telemetry column that is known."""
    windows: tuple[str, ...] = ()
    """The recorded windows in words: 'steps 7 to 12', of stacks 'steps 13 to 14 with stacks'."""
    warnings: tuple[str, ...] = ()

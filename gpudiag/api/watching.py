"""A run looked at while it is being recorded: its pace, its device, its windows, and whether it still lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

from gpudiag.api.growing import STALE_AFTER_S, Growing, Grown
from gpudiag.capture.folder import is_bundle, ranks_of
from gpudiag.errors import InputError
from gpudiag.model.bundle import Manifest, Window
from gpudiag.model.watch import Moment, WatchStatus

LATEST = 200
"""Steps that the pace is over: enough that one slow step says nothing, few enough that a change is seen soon."""

GONE_AFTER_S = 600.0
"""A run writes at its steps alone; one that has written nothing for ten minutes is taken for dead (an evaluation, or a compilation, may
take a few)."""

BEGUN_WITHIN_S = 300.0
"""How long a bundle may take to appear: importing the libraries and loading a model come before the first step."""

SAMPLES = ("gpu_util_pct", "sm_clock_mhz", "power_w", "temperature_c", "mem_used_bytes", "cpu_util_pct", "rss_bytes")

SWITCHED_OFF = "recording was switched off"
"""How a session's note begins that training goes on without it (capture.session)."""


class Watch:
    """Looks at the bundle at `path` (one rank, default the lowest) again and again; each look reads what is new."""

    def __init__(self, path: str, rank: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time in seconds. Raises InputError where something else than a bundle stands there."""
        folder = Path(path)
        if folder.is_file():
            raise InputError(f"{path}: this is a file, and only a bundle that is being recorded can be watched", "leave --watch out")
        self._path, self._rank, self._clock = folder, rank, clock
        self._begun_s = clock()
        self._growing: Growing | None = None

    @property
    def rank(self) -> int | None:
        """Return the rank that is followed; None where none was asked for and there is but one, or no bundle yet."""
        if self._rank is None and self._growing is not None and len(ranks_of(self._path)) > 1:
            return self._growing.rank
        return self._rank

    def look(self) -> Moment:
        """Return what is known now.

        Raises InputError where the bundle was removed, cannot be read, has no such rank, or was not begun within BEGUN_WITHIN_S.
        """
        if self._growing is None:
            if not is_bundle(self._path):
                return self._not_begun()
            self._growing = Growing(self._path, self._rank)
        return self._seen(self._growing.read())

    def _not_begun(self) -> Moment:
        waited_s = self._clock() - self._begun_s
        if waited_s > BEGUN_WITHIN_S:
            raise InputError(
                f"{self._path}: no bundle was begun there within {waited_s:.0f} s", "start the run first: gpudiag run -o BUNDLE"
            )
        return Moment(version=0, status="waiting", reason=f"{self._path} is not begun yet; a run writes it at its first steps")

    def _seen(self, grown: Grown) -> Moment:
        silent_s = max(0.0, self._clock() - grown.changed_unix_ns * 1e-9)
        status, reason = _status(grown.manifest, silent_s)
        plain = grown.steps.filter(pl.col("window") == "plain").tail(LATEST)
        return Moment(
            version=grown.version,
            status=status,
            reason=reason,
            silent_s=silent_s,
            steps=max(grown.manifest.steps, grown.steps.height),
            step_ns=_median(plain["wall_ns"]),
            over=plain.height,
            loader_share=_part(plain, "loader_wait_ns"),
            samples_per_s=_per_second(plain),
            sampled=_latest(grown),
            windows=tuple(_named(window) for window in grown.manifest.windows),
            warnings=(*grown.manifest.warnings, *grown.warnings),
        )


def _status(manifest: Manifest, silent_s: float) -> tuple[WatchStatus, str]:
    if manifest.finished:
        return "finished", ""
    off = next((text for text in manifest.warnings if text.startswith(SWITCHED_OFF)), "")
    if off:
        return "stopped", off
    if silent_s < STALE_AFTER_S:
        return "recording", ""
    return ("silent" if silent_s < GONE_AFTER_S else "gone"), "it was killed, hangs, or is in a step that takes this long"


def _named(window: Window) -> str:
    last = window.first_step + max(window.steps, 1) - 1
    span = f"step {last}" if window.steps <= 1 else f"steps {window.first_step} to {last}"
    return f"{span} with stacks" if window.kind == "sites" else span


def _median(values: pl.Series) -> float | None:
    found = values.median()
    return float(found) if isinstance(found, int | float) else None


def _part(plain: pl.DataFrame, column: str) -> float | None:
    """Return the share of the steps' time in `column`, over the steps that know it."""
    known = plain.filter(pl.col(column).is_not_null())
    wall = int(known["wall_ns"].sum())
    return int(known[column].sum()) / wall if wall else None


def _per_second(plain: pl.DataFrame) -> float | None:
    known = plain.filter(pl.col("samples").is_not_null())
    wall = int(known["wall_ns"].sum())
    return int(known["samples"].sum()) / (wall * 1e-9) if wall else None


def _latest(grown: Grown) -> dict[str, float]:
    """Return the last known value of each column; what a machine does not tell is left out."""
    found = ((name, grown.telemetry[name].drop_nulls().tail(1)) for name in SAMPLES)
    return {name: float(value.item()) for name, value in found if len(value)}

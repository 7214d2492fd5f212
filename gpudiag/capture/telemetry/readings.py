"""One question to a source, when to ask it again, and what to make of its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from gpudiag.capture.telemetry.protocol import Value
from gpudiag.model import tables

Answer = Mapping[str, Value | Exception]
"""Column -> its value, or why there is none."""

COLUMNS = tuple(tables.schema("telemetry"))
_CPU_COLUMNS = frozenset({"cpu_util_pct", "system_cpu_util_pct", "cpu_freq_mhz", "rss_bytes"})
GPU_COLUMNS = tuple(name for name in COLUMNS if name != "t_ns" and name not in _CPU_COLUMNS)

SECOND = 10**9

RETRY_NS = 5 * SECOND
"""Pause after a failure that may pass (a board that is being reset, a driver that is busy)."""

FAST_SHARE = 0.004
"""Part of one core that all questions of every tick together may take; a dear question is asked less often."""

SLOW_SHARE = 0.0002
"""The same for each question that is asked less often. Twenty of them, the fast ones and the thread itself stay below 1 % of a core."""

# Drivers fill a field that they do not know with ones (0xFFFFFFFF); the largest values that mean something, by column.
MOST: dict[str, float] = {
    "sm_clock_mhz": 10_000, "mem_clock_mhz": 50_000, "gpu_util_pct": 100, "mem_util_pct": 100, "mem_used_bytes": 1 << 50,
    "power_w": 20_000, "energy_mj": 1 << 60, "temperature_c": 250, "pcie_rx_bytes_per_s": 1e12, "pcie_tx_bytes_per_s": 1e12,
    "pcie_link_gen": 15, "pcie_link_width": 64, "nvlink_rx_bytes": 1 << 62, "nvlink_tx_bytes": 1 << 62,
    "clock_event_reasons": (1 << 32) - 1, "ecc_uncorrected": 1 << 40, "xid_events": 1 << 40,
    "cpu_util_pct": 1e6, "system_cpu_util_pct": 100.5, "cpu_freq_mhz": 20_000, "rss_bytes": 1 << 50,
}  # fmt: skip

_WHOLE = {column.name for column in tables.TABLES["telemetry"] if column.dtype.is_integer()}


class ImplausibleError(ValueError):
    """A source answered with a number that cannot be."""


def checked(column: str, value: Value) -> Value:
    """Return `value` in the type of its column; raises ImplausibleError for what cannot be (NaN, negative, a field of ones)."""
    try:
        number = int(value) if column in _WHOLE else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ImplausibleError(f"not a number: {type(value).__name__}") from None
    if not (math.isfinite(number) and 0 <= number <= MOST[column]):
        raise ImplausibleError(f"an implausible value: {number}")
    return number


class Reading:
    """One question to a source: `read` answers for `columns`, is asked every `period_ns` (0: every tick) and may take `share` of a core.

    `read` may raise, or hand back an exception for a column. A failure for which `final` holds is not asked again.
    """

    def __init__(
        self,
        columns: Sequence[str],
        read: Callable[[], Answer],
        period_ns: int,
        *,
        share: float = SLOW_SHARE,
        final: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        self.columns, self.period_ns, self.share = tuple(columns), period_ns, share
        self.off = False
        self._read, self._final = read, final
        self._due_ns = 0
        self._reasons: dict[str, str] = {}
        self._answered: set[str] = set()

    def sample(self, at_ns: int) -> dict[str, Value]:
        """Return the known columns, empty where the question is not due at `at_ns`."""
        if self.off or at_ns < self._due_ns:
            return {}
        begun = time.thread_time_ns()
        known, failed = self._ask()
        cost_ns = time.thread_time_ns() - begun
        self.off = bool(failed) and not known and all(self._final(error) for error in failed)
        pause = RETRY_NS if failed and not known else self.period_ns
        self._due_ns = at_ns + max(pause, round(cost_ns / self.share))
        return known

    def _ask(self) -> tuple[dict[str, Value], list[Exception]]:
        try:
            answer = self._read()
        except Exception as error:  # noqa: BLE001 - one question that fails leaves the others
            answer = dict.fromkeys(self.columns, error)
        known: dict[str, Value] = {}
        failed = []
        for column, value in answer.items():
            try:
                if isinstance(value, Exception):
                    raise value
                known[column] = checked(column, value)
            except Exception as error:  # noqa: BLE001 - garbage from a driver is a null with a reason
                failed.append(error)
                self._reasons[column] = said(error)
        self._answered.update(known)
        return known, failed

    def missing(self) -> dict[str, str]:
        """Return column -> why it is null; 'at times' where other answers came."""
        return {column: f"at times: {why}" if column in self._answered else why for column, why in self._reasons.items()}


class Asked:
    """A source of telemetry that is its readings: what each of them says."""

    _readings: Sequence[Reading]

    def sample(self, at_ns: int) -> Mapping[str, Value]:
        """Return what is due and known."""
        found: dict[str, Value] = {}
        for reading in self._readings:
            found.update(reading.sample(at_ns))
        return found

    def missing(self) -> Mapping[str, str]:
        """Return column -> why it is null."""
        return {column: why for reading in self._readings for column, why in reading.missing().items()}


def said(error: Exception) -> str:
    """Return what `error` says, in one short line without paths; its kind where it says nothing."""
    text = " ".join(str(error).split())
    return text[:120] if text and "/" not in text else type(error).__name__


def share_out(readings: Sequence[Reading]) -> None:
    """Give the questions of every tick an equal part of FAST_SHARE."""
    fast = [reading for reading in readings if reading.period_ns == 0]
    for reading in fast:
        reading.share = FAST_SHARE / len(fast)

"""Numbers as people read them. Every function takes plain units (ns, bytes, FLOP) and returns text."""

from __future__ import annotations

from collections.abc import Callable

UNKNOWN = "unknown"


def _format_scaled(value: float, names: tuple[str, ...]) -> str:
    """Return `value` with three significant digits in the largest unit (each is 1000 of the one before) that keeps it at 1 or above."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    index = 0
    while index + 1 < len(names) and float(f"{value:.3g}") >= 1000:
        value /= 1000
        index += 1
    shown = float(f"{value:.3g}")  # 99.96 is shown as 100, not as 100.0
    digits = 0 if shown >= 100 or (index == 0 and value == int(value)) else 1 if shown >= 10 else 2
    return f"{sign}{value:.{digits}f} {names[index]}"


def format_ns(ns: float | None) -> str:
    """Return a duration such as '12.3 ms' from nanoseconds ('unknown' for None)."""
    return UNKNOWN if ns is None else _format_scaled(ns, ("ns", "us", "ms", "s"))


def format_bytes(count: float | None) -> str:
    """Return a size such as '1.50 GB' (powers of 1000) from bytes ('unknown' for None)."""
    return UNKNOWN if count is None else _format_scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_flop(count: float | None) -> str:
    """Return an amount of work such as '137 GFLOP' from floating point operations."""
    return UNKNOWN if count is None else _format_scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_rate(per_second: float | None, unit: str) -> str:
    """Return a rate such as '3.35 TB/s' or '989 TFLOP/s'; `unit` is 'B' or 'FLOP'."""
    if per_second is None:
        return UNKNOWN
    return _format_scaled(per_second, tuple(f"{prefix}{unit}/s" for prefix in ("", "k", "M", "G", "T", "P")))


def format_share(share: float | None, digits: int = 0) -> str:
    """Return a percentage such as '42 %' from a share between 0 and 1."""
    return UNKNOWN if share is None else f"{share * 100:.{digits}f} %"


def format_count(value: float) -> str:
    """Return a mean count such as '14', '2.5' or '1,242': one decimal where it is not whole, none from 100 on, where it says nothing."""
    return f"{value:,.0f}" if value >= 100 or f"{value:.1f}".endswith(".0") else f"{value:.1f}"


def format_ratio_change(ratio: float) -> str:
    """Return a ratio as a change of the step: '+3.2 %'; the end of an interval that is wider than any change: 'over 100 x'."""
    return f"{(ratio - 1) * 100:+.1f} %" if ratio <= 100 else "over 100 x"


def describe_ratio_change(ratio: float) -> str:
    """Return a ratio of steps in words: 'steps take 3.2 % longer'."""
    share = abs(ratio - 1)
    if share < 0.0005:
        return "steps take as long"
    return f"steps take {format_share(share, 1)} {'longer' if ratio > 1 else 'less time'}"


Progress = Callable[[str], None]
"""Is told what is being done."""


class CountedProgress(str):
    """What is being done, in words, and how much of it: progress functions take any text, and those that draw a bar read the numbers."""

    __slots__ = ("done", "total")
    done: int
    total: int

    def __new__(cls, text: str, done: int, total: int) -> CountedProgress:
        """`done` of `total` parts are done."""
        made = super().__new__(cls, text)
        made.done, made.total = done, total
        return made


def prefix_progress(prefix: str, text: str) -> str:
    """Return what is being done with `prefix` before it, and with its numbers where it has some."""
    return CountedProgress(f"{prefix}{text}", text.done, text.total) if isinstance(text, CountedProgress) else f"{prefix}{text}"

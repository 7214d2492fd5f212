"""Times of events as exact integer nanoseconds. Files write microseconds: whole, or with a fraction."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.trace.events import Number

EXACT_BELOW_US = 2.0**43
"""Below this, doubles lie at most 2^-10 us apart, so that rounding to the ns undoes the error of the decimal fraction."""
MAX_NS = 4 * 10**18
"""Times beyond this (the year 2096) are faults; two of them still add up within 64 bits."""
UNIX_SINCE_NS = 10**18
"""A clock that shows more than this (2001) counts from 1970; clocks since boot would need 31 years."""

_MAX_DIGITS = 100
_DECIMAL = Context(prec=_MAX_DIGITS + 10)


class Nanoseconds(NamedTuple):
    """Times in ns; where `valid` is False the file had no usable number and `ns` is 0."""

    ns: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


def from_numbers(microseconds: Sequence[Number]) -> Nanoseconds | None:
    """Return decoded microseconds in ns; None where they must be taken from the text to be exact (or are no plain numbers)."""
    kinds = set(map(type, microseconds))
    if not kinds <= {int, float}:
        return None
    try:
        if float not in kinds:
            return _from_integers(pl.Series(microseconds, dtype=pl.Int64, strict=True).to_numpy())
        values = pl.Series(microseconds, dtype=pl.Float64, strict=True)
    except (TypeError, OverflowError):
        return None
    return _from_floats(values.to_numpy()) if (values.abs() < EXACT_BELOW_US).all() else None


def _from_integers(microseconds: npt.NDArray[np.int64]) -> Nanoseconds:
    limit = MAX_NS // 1000
    valid = (microseconds >= -limit) & (microseconds <= limit)
    return Nanoseconds(np.where(valid, microseconds, 0) * 1000, valid)


def _from_floats(microseconds: npt.NDArray[np.float64]) -> Nanoseconds:
    whole = np.floor(microseconds)
    ns = whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
    return Nanoseconds(ns, np.ones(ns.size, np.bool_))


def from_texts(microseconds: Sequence[bytes]) -> Nanoseconds:
    """Return microseconds given as JSON text in ns, rounded half to even below the ns."""
    found = [exact_ns(text) for text in microseconds]
    valid = np.fromiter((ns is not None for ns in found), np.bool_, len(found))
    return Nanoseconds(np.fromiter((ns or 0 for ns in found), np.int64, len(found)), valid)


def exact_ns(text: bytes) -> int | None:
    """Return microseconds such as 1712345678901234.567 (also quoted) in ns; None where the text is no usable number."""
    text = text.strip(b'"')
    if text[-4:-3] == b"." and len(text) < 24:  # the form that Kineto writes, exact without Decimal
        digits = text[:-4] + text[-3:]
        if digits.isdigit():
            ns = int(digits)
            return ns if ns <= MAX_NS else None
    whole, _, fraction = text.partition(b".")
    if len(fraction) < 3 and len(whole) < 20 and (whole + fraction).isdigit():  # whole microseconds, or fewer digits behind the point
        ns = int(whole + fraction.ljust(3, b"0"))
        return ns if ns <= MAX_NS else None
    return _decimal_ns(text) if text and len(text) <= _MAX_DIGITS and b"_" not in text else None


def _decimal_ns(text: bytes) -> int | None:
    try:
        ns = Decimal(text.decode("ascii", "replace")).scaleb(3, _DECIMAL)
    except (ArithmeticError, ValueError):
        return None
    if not ns.is_finite() or ns.adjusted() > 18 or abs(ns) > MAX_NS:
        return None
    return int(ns.to_integral_value(ROUND_HALF_EVEN, _DECIMAL))

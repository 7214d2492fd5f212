"""Figures of gates as people read them."""

from __future__ import annotations

from gpudiag.units import format_bytes, format_ns, format_share


def amount(value: float, unit: str) -> str:
    """Return a figure with its unit: milliseconds and bytes in the unit that fits, shares in percent."""
    if unit == "ms":
        return format_ns(value * 1e6)
    if unit == "GB":
        return format_bytes(value * 1e9)
    if unit == "share":
        return format_share(value, 1)
    return f"{value:,.4g} {unit}"


def span_text(span: tuple[float, float] | None, unit: str) -> str:
    """Return an interval in brackets, '' where there is none."""
    return f" (interval {amount(span[0], unit)} to {amount(span[1], unit)})" if span else ""

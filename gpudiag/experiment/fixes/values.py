"""Values of `--fix ID=VALUE`, read and refused."""

from __future__ import annotations

from gpudiag.errors import InputError

_DIGITS = 18
"""Of a number in 64 bits: int() refuses a text of thousands of digits with an error of its own."""


def nothing(fix: str, value: str | None) -> None:
    """Accept no value. Raises InputError for one."""
    if value is not None:
        raise InputError(f"{fix} takes no value, but was given {value!r}", f"write --fix {fix}")


def whole(fix: str, value: str | None, least: int, most: int = 10**9) -> int | None:
    """Return a whole number from `least` to `most`; None where no value was given. Raises InputError for what is none."""
    if value is None:
        return None
    number = int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else -1
    if not least <= number <= most:
        raise InputError(f"{fix} takes a whole number from {least} to {most:,}, not {value!r}", f"for example --fix {fix}={max(4, least)}")
    return number

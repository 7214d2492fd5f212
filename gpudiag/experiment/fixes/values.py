"""Values of `--fix ID=VALUE`, read and refused."""

from __future__ import annotations

from gpudiag.errors import InputError


def nothing(fix: str, value: str | None) -> None:
    """Accept no value. Raises InputError for one."""
    if value is not None:
        raise InputError(f"{fix} takes no value, but was given {value!r}", f"write --fix {fix}")


def whole(fix: str, value: str | None, least: int) -> int | None:
    """Return a whole number of at least `least`; None where no value was given. Raises InputError for what is none."""
    if value is None:
        return None
    number = int(value) if value.isascii() and value.isdigit() else -1
    if number < least:
        raise InputError(f"{fix} takes a whole number from {least} on, not {value!r}", f"for example --fix {fix}={max(4, least)}")
    return number

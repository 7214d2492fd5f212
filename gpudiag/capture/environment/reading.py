"""Reading one thing about the process that may not be there, without an exception and without a warning of torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MAX_NAME = 80
"""Characters kept of the name of a class or function of the user's."""

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def read(getter: Callable[[], Any]) -> Any:
    """Return what `getter` returns; None where this build of torch does not have it."""
    try:
        return getter()
    except Exception:  # noqa: BLE001 - a setting that cannot be read is unknown; the training run must not notice
        return None


def flag(value: object) -> bool | None:
    """Return `value` if it is a truth value, else None."""
    return value if isinstance(value, bool) else None


def count(value: object) -> int | None:
    """Return `value` if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def name(value: object) -> str | None:
    """Return `value` if it is a dotted Python name of at most MAX_NAME characters, else None."""
    return value if isinstance(value, str) and len(value) <= MAX_NAME and _NAME.fullmatch(value) else None


def dtype(value: object) -> str | None:
    """Return a torch.dtype as 'bfloat16'; None for None."""
    return None if value is None else str(value).removeprefix("torch.")[:MAX_NAME]

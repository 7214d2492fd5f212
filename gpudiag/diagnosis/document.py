"""A rule file as plain values, with the line of every key for messages. What reads them from YAML is not needed where they are kept."""

from __future__ import annotations

from typing import Any

import msgspec

from gpudiag.errors import InputError

Lines = dict[str, int]
"""Path of a key, such as '$.tests[0].facts' -> line from 1."""


class Source(msgspec.Struct, frozen=True):
    """A rule file as read: where it stands, its values, its lines."""

    path: str
    values: dict[str, Any]
    lines: Lines

    def error(self, key: str, message: str, hint: str | None = None) -> InputError:
        """Return the error that names file, line and key."""
        return InputError(f"{self.path}:{self.line(key)}: {key.removeprefix('$.')}: {message}", hint)

    def line(self, key: str) -> int:
        """Return the line of `key`, or of the nearest key around it."""
        while key not in self.lines and key not in ("$", ""):
            key = key[: max(key.rfind("."), key.rfind("["))]
        return self.lines.get(key, 1)

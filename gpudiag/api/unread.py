"""What becomes of a rank: the bytes that were made of it, or why there are none."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpudiag.errors import GpudiagError, InputError

Item = TypeVar("Item")


class Unread(msgspec.Struct, frozen=True):
    """Why nothing could be made of a rank."""

    message: str
    hint: str | None = None
    bug: bool = False
    """It is a fault of gpudiag, not of the input."""

    def error(self) -> GpudiagError:
        """Return the error to raise where no rank could be read."""
        return GpudiagError(self.message, self.hint) if self.bug else InputError(self.message, self.hint)


Answer = bytes | Unread


def guarded(function: Callable[[Item], bytes], item: Item) -> Answer:
    """Return what `function` makes of `item`, or why it failed: one rank that cannot be read is no reason to lose the others."""
    try:
        return function(item)
    except GpudiagError as error:
        return Unread(error.message, error.hint, bug=not isinstance(error, InputError))
    except Exception as error:  # noqa: BLE001 -- what fails on one rank must not end the report on all
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return Unread(f"internal error: {type(error).__name__}: {error} in {where}", "this is a bug: report it with that text", bug=True)

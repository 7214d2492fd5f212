"""The memory that polars keeps for later: a command that only analyses a recording has it given back to the system at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATOR = "_RJEM_MALLOC_CONF"
"""Where the allocator in polars (jemalloc) looks for options, once, when polars is loaded."""

RETURNED = "dirty_decay_ms:0,muzzy_decay_ms:0"
"""Free pages go back now and not within ten seconds, in which the next stages have taken pages of their own."""


@contextmanager
def frugal() -> Iterator[None]:
    """Have polars give free memory back at once where it is loaded inside, in this process or in one that is started there.

    What the user has set for its allocator stays. Not around what trains: a training that uses polars has other needs.
    """
    if "polars" in sys.modules or ALLOCATOR in os.environ:
        yield
        return
    os.environ[ALLOCATOR] = RETURNED
    try:
        yield
    finally:
        os.environ.pop(ALLOCATOR, None)

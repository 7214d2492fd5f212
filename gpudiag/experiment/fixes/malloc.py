"""Host memory that malloc keeps, instead of asking the kernel for it anew and touching each page again, for every large tensor of a step.

mallopt(3): blocks above M_MMAP_THRESHOLD are mapped one by one and returned when freed; the top of the heap is returned above
M_TRIM_THRESHOLD. Each page that comes back costs a fault and is filled with zeros.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, ClassVar

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.values import nothing

KEPT_BYTES = 256 * 1024 * 1024
"""Both thresholds."""

VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES), "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES)}
"""What glibc reads when a process starts."""

_BELOW, _ABOVE = 192 * 1024 * 1024, 2 * KEPT_BYTES
"""Two blocks, reserved and never touched. Without the variables both are mapped one by one: the threshold that glibc moves by itself ends
at 32 MiB (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX), and an older glibc takes no larger one from us either. The first is large, so that no
hole in the heap holds it."""


class Malloc(Applier):
    """The thresholds as variables of the environment."""

    id = "malloc"
    environ = VARIABLES

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)

    def install(self, site: Site) -> None:
        """Do nothing: the variables are there already. Raises NotAppliedError where malloc is not glibc's."""
        _glibc()

    def evidence(self, site: Site) -> str:
        """Return that a block of 192 MiB comes from the heap and one of 512 MiB does not. Raises NotAppliedError where that is not so."""
        version = _glibc()
        library = ctypes.CDLL(None)
        if not mapped(library, _ABOVE):
            raise NotAppliedError("malloc is not that of glibc: another one stands in its place")
        if mapped(library, _BELOW):
            raise NotAppliedError(f"glibc {version} still maps blocks of {_BELOW >> 20} MiB one by one")
        return f"glibc {version} takes {_BELOW >> 20} MiB from the heap, and maps {_ABOVE >> 20} MiB"


def _glibc() -> str:
    """Return the version of glibc. Raises NotAppliedError where the C library is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        name = version = ""
    if name != "glibc":
        raise NotAppliedError("these variables are glibc's, and this C library is another one")
    return version


_MEMBERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of malloc.h; hblks: blocks that are mapped one by one."""

    _fields_: ClassVar[list[Any]] = [(name, ctypes.c_size_t) for name in _MEMBERS]


class _OldCounts(ctypes.Structure):
    """struct mallinfo."""

    _fields_: ClassVar[list[Any]] = [(name, ctypes.c_int) for name in _MEMBERS]


def mapped(library: ctypes.CDLL, size: int) -> bool:
    """Return whether malloc maps a block of `size` bytes by itself. Raises NotAppliedError where there is no such block to be had."""
    info = getattr(library, "mallinfo2", None)  # glibc 2.33
    if info is None:
        info = library.mallinfo
        info.restype = _OldCounts
    else:
        info.restype = _Counts
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    before = info().hblks
    block = library.malloc(size)
    if not block:
        raise NotAppliedError(f"malloc gives no block of {size >> 20} MiB to look at")
    after = info().hblks
    library.free(block)
    return bool(after > before)

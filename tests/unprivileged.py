"""The rights of an ordinary user, also for tests that run as root, as they do in containers: root may read and write every file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3 (linux/capability.h)."""
_PASSES_OVER_MODES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (linux/capability.h)."""


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Let the modes of files and folders bind this thread and those that it starts; skips where root cannot lay that right down."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()  # capget(2): effective, permitted, inheritable, twice
    if not hasattr(libc, "capset") or libc.capget(header, sets):
        pytest.skip("root may read and write every file here")
    before = sets[0]
    sets[0] = before & ~_PASSES_OVER_MODES
    if libc.capset(header, sets):
        pytest.skip("root may read and write every file here")
    try:
        yield
    finally:
        sets[0] = before
        libc.capset(header, sets)

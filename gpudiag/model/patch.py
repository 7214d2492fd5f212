"""A patch: what proved fixes change in the source of a script, and what its own run has shown."""

from __future__ import annotations

import hashlib

import msgspec

from gpudiag.model.experiment import FixCall, Parity


class PatchedFix(msgspec.Struct, frozen=True, kw_only=True):
    """One fix of a patch: the text with it and those before it, or why a person has to make it."""

    call: FixCall
    title: str
    change: str
    """The code change, as a person would write it."""
    text: str = ""
    """Of the whole file; '' where the place was not certain."""
    why: str = ""
    line: int = 0
    """Where to look; 0: not in this file."""
    elsewhere: str = ""
    """The place, file:line, in the one file that the script imports and that has one; '': none has, or several have. `why` is of it."""


class PatchRun(msgspec.Struct, frozen=True, kw_only=True):
    """What running a patched copy has shown."""

    parity: Parity
    """Against the program with the fixes injected."""
    ratio: float | None = None
    """Throughput over that of the program as it is."""
    interval: tuple[float, float] | None = None
    pairs: int = 0
    device: str = ""
    torch: str = ""
    python: str = ""
    refused: str = ""
    """Why the patch is not offered; '' where it is."""
    digest: str = ""
    """Of the file before and with the patch."""


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes change in one file."""

    path: str
    before: str
    fixes: tuple[PatchedFix, ...]
    run: PatchRun | None = None
    """None: the patched copy was not run."""

    @property
    def made(self) -> tuple[PatchedFix, ...]:
        """The fixes that the patch makes, in their order."""
        return tuple(one for one in self.fixes if one.text)

    @property
    def left(self) -> tuple[PatchedFix, ...]:
        """The fixes that a person has to make."""
        return tuple(one for one in self.fixes if not one.text)

    @property
    def after(self) -> str:
        """The text with all of them; as it was where there is none."""
        return self.made[-1].text if self.made else self.before

    @property
    def digest(self) -> str:
        """A digest of the file before and with the patch: what was run must be what is written."""
        return hashlib.sha256(f"{self.before}\0{self.after}".encode()).hexdigest()

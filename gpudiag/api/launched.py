"""The ranks of one launch when the training is over: which are in a bundle, which are missing, and which process reports on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.capture.bundle import read_manifest
from gpudiag.capture.folder import manifest_name, other_ranks
from gpudiag.capture.recording import encode_manifest
from gpudiag.capture.writer import write_atomic
from gpudiag.errors import GpudiagError
from gpudiag.model.bundle import Manifest, RankState
from gpudiag.model.hardware import Device

WAIT_S, LOOK_S = 60.0, 0.05
"""How long the ranks of other launchers are waited for, which leave the loop at about the same time and then compress their last trace."""

TELL_S = 2.0
"""A wait that is longer is said."""

_NOBODY = -1


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks in one bundle, as one process that started some of them sees them when these are over."""

    ranks: tuple[int, ...]
    unfinished: tuple[int, ...] = ()
    """Still recording, or killed."""
    world_size: int = 1
    started: tuple[int, ...] = ()
    """Those whose end this process has seen."""

    @property
    def reports(self) -> bool:
        """Return whether this process is the one that reports: it started the lowest rank of the bundle."""
        return not self.ranks or not self.started or min(self.started) == min(self.ranks)

    def notes(self) -> list[str]:
        """Return what to know of ranks that are not in the bundle, or not whole."""
        notes, missing = [], self.world_size - len(self.ranks)
        if self.unfinished and self.world_size > 1:
            notes.append(f"{listed(self.unfinished)} did not finish: killed, or still recording")
        if missing > 0 and self.ranks:
            notes.append(
                f"{len(self.ranks)} of {self.world_size} ranks are in this bundle: where the others ran on other machines, "
                "give all of them one folder that they share (-o), or copy their bundles into this one"
            )
        return notes


def listed(ranks: Iterable[int]) -> str:
    """Return ranks in words, neighbours as a range: 'rank 3', 'ranks 0, 4-7'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(words) > 1 or '-' in words[0] else ''} {', '.join(words)}"


def launched(bundle: Path, started: Iterable[int], tell: Callable[[str], None] | None = None, wait_s: float = WAIT_S) -> Launched:
    """Return the ranks in `bundle`, after those that this process has not `started` have finished too, or `wait_s` are over.

    `tell` is told once of a wait that takes longer.
    """
    mine = tuple(sorted(set(started)))
    world_size = _world_size(bundle, mine)
    begun, told = time.monotonic(), False
    while True:
        found = _found(bundle)
        late = [state.rank for state in found if not state.finished and state.rank not in mine]
        waited_s = time.monotonic() - begun
        if not late or waited_s > wait_s or world_size == 1:
            break
        if tell is not None and waited_s > TELL_S and not told:
            tell(f"waiting for {listed(late)} to finish recording")
            told = True
        time.sleep(LOOK_S)
    unfinished = tuple(state.rank for state in found if not state.finished)
    return Launched(ranks=tuple(state.rank for state in found), unfinished=unfinished, world_size=world_size, started=mine)


def _found(bundle: Path) -> tuple[RankState, ...]:
    try:
        return other_ranks(bundle, _NOBODY)
    except OSError:
        return ()


def _world_size(bundle: Path, ranks: tuple[int, ...]) -> int:
    with suppress(GpudiagError):
        return read_manifest(bundle / manifest_name(ranks[0] if ranks else 0)).world_size
    return 1


def keep_peaks(bundle: Path, measure: Callable[[Manifest], Device | None]) -> None:
    """Put measured peaks into the manifests of the finished ranks that know none; what fails leaves them unknown, as the report then says.

    Measured once for ranks on devices of one kind.
    """
    known: dict[tuple[object, ...], Device | None] = {}
    for state in _found(bundle):
        with suppress(Exception):
            path = bundle / manifest_name(state.rank)
            manifest = read_manifest(path)
            if not (manifest.finished and manifest.windows):
                continue
            kind = _kind(manifest)
            if manifest.peaks is not None:
                known.setdefault(kind, manifest.peaks)
                continue
            if kind not in known:
                known[kind] = None  # so that what fails is not tried again for each rank
                known[kind] = measure(manifest)
            if known[kind] is not None:
                write_atomic(path, encode_manifest(msgspec.structs.replace(manifest, peaks=known[kind])))


def _kind(manifest: Manifest) -> tuple[object, ...]:
    """Return what two ranks have in common whose devices have the same peaks."""
    name = None if manifest.device is None else manifest.device.name
    return manifest.device_kind, name, manifest.machine.cpu, manifest.machine.torch, manifest.settings.threads

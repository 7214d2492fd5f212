"""The manifest of the rank that records: what is known when the session begins, after each window, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any

import msgspec

from gpudiag.bundle.layout import list_other_ranks
from gpudiag.bundle.manifest import encode_manifest
from gpudiag.capture import environment
from gpudiag.capture.environment.torch_settings import has_compiled, read_settings
from gpudiag.capture.loop import Loop
from gpudiag.capture.recording import Recording
from gpudiag.capture.windows import Windows
from gpudiag.model.bundle import Manifest, RankState
from gpudiag.model.hardware import Device

OTHERS_S = 1.0
"""How long rank 0 waits for the other ranks, which leave the loop at about the same time, to name those that finished."""


class ManifestEncoder:
    """Collects what the session and its parts know. `peaks` looks up measured peaks, once the session has finished."""

    def __init__(
        self, recording: Recording, loop: Loop, windows: Windows, launch: str, peaks: Callable[[Manifest], Device | None] | None
    ) -> None:
        self._recording, self._loop, self._windows = recording, loop, windows
        self._launch, self._peaks = launch, peaks
        self._machine, self._host = environment.read_machine(), environment.name_node(recording.world_size)
        self._version = ""
        with suppress(metadata.PackageNotFoundError):
            self._version = metadata.version("gpudiag")

    def encode(self, *, finished: bool) -> bytes:
        """Return the manifest as it stands in the bundle. torch's settings are read: call it on the training thread only."""
        recording, manifest = self._recording, self._build(finished)
        if finished:
            peaks: Device | None = None
            try:
                peaks = None if self._peaks is None else self._peaks(manifest)
            except Exception as error:  # noqa: BLE001 - a lookup that fails leaves the peaks unknown
                recording.note("the measured peaks could not be looked up", error)
            manifest = msgspec.structs.replace(manifest, peaks=peaks, ranks=self._find_other_ranks())
        return encode_manifest(msgspec.structs.replace(manifest, warnings=tuple(recording.warnings), notices=recording.notices()))

    def _build(self, finished: bool) -> Manifest:
        recording, loop, seen = self._recording, self._loop, self._loop.seen
        device, marks = environment.read_observed_device(), recording.marks
        if marks.dropped:
            recording.remember(f"{marks.dropped} host marks were dropped: too many in one segment")
        known: dict[str, Any] = {
            "tool_version": self._version,
            "created_unix_ns": recording.created_ns,
            "device_kind": "gpu" if device is not None else "cpu",
            "device": device,
            "machine": self._machine,
            "windows": tuple(self._windows.recorded.values()),
            "steps": loop.rows.number - loop.rows.dropped,
            "rank": recording.rank,
            "world_size": recording.world_size,
            "host": self._host,
            "launch": self._launch,
            **recording.events.manifest(),
        }
        known["settings"] = msgspec.structs.replace(
            known.get("settings") or read_settings(),  # the switches as they stood in a window, where a part knows that
            autocast=tuple(sorted(seen.autocast)),
            optimizers=seen.optimizers,
            loader=loop.loader or seen.loader,
            compiled=has_compiled(),
        )
        return Manifest(finished=finished, **known)

    def _find_other_ranks(self) -> tuple[RankState, ...]:
        recording, deadline = self._recording, time.monotonic() + OTHERS_S
        if recording.rank or recording.world_size == 1:
            return ()
        while True:
            ranks = list_other_ranks(recording.path, recording.rank)
            if all(state.finished for state in ranks) or time.monotonic() > deadline:
                return ranks
            time.sleep(0.02)

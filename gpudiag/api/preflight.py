"""Which fixes of a factory cannot fit into the memory of the GPU, told without training: they are not started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import msgspec

from gpudiag.experiment.preflight import Need
from gpudiag.model.experiment import FixCall, Outcome
from gpudiag.units import format_bytes

ESTIMATE_S = 120.0
"""A model of a thousand layers takes some seconds; what takes longer is tried without."""

_GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""


def too_large(command: Sequence[str], fixes: Sequence[FixCall], accumulation: FixCall | None = None) -> tuple[Outcome, ...]:
    """Return an outcome for each batch size among `fixes` whose tensors alone need more than the GPU has free; none without a GPU.

    `accumulation`: applied together with it.
    """
    if not any(map(os.path.exists, _GPUS)):
        return ()
    found = []
    for call in fixes:
        if call.id == "batch-size" and call.value is not None:
            told = need(command, [call, *([accumulation] if accumulation else [])])
            if told.impossible:
                found.append(_outcome(call, told))
    return tuple(found)


def need(command: Sequence[str], fixes: Sequence[FixCall]) -> Need:
    """Return the memory that the factory `command` takes with the knobs of `fixes` turned; not known where it cannot be estimated."""
    turns = [word for call in fixes for word in ("--turn", str(call))]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [*command, *turns, "--estimate"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ESTIMATE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Need(reason=str(error))
    lines = done.stdout.splitlines() or [b""]
    try:
        return msgspec.json.decode(lines[-1], type=Need)
    except msgspec.MsgspecError:
        return Need(reason=done.stderr.decode(errors="replace").strip()[-500:] or "nothing was said")


def _outcome(call: FixCall, told: Need) -> Outcome:
    need, free = format_bytes(told.peak_bytes), format_bytes(told.free_bytes)
    note = f"not started: its tensors need {need} (an estimate on tensors without data), and the device has {free} free"
    return Outcome(fix=str(call), verdict="failed", reason="oom", notes=(note,))

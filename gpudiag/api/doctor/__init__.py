"""`gpudiag doctor`: what is installed, what is missing, what that costs, and the fix of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from gpudiag.api.doctor import gpu, machine, software, storage
from gpudiag.api.doctor.check import Check, Need, Status, unknown
from gpudiag.api.doctor.seen import Seen
from gpudiag.api.installed import version

CHECKS: tuple[Callable[[Seen], Check], ...] = (
    software.dependencies,
    software.torch,
    gpu.gpu,
    software.profiler,
    gpu.device_events,
    storage.recordings,
    software.training_tools,
    machine.processors,
    machine.shared_memory,
    gpu.telemetry,
    software.compiler,
    software.triton,
    storage.calibration,
    machine.open_files,
    machine.frequency,
    gpu.mode,
    machine.clock,
    software.backends,
    storage.cache,
    software.dashboard,
    software.cluster,
    gpu.counters,
    machine.memory,
    machine.numa,
    machine.tracing,
    software.python,
)
"""Those whose failure costs most come first."""

ORDER: tuple[Status, ...] = ("missing", "limited", "unknown", "not applicable", "ok")


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What `gpudiag doctor` found."""

    verdict: str
    """In one sentence."""
    failed: tuple[str, ...]
    """Names of the checks that fail what was asked for, or what is installed; none: exit code 0."""
    checks: tuple[Check, ...]
    """By status in the order of ORDER, then by what they cost."""


def examine(needs: Collection[Need] = (), seen: Seen | None = None) -> Examination:
    """Return what all checks find. `needs`: what must work beside what is installed. Never raises for what a machine lacks."""
    seen = seen or Seen()
    checks = sorted((_done(check, seen) for check in CHECKS), key=lambda check: ORDER.index(check.status))
    asked, implied = set(needs), _implied(seen)
    failed = tuple(check.name for check in checks if check.status in _fatal(check, asked, implied))
    return Examination(verdict=_verdict(checks, failed, seen), failed=failed, checks=tuple(checks))


def _fatal(check: Check, asked: set[Need], implied: set[Need]) -> tuple[Status, ...]:
    """Return with which status a check fails: what was asked for must be there, what is installed must not be broken."""
    if asked.intersection(check.needs):
        return "missing", "unknown", "not applicable"
    return ("missing",) if implied.intersection(check.needs) else ()


def _done(check: Callable[[Seen], Check], seen: Seen) -> Check:
    """Return what a check finds; one that fails says so, and the others go on."""
    try:
        return check(seen)
    except Exception as error:  # noqa: BLE001 - a machine of an odd kind is what this command is for
        return unknown(check.__name__.replace("_", " "), f"the check failed: {type(error).__name__}: {error}")


def _implied(seen: Seen) -> set[Need]:
    """Return what is needed for what is installed to work: with torch a recording, and that of the GPU where there is one."""
    if version("torch") is None:
        return {"core"}
    return {"core", "train", "gpu"} if seen.nvidia or seen.amd else {"core", "train"}


def _verdict(checks: Sequence[Check], failed: Sequence[str], seen: Seen) -> str:
    """Return what works, what does not, and how much is missing or limited."""
    if failed:
        start = f"not working: {_listed(failed)}"
    elif version("torch") is None:
        start = "recordings can be analysed; without torch nothing can be recorded"
    else:
        start = f"trainings on {'the GPU' if seen.torch.get('gpu', 'available') else 'this CPU'} can be recorded and analysed"
    count = {status: sum(check.status == status for check in checks) for status in ORDER}
    rest = [f"{count[status]} {status}" for status in ("missing", "limited", "unknown") if count[status]]
    return f"{start}; {', '.join(rest)} of {len(checks)} checks" if rest else f"{start}; nothing is missing"


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

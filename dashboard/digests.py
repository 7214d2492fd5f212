"""What the list of recordings shows of one beyond its manifest: the headline figures of its report, kept when it was analysed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag import cache
from gpudiag.files import read_file
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.report import Mfu, ReportData, ReportDevice, StepSummary
from gpudiag.model.timeline import StepHistory
from gpudiag.recordings.code_lines import REPORT_NAME
from gpudiag.recordings.folder import Entry, read_version_stamp

MOST_REPORT_BYTES = 64 << 20

_FILE = "digest"


class Digest(msgspec.Struct, frozen=True, kw_only=True):
    """The headline figures of one recording. None: not known."""

    device: str = ""
    step_ns: float | None = None
    step_of: str = ""
    """Which steps that is the median of."""
    mfu: float | None = None
    finding: str = ""
    """Title of the first finding; '' where there is none."""
    rule: str = ""
    severity: str = ""
    bound: float | None = None
    """Its upper bound, as a share of the step."""
    error: str = ""
    """Why it could not be analysed; '' where it could."""


class _Ceiling(msgspec.Struct, frozen=True):
    share: float | None = None


class _Finding(msgspec.Struct, frozen=True):
    rule: str = ""
    title: str = ""
    severity: str = ""
    ceiling: _Ceiling | None = None


class _Headlines(msgspec.Struct, frozen=True):
    """The keys of a report that are looked at; the rest, which is most of it, is passed over."""

    steps: StepSummary
    device: ReportDevice | None = None
    mfu: Mfu | None = None
    history: StepHistory | None = None
    findings: tuple[_Finding, ...] = ()


def build_digest(report: ReportData | _Headlines) -> Digest:
    """Return the headline figures of a report. The step is that of the unprofiled steps where they were recorded: nothing slows them."""
    plain = report.history.median_ns if report.history is not None else None
    first = report.findings[0] if report.findings else None
    return Digest(
        device=report.device.name if report.device else "",
        step_ns=plain if plain is not None else report.steps.median_ns,
        step_of="unprofiled steps" if plain is not None else "analysed steps",
        mfu=report.mfu.share if report.mfu else None,
        finding=first.title if first else "",
        rule=first.rule if first else "",
        severity=first.severity if first else "",
        bound=first.ceiling.share if first and first.ceiling else None,
    )


def load_digest(path: Path, entry: Entry) -> Digest | None:
    """Load what is known of the recording `entry` at `path` without analysing it; None where nothing is."""
    slot = _find_slot(path)
    kept = cache.load_entry(slot) if slot is not None else None
    if kept is not None:
        with suppress(KeyError, *UNREADABLE):
            return msgspec.json.decode(kept[_FILE], type=Digest)
    if entry.kind == "bundle" and entry.status == "finished" and not (path / REPORT_NAME).is_symlink():
        with suppress(OSError, *UNREADABLE):
            return build_digest(msgspec.json.decode(read_file(path / REPORT_NAME, MOST_REPORT_BYTES), type=_Headlines))
    return None


def store_digest(path: Path, digest: Digest) -> None:
    """Keep the digest of the recording at `path`, in the user's cache folder and never beside it."""
    slot = _find_slot(path)
    if slot is not None:
        cache.store_entry(slot, [(_FILE, msgspec.json.encode(digest))])


def _find_slot(path: Path) -> cache.Slot | None:
    place = None if cache.is_switched_off() else cache.find_place(path)
    if place is None:
        return None
    try:
        key = cache.digest_values(str(path), read_version_stamp(path), cache.digest_code())
    except OSError:
        return None
    return cache.Slot(place, "digest", path.name if path.is_file() else cache.WHOLE_FOLDER, key)

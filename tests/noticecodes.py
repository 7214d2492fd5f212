"""Codes for the texts of hand-made reports, known by how they begin."""

from __future__ import annotations

from typing import Any

import msgspec

from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.report import ReportData

_BEGINNINGS = (
    ("the file breaks off or is malformed", NoticeCode.TRACE_BREAKS_OFF),
    ("no ProfilerStep marks: the whole trace counts", NoticeCode.NO_STEP_MARKS),
    ("the run is still recording or was killed", NoticeCode.RECORDING_UNFINISHED),
    ("neither names nor traces tell which rank", NoticeCode.RANKS_UNTOLD),
    ("no model FLOPs utilisation: ", NoticeCode.NO_MFU),
    ("the device is not named in the recording", NoticeCode.DEVICE_UNNAMED),
    ("no peaks ", NoticeCode.NO_PEAKS),
    ("the peaks of this CPU are not known", NoticeCode.NO_PEAKS_OF_CPU),
    ("holds, but ", NoticeCode.NO_GAIN),
    ("switched off in ", NoticeCode.SWITCHED_OFF),
    ("withheld: a step is ", NoticeCode.WITHHELD_BY_PROFILER),
    ("withheld: ", NoticeCode.WITHHELD_BY_MEASUREMENT),
)
"""How texts begin -> their codes."""


def recall_codes(report: ReportData) -> ReportData:
    """Return a hand-made report with the codes of what is decided by them."""
    changed: dict[str, Any] = {}
    if report.trust.warnings and not report.trust.notices:
        changed["trust"] = msgspec.structs.replace(report.trust, notices=tuple(map(_recall, report.trust.warnings)))
    if not any(rule.notice for rule in report.rules):
        told = [rule.status in ("suppressed", "not_applicable") for rule in report.rules]
        changed["rules"] = tuple(
            msgspec.structs.replace(rule, notice=_recall(rule.reason)) if has_reason else rule
            for rule, has_reason in zip(report.rules, told, strict=True)
        )
    return msgspec.structs.replace(report, **changed) if changed else report


def _recall(text: str) -> Notice:
    """Return a text with its code; its words stay as they are."""
    words, code = next(((words, code) for words, code in _BEGINNINGS if text.startswith(words)), ("", NoticeCode.RECORDED_TEXT))
    if code == NoticeCode.NO_GAIN and " at the recorded pace: " in text:
        code = NoticeCode.NO_GAIN_AT_RECORDED_PACE
    return make_notice(code, text=text) if code != NoticeCode.NO_MFU else make_notice(code, reason=text.removeprefix(words))

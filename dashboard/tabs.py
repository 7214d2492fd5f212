"""Which pages have nothing to show of a recording, and why: their tabs are grey. They can be opened all the same, and say what to do."""

from __future__ import annotations

from gpudiag.model.report import ReportData
from gpudiag.recordings.folder import Entry
from gpudiag.report.roofline import select_roofline_rows

EXPERIMENTS_ALONE = "these are results of experiments, without a recording"


def explain_empty(path: str, entry: Entry, report: ReportData | None, *, others: int) -> str:
    """Return why the page at `path` is empty, '' where it is not, or where that is not known yet.

    `report`: None while the recording has not been analysed; `others`: recordings that it could be compared with.
    """
    if entry.kind == "experiments":
        return "" if path == "/experiments" else EXPERIMENTS_ALONE
    if path == "/telemetry" and entry.kind != "bundle":
        return "a trace holds no telemetry: only a recording of gpudiag run does"
    if path == "/ranks" and entry.ranks < 2:
        return "one rank was recorded"
    if path == "/compare" and not others:
        return "there is no other recording in this folder"
    return _explain_by_report(path, entry, report) if report is not None else ""


def _explain_by_report(path: str, entry: Entry, report: ReportData) -> str:
    if path == "/memory" and report.memory is None and (entry.kind != "bundle" or report.telemetry is None):
        return "memory use was not recorded: gpudiag run --memory does"
    if path == "/ops" and not report.ops and not report.kernels:
        return "no ops were recorded"
    if path == "/roofline":
        if report.device is None or not report.device.peaks:
            return "the peak rates of the device are not known"
        if not select_roofline_rows(report):
            return "no op has FLOPs and bytes that are known: were shapes recorded?"
    return ""

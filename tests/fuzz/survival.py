"""What must hold of the report on any trace."""

from __future__ import annotations

from pathlib import Path

from gpudiag import api
from gpudiag.errors import GpudiagError
from gpudiag.model.report import decode_report


def survives(path: Path) -> bool:
    """Return whether `path` gave a report (which is checked) and no error; any other exception is the caller's failure."""
    message = ""
    try:
        report = api.diagnose(str(path))
    except GpudiagError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        return False
    report.data.breakdown.validate()
    assert report.data.steps.wall_ns == report.data.breakdown.wall_ns >= 0
    assert [outcome for outcome in report.data.rules if outcome.status == "error"] == []
    assert [warning for warning in report.data.trust.warnings if "bug of gpudiag" in warning] == []
    assert report.text(width=40)
    assert report.markdown()
    assert decode_report(report.json()) == report.data
    return True

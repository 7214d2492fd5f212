"""The page of `gpudiag doctor`."""

from __future__ import annotations

from gpudiag.report.checks import format_doctor


def _check(name: str, status: str, found: str, costs: str = "", fix: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "found": found, "costs": costs, "fix": fix}


def test_the_verdict_comes_first_and_what_is_right_last() -> None:
    checks = [
        _check("GPU", "missing", "there, but not reached", "trainings run on the CPU", "nvidia-smi must show it"),
        _check("open files", "limited", "64 MB", "Bus error", "docker run --shm-size=8g"),
        _check("numa", "not applicable", "not told"),
        _check("torch", "ok", "2.13.0"),
    ]
    text = format_doctor("GPU does not work; 1 missing", checks, 100)
    assert text == (
        "GPU does not work; 1 missing.\n\n"
        "missing\n  GPU         there, but not reached\n              costs: trainings run on the CPU\n"
        "              fix:   nvidia-smi must show it\n\n"
        "limited\n  open files  64 MB\n              costs: Bus error\n              fix:   docker run --shm-size=8g\n\n"
        "ok\n  torch       2.13.0\n\n"
        "not applicable\n  numa (not told)\n"
    )


def test_long_texts_are_wrapped_below_themselves_and_cleaned() -> None:
    text = format_doctor("well", [_check("driver", "unknown", "word " * 40 + "\x1b[31m", fix="do " * 40)], 60)
    assert "\x1b" not in text
    assert all(len(line) <= 60 for line in text.splitlines())
    lines = text.splitlines()
    assert lines[3].startswith("  driver  word")
    assert lines[4].startswith("          word")

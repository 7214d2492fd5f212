"""The peers that read the same traces, in a virtual environment of their own: their versions of pandas and numpy are not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TRACELENS = "git+https://github.com/AMD-AGI/TraceLens.git"
"""Not on PyPI: `tracelens` there is another program."""

HTA_CODE = """
import sys
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
for name, options in (("temporal", {}), ("gpu_kernel", {}), ("idle_time", {"ranks": [0]})):
    try:
        getattr(found, f"get_{name}_breakdown")(visualize=False, **options)
    except Exception as error:
        print(f"its {name} breakdown failed ({type(error).__name__})", end=" ")
"""
"""Loading, and the breakdowns by time, kernel and idleness: a part of what a report of gpudiag holds. It fails on some traces."""

TRACELENS_CODE = """
import sys, tempfile
from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch
with tempfile.TemporaryDirectory() as folder:
    generate_perf_report_pytorch(profile_json_path=sys.argv[1], output_csvs_dir=folder)
"""
"""The plain report on performance, written as CSV."""

HTA, LENS = "HTA", "TraceLens"
NEEDS = {HTA: ("hta.trace_analysis", HTA_CODE), LENS: ("TraceLens.Reporting.generate_perf_report_pytorch", TRACELENS_CODE)}

BASELINE_PER_FLOOR = {HTA: 198 / 3.4, LENS: 117 / 3.4}
"""Wall time over the floor's, of HTA 0.5.0 and TraceLens 171dd74 on a trace of 1,023 MB: measured before on two cores, with these commands.

It stands in for a peer that cannot be installed, and is marked so: floors of two machines differ as their peers do, more or less.
"""


def prepare(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the commands of the peers (a trace is their last word), and why there is none of the others. Makes `folder` where it must."""
    python = folder / "bin" / "python"
    if not python.exists():
        made = _tried([sys.executable, "-m", "venv", str(folder)])
        if made:
            return {}, dict.fromkeys(NEEDS, f"no virtual environment at {folder}: {made}")
    wanted = {HTA: _extra(), LENS: [TRACELENS]}
    missing = {}
    for name, (module, _) in NEEDS.items():
        if _imports(python, module):
            continue
        failed = _tried([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted[name]])
        if failed or not _imports(python, module):
            missing[name] = f"not installed: {failed or f'{module} cannot be imported'}"
    return {name: [str(python), "-c", code] for name, (_, code) in NEEDS.items() if name not in missing}, missing


def version(command: list[str], name: str) -> str:
    """Return the version of a peer that `command` runs; '' where it does not say."""
    package = {HTA: "HolisticTraceAnalysis", LENS: "TraceLens"}[name]
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([command[0], "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _extra() -> list[str]:
    """Return the requirements of the extra `bench`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [str(word) for word in project["project"]["optional-dependencies"]["bench"]]


def _imports(python: Path, module: str) -> bool:
    return subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def _tried(command: list[str]) -> str:
    """Return why a command failed, in the line that says so; '' where it did not."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return next((line for line in lines if line.startswith(("fatal:", "ERROR:"))), lines[-1])

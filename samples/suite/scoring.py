"""Scores one sample: records it as a user would, judges the report, measures its twin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpudiag.errors import GpudiagError
from gpudiag.experiment import guard
from gpudiag.model.report import ReportData, decode_report
from suite import gain as gains
from suite.expected import Sample
from suite.gain import Gain
from suite.judged import Judged, judge
from suite.needs import device_name
from suite.table import Row

MAX_RECORDED_BYTES = 16 << 20
RECORD_S = 600.0
"""For training, recording and the report of one sample; they take some twenty seconds on an idle machine."""

GAIN_FILE, BUNDLE_FOLDER = "gain.json", "bundle"

Tell = Callable[[str], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are scored."""

    runs: int = 1
    pairs: int = 2
    gain: bool = True
    record: Path | None = None
    """Where bundles and gains are kept, for machines without this device."""


def score(sample: Sample, options: Options, tell: Tell) -> Row:
    """Return the score of a sample that this machine can run."""
    begun = time.monotonic()
    runs: list[Judged] = []
    failed = note = ""
    gain: Gain | None = None
    with tempfile.TemporaryDirectory(prefix="gpudiag-score-") as folder:
        scratch = Path(folder)
        try:
            for run in range(options.runs):
                tell(f"{sample.name}: recording" + (f" {run + 1} of {options.runs}" if options.runs > 1 else ""))
                runs.append(judge(_recorded(sample, scratch / str(run)).findings, sample.expected))
        except GpudiagError as error:
            failed = str(error)
        if options.gain and not sample.control and not failed:
            tell(f"{sample.name}: its twin")
            found = gains.measure(sample, options.pairs, _made(scratch / "twin"), lambda text: tell(f"{sample.name}: {text}"))
            gain, note = (None, f"gain not measured: {found}") if isinstance(found, str) else (found, "")
        if options.record is not None and not failed:
            try:
                keep(options.record / sample.name, scratch / "0" / BUNDLE_FOLDER, gain)
            except GpudiagError as error:  # a bundle that is too large takes nothing from the score
                note = "; ".join(filter(None, (note, f"not kept: {error}")))
    seconds = time.monotonic() - begun
    return Row(
        name=sample.name,
        wanted=sample.expected.first,
        runs=tuple(runs),
        gain=gain,
        note=note,
        failed=failed,
        seconds=seconds,
        proof_wanted=options.gain and not sample.control,
    )


def score_recorded(sample: Sample, folder: Path) -> Row | None:
    """Return the score of a sample from the bundle that was kept in `folder`; None where there is none."""
    from gpudiag.api import diagnose

    if not (folder / BUNDLE_FOLDER).is_dir():
        return None
    begun = time.monotonic()
    report = diagnose(folder / BUNDLE_FOLDER).data
    gain = msgspec.json.decode((folder / GAIN_FILE).read_bytes(), type=Gain) if (folder / GAIN_FILE).exists() else None
    device = report.device.name if report.device else "an unknown device"
    return Row(
        name=sample.name,
        wanted=sample.expected.first,
        runs=(judge(report.findings, sample.expected),),
        gain=gain,
        note=f"scored from its recording on {device}",
        seconds=time.monotonic() - begun,
    )


def _recorded(sample: Sample, folder: Path) -> ReportData:
    """Return the report of `gpudiag run` on a sample. Raises GpudiagError where there is none."""
    bundle = _made(folder) / BUNDLE_FOLDER
    command = [sys.executable, "-m", "gpudiag", "run", "-o", str(bundle), str(sample.script)]
    mark = uuid.uuid4().hex
    environ = {**os.environ, guard.MARK: mark}
    try:
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=RECORD_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise GpudiagError(f"no end after {RECORD_S:.0f} s") from None
    finally:
        guard.Family(mark).kill()  # the script too, where `gpudiag run` was ended
    report = bundle / "report.json"
    if done.returncode or not report.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GpudiagError(f"exit code {done.returncode}: {last}")
    return decode_report(report.read_bytes())


def keep(folder: Path, bundle: Path, gain: Gain | None) -> None:
    """Keep a bundle, without its reports, and the gain of the twin in `folder`. Raises GpudiagError for a bundle that is too large."""
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name not in {"report.html", "report.json"}]
    size = sum(path.stat().st_size for path in files)
    if size > MAX_RECORDED_BYTES:
        raise GpudiagError(f"{bundle}: {size / 1e6:.0f} MB, at most {MAX_RECORDED_BYTES / 1e6:.0f} MB are kept")
    shutil.rmtree(folder, ignore_errors=True)
    for path in files:
        target = folder / BUNDLE_FOLDER / path.relative_to(bundle)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    if gain is not None:
        kept = msgspec.structs.replace(gain, device=device_name())
        (folder / GAIN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder

"""Checks on a GPU what gpudiag says of one: python samples/gpu/validate.py [--parts peaks,...] [--budget 9m] [--out FOLDER].

Each part runs in a process of its own, with a share of the time, so that one that fails or hangs leaves the others. FOLDER has
VALIDATION.md and results.json after every row, and below recorded/ the bundles of the samples. `--device cpu` rehearses what a CPU can.
Exits 1 where something does not hold or failed, 2 where there is no GPU and none was asked to do without.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
import time
import traceback
import uuid
from pathlib import Path

import msgspec
import psutil
import torch
from validation import rows

from gpudiag.errors import GpudiagError
from gpudiag.experiment import guard
from gpudiag.experiment.ab import parse_seconds

ROOT = Path(__file__).resolve().parents[2]

PARTS = {"peaks": 35, "capture": 80, "counters": 95, "planted": 130, "figures": 55, "fixes": 95, "programs": 50}
"""Part -> its share of the time; what one leaves goes to those after it."""

ASKED_FOR = {"tests": 200}
"""Parts that run only where they are named: all tests of tests/gpu."""

_ASK = """
import torch
import pynvml
from gpudiag.capture.environment.inventory import read_driver_version
print(read_driver_version() or "unknown")
found = torch.cuda.get_device_properties(0)
print(f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory:,} B, compute capability {found.major}.{found.minor}")
"""

GRACE_S = 8.0
"""A part knows its deadline; one that is this much late is ended."""


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    options = _parser().parse_args(arguments)
    names = [name for name in options.parts.split(",") if name]
    unknown = [name for name in names if name not in PARTS | ASKED_FOR]
    if unknown or not names:
        print(f"validate: no part {', '.join(unknown) or 'was named'}: there are {', '.join(PARTS | ASKED_FOR)}", file=sys.stderr)
        return 2
    try:
        budget_s = parse_seconds(options.budget, "--budget") or 0.0
    except GpudiagError as error:
        print(f"validate: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"validate: torch {torch.__version__} sees no GPU; --device cpu rehearses what a CPU can", file=sys.stderr)
        return 2
    out = options.out.resolve()
    if options.child:
        return child(names[0], options.device, out, budget_s)
    return parent(names, options.device, out, budget_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"separated by commas (default: all but {', '.join(ASKED_FOR)})")
    parser.add_argument("--budget", default="9m", help="time for all of it (default 9m)")
    parser.add_argument("--out", type=Path, default=Path("runs/validation"), help="folder for what was found (default runs/validation)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


# -- one part, in its own process -----------------------------------------------------------------------------------------


def child(part: str, device: str, out: Path, budget_s: float) -> int:
    """Run one part here; return 1 where it failed by an error of its own."""
    job = rows.Job(part, device, out, budget_s - (time.time() - psutil.Process().create_time()))  # importing took some of it
    try:
        importlib.import_module(f"validation.{part}").run(job)
    except Exception as error:  # noqa: BLE001 - whatever it is stands in the table, what was measured before stays
        traceback.print_exc()
        job.error("the part came to its end", error)
        return 1
    return 0


# -- all parts ------------------------------------------------------------------------------------------------------------


def parent(names: list[str], device: str, out: Path, budget_s: float) -> int:
    """Run the parts one after the other. This process computes nothing on the GPU: experiments refuse to share it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        (out / rows.ROWS / f"{name}.jsonl").unlink(missing_ok=True)
    (out / rows.ABOUT).write_bytes(msgspec.json.encode(about(names, device)))
    deadline = time.monotonic() + budget_s
    for place, name in enumerate(names):
        share_s = share(names[place:], deadline - time.monotonic())
        print(f"{name}: {max(share_s, 0):.0f} s", flush=True)
        run_part(name, device, out, share_s)
        rows.write(out)
        for row in rows.read(out):
            if row.part == name:
                print(f"  {row.verdict:<13} {row.claim}: expected {row.expected}; measured {row.measured} {row.note}".rstrip(), flush=True)
    found = rows.read(out)
    print(rows.summary(found))
    print(f"the table is {out / rows.TABLE}")
    return int(any(row.verdict in ("DOES NOT HOLD", "ERROR") for row in found))


def share(names: list[str], left_s: float) -> float:
    """Return the seconds of the first of the parts that are still to run."""
    weights = PARTS | ASKED_FOR
    return left_s * weights[names[0]] / sum(weights[name] for name in names)


def run_part(name: str, device: str, out: Path, share_s: float) -> None:
    """Run one part in a session of its own, and end all that it started; a row says where it was ended or died."""
    if share_s <= 0:
        return rows.keep(out, rows.Row(name, "the part ran", "-", "-", "not run", "no time was left for it"))
    command = [sys.executable, __file__, "--child", "--parts", name, "--device", device, "--out", str(out), "--budget", f"{share_s:.1f}"]
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=out, env=environment(), stdout=log, stderr=log, start_new_session=True)  # noqa: S603
        try:
            code = process.wait(share_s + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            guard.Family(uuid.uuid4().hex, frozenset({process.pid})).kill()
            process.wait()
    if code is None:
        late = f"ended after {share_s + GRACE_S:.0f} s; what it had found by then stands above, the rest is not known"
        rows.keep(out, rows.Row(name, "the part came to its end", "-", "-", "not run", late))
    elif code not in (0, 1):
        rows.keep(out, rows.Row(name, "the part came to its end", "-", "-", "ERROR", f"exit code {code}; see {name}.log"))
    return None


def environment() -> dict[str, str]:
    """Return the environment of a part: gpudiag is found from any folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def about(names: list[str], device: str) -> dict[str, str]:
    """Return what stands above the tables; the device is asked in a process of its own."""
    lines = ["unknown", f"CPU: {platform.processor() or platform.machine()}"]
    if device == "cuda":
        done = subprocess.run([sys.executable, "-c", _ASK], env=environment(), capture_output=True, text=True, check=False)  # noqa: S603
        lines = done.stdout.splitlines() if done.returncode == 0 else ["unknown", f"unknown: {done.stderr.strip()[-200:]}"]
    return {
        "device": lines[-1],
        "driver": lines[0],
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "python": platform.python_version(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "parts": ",".join(names),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

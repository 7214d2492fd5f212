"""Scores gpudiag on programs in many styles: `python samples/styles/score.py [PROGRAM...]`.

Each program is recorded with `gpudiag run`, as it is. Its first finding, the line of that and the upper bound are held against truth.yaml
and against what the cured program (`--cured`) gains, by wall and by CPU time of pairs of processes that take turns. Nothing above info may
be said of those named `healthy_...` but what a measured gain bears out. What was recorded and measured is kept (`--kept`) and not made
again; SCORE.md is written from all.
"""

from __future__ import annotations

import argparse
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several threads wait for each other where cores are busy

import msgspec
import torch  # before the processes that are timed are forked: importing it is no part of a training
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from styles.table import Pair, Score, judge, write_table  # noqa: E402
from suite.needs import device_name  # noqa: E402

from gpudiag.model.report import decode_report  # noqa: E402

LIMIT_S = 300


class Truth(msgspec.Struct, frozen=True):
    """What is planted in a program, or measured on a healthy one: see truth.yaml."""

    cause: str = ""
    source: str = ""
    rules: tuple[str, ...] | None = None
    gains: dict[str, str] = {}


def main() -> None:
    """Score the programs named, and write the table of all that are kept."""
    args = _read_arguments()
    truths = msgspec.convert(yaml.safe_load((HERE / "truth.yaml").read_text()), dict[str, Truth])
    names = list(dict.fromkeys([*truths, *sorted(path.stem for path in HERE.glob("healthy_*.py"))]))
    if unknown := set(args.names) - set(names):
        sys.exit(f"score: no program {', '.join(sorted(unknown))}")
    for name in args.names or names:
        folder = args.kept / name
        if args.again:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _tell(f"{name}: {_record(HERE / f'{name}.py', folder, again=args.report)}")
            pairs = _measure(HERE / f"{name}.py", folder, args.pairs)
            _tell(f"{name}: {', '.join(f'{p.planted_wall_s:.1f} s to {p.cured_wall_s:.1f} s' for p in pairs)}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            _tell(f"{name}: {error}")
    scores = list(_read_scores(names, truths, args.kept))
    about = f"gpudiag run as it is, torch {torch.__version__}, {device_name()}."
    write_table(scores, HERE / "SCORE.md" if args.out is None else args.out, about)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score gpudiag on programs in many styles.")
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="only these (default: all)")
    parser.add_argument("--kept", type=Path, default=Path("runs/styles"), metavar="DIR", help="where recordings and times are kept")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of processes that measure a gain (default 2; 0: none)")
    parser.add_argument("--report", action="store_true", help="make the reports of kept recordings again")
    parser.add_argument("--again", action="store_true", help="record and measure again what is kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table (default: SCORE.md beside the programs)")
    return parser.parse_args()


def _tell(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _record(script: Path, folder: Path, *, again: bool) -> str:
    """Record a program unless it is; write report.json and report.txt beside its bundle, and return how that went."""
    bundle, report = folder.resolve() / "bundle", folder.resolve() / "report.json"
    if report.exists() and not again:
        return "kept"
    gpudiag = [sys.executable, "-m", "gpudiag"]
    commands = [[*gpudiag, "report", str(bundle), "-o", str(report)]]
    if not bundle.exists():
        commands.insert(0, [*gpudiag, "run", "--no-report", "-o", str(bundle), str(script)])
    for command in commands:
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S)  # noqa: S603
        if done.returncode:
            return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    (folder / "report.txt").write_text(done.stdout)
    return "recorded"


def _measure(script: Path, folder: Path, pairs: int) -> list[Pair]:
    """Return the times of planted and cured program, by pairs in which either comes first in turn; kept ones count."""
    path = folder / "gain.json"
    measured = msgspec.json.decode(path.read_bytes(), type=list[Pair]) if path.exists() else []
    while len(measured) < pairs:
        order = (False, True) if len(measured) % 2 == 0 else (True, False)
        times = {cured: _time(script, cured=cured) for cured in order}
        measured.append(Pair(*times[False], *times[True]))
        path.write_bytes(msgspec.json.encode(measured))
    return measured


def _time(script: Path, *, cured: bool) -> tuple[float, float]:
    """Return the seconds by wall and CPU, all its processes included, that a program trains from its first optimizer step to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _train(script, cured, write)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - this process is a copy: nothing may return from it
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"{script.name}{' --cured' if cured else ''} failed")
    wall, cpu = text.split()
    return float(wall), float(cpu)


def _train(script: Path, cured: bool, pipe: int) -> None:
    """Run a program in this process, which ends with it. The healthy have no cure: bfloat16 autocast takes its place."""
    begun: list[tuple[float, float]] = []

    def begin(*_: object) -> None:
        if not begun:
            begun.append((time.perf_counter(), _read_cpu_s()))

    register_optimizer_step_post_hook(begin)
    signal.alarm(LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = [str(script), *(["--cured"] if cured else [])]
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=cured and script.name.startswith("healthy_"))
    with tempfile.TemporaryDirectory() as scratch, autocast:
        os.chdir(scratch)
        runpy.run_path(str(script), run_name="__main__")
        os.write(pipe, f"{time.perf_counter() - begun[0][0]} {_read_cpu_s() - begun[0][1]}".encode())
        os.chdir("/")


def _read_cpu_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _read_scores(names: list[str], truths: dict[str, Truth], kept: Path) -> Iterator[Score]:
    for name in names:
        report, gain = kept / name / "report.json", kept / name / "gain.json"
        if report.exists():
            pairs = msgspec.json.decode(gain.read_bytes(), type=list[Pair]) if gain.exists() else []
            truth = truths.get(name, Truth())
            yield judge(decode_report(report.read_bytes()), HERE / f"{name}.py", truth.rules, pairs, tuple(truth.gains))


if __name__ == "__main__":
    main()

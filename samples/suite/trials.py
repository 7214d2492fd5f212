"""Programs that are recorded as they are, and trained with and without their cure by processes that take turns."""

from __future__ import annotations

import ast
import contextlib
import importlib
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
from pathlib import Path

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from suite.programs import Pair

LIMIT_S = 900


def try_out(script: Path, folder: Path, *, pairs: int, again: bool, report: bool) -> None:
    """Record and measure a program unless that is kept in `folder`: again, or only its report again, where asked to; say how that went."""
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tell(f"{script.stem}: {record(script, folder, again=report)}")
        times = measure(script, folder, pairs)
        tell(f"{script.stem}: {', '.join(f'{p.planted_wall_s:.1f} s to {p.cured_wall_s:.1f} s' for p in times)}")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        tell(f"{script.stem}: {error}")


def tell(text: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def record(script: Path, folder: Path, *, again: bool) -> str:
    """Record a program unless it is; write report.json and report.txt beside its bundle, and return how that went."""
    bundle, report = folder.resolve() / "bundle", folder.resolve() / "report.json"
    if report.exists() and not again:
        return "kept"
    gpudiag = [sys.executable, "-m", "gpudiag"]
    commands = [[*gpudiag, "report", str(bundle), "-o", str(report)]]
    if not bundle.exists():
        commands.insert(0, [*gpudiag, "run", "-o", str(bundle), str(script)])  # measures peaks too
    for command in commands:
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S)  # noqa: S603
        if done.returncode:
            return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    (folder / "report.txt").write_text(done.stdout)
    return "recorded"


def measure(script: Path, folder: Path, pairs: int) -> list[Pair]:
    """Return the times of planted and cured program, by pairs in which either comes first in turn; kept ones count."""
    path = folder / "gain.json"
    measured = read_pairs(folder)
    if len(measured) < pairs:
        _import_what_it_needs(script)
    while len(measured) < pairs:
        order = (False, True) if len(measured) % 2 == 0 else (True, False)
        times = {cured: _time(script, cured=cured) for cured in order}
        measured.append(Pair(*times[False], *times[True]))
        path.write_bytes(msgspec.json.encode(measured))
    return measured


def read_pairs(folder: Path) -> list[Pair]:
    """Return the times that are kept."""
    path = folder / "gain.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Pair]) if path.exists() else []


def _import_what_it_needs(script: Path) -> None:
    """Import the modules that a program names before its processes are forked: importing them is no part of a training."""
    sys.path.insert(0, str(script.parent))
    importlib.import_module("torch._dynamo")  # an optimizer imports it, for seconds
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        with contextlib.suppress(ImportError):  # the program itself says what is missing
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    getattr(module, alias.name, None)  # a package may import its parts when they are asked for


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

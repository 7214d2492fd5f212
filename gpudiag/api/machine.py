"""The machine as `gpudiag doctor` sees it: system files and answers of child processes; what a check is; checks of the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpudiag.cores import count_usable_cores
from gpudiag.model.bundle import UNREADABLE
from gpudiag.units import format_bytes

Status = Literal["ok", "missing", "limited", "not applicable", "unknown"]
Need = Literal["core", "train", "gpu", "compile", "telemetry", "dashboard", "cluster"]


class Result(NamedTuple):
    """What one check found."""

    status: Status
    found: str
    """Version, path or figure; why, where it is not known or does not apply."""
    costs: str = ""
    """What does not work, or is not known, because of it."""
    fix: str = ""
    needs: tuple[Need, ...] = ()
    """What fails with it: where it is missing; where it was asked for, also where it is not known or does not apply."""


class Check(msgspec.Struct, frozen=True):
    """The result of one check (see Result), with its name."""

    name: str
    status: Status
    found: str
    costs: str = ""
    fix: str = ""
    needs: tuple[Need, ...] = ()


LIMIT_S = 30.0
"""A child that says nothing for longer is ended: importing torch from a slow network disk takes 20 s, a driver that hangs for ever."""


class ProbeAnswers(msgspec.Struct, frozen=True):
    """What a child said."""

    stages: Mapping[str, Mapping[str, Any]] = {}
    end: str = ""

    def get(self, stage: str, fact: str) -> Any:
        """Return a fact; None where it is not known."""
        return self.stages.get(stage, {}).get(fact)

    def why(self, stage: str) -> str:
        """Return why a stage said nothing."""
        return str(self.get(stage, "error") or self.end or "nothing was said")


class ObservedMachine:
    """The machine as `gpudiag doctor` sees it; `root` stands before the paths of system files."""

    def __init__(self, root: Path = Path("/"), limit_s: float = LIMIT_S, environ: Mapping[str, str] = os.environ) -> None:
        self._root, self._limit_s = root, limit_s
        self.environ = environ

    def path(self, name: str) -> Path:
        """Return a system file."""
        return self._root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return the content of a small system file; None where it cannot be read."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return the number in a system file; None where there is none."""
        found = self.text(name) or ""
        return int(found) if found.lstrip("-").isdecimal() and len(found) < 20 else None

    def disk(self, name: str | Path) -> tuple[int, int] | None:
        """Return (bytes in all, bytes free) of the file system of a folder; None where it cannot be told."""
        try:
            usage = shutil.disk_usage(name)
        except OSError:
            return None
        return usage.total, usage.free

    @property
    def nvidia(self) -> bool:
        """Whether the driver of NVIDIA is loaded."""
        return self.path("/proc/driver/nvidia/version").exists() or self.path("/dev/nvidiactl").exists()

    @property
    def amd(self) -> bool:
        """Whether the driver of AMD is loaded."""
        return self.path("/dev/kfd").exists()

    @cached_property
    def children(self) -> Mapping[str, ProbeAnswers]:
        """What the children said; all are started at once, when first asked for."""
        with ThreadPoolExecutor(2, "gpudiag-doctor") as pool:
            found = {name: pool.submit(run_probe, name, self._limit_s) for name in ("torch", "nvml")}
            return {name: future.result() for name, future in found.items()}

    @property
    def torch(self) -> ProbeAnswers:
        """What torch says of itself."""
        return self.children["torch"]

    @property
    def nvml(self) -> ProbeAnswers:
        """What NVML says."""
        return self.children["nvml"]


def run_probe(probe: str, limit_s: float) -> ProbeAnswers:
    """Return what `python -m gpudiag.capture.probes PROBE` says within `limit_s` seconds."""
    command = [sys.executable, "-m", "gpudiag.capture.probes", probe]
    with tempfile.TemporaryFile() as said:  # a pipe would lose what was said before the end
        try:
            child = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return ProbeAnswers(end=f"no process could be started: {error.strerror}")
        try:
            code = child.wait(limit_s)
            end = "" if code == 0 else f"the probe ended with signal {-code}" if code < 0 else f"the probe ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"no answer within {limit_s:.0f} s"
        finally:
            # End a child; one that hangs in the kernel is left behind
            if child.poll() is None:
                with contextlib.suppress(OSError):
                    child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
        said.seek(0)
        stages = {}
        for line in said.read().splitlines():
            with contextlib.suppress(*UNREADABLE, AttributeError):
                answer = msgspec.json.decode(line, type=dict[str, Any])
                stages[str(answer.pop("stage", ""))] = answer
        return ProbeAnswers(stages, end)


SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to


def check_processors(seen: ObservedMachine) -> Result:
    """Return how many cores there are, and how much of them may be used."""
    cores = count_usable_cores()
    threads, quota = seen.torch.get("versions", "threads"), None  # how many cores the container grants (cgroup 2, else 1)
    words = (seen.text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        quota = int(words[0]) / int(words[1])
    else:
        runs, period = (seen.number(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota = runs / period if runs is not None and period and runs > 0 else None
    granted = cores if quota is None else min(quota, float(cores))
    told = f"{cores} cores"
    told += "" if quota is None else f", of which the container grants {quota:g}"
    told += f"; torch uses {threads} threads" if threads else ""
    if not threads or threads <= granted + 0.5:
        return Result("ok", told)
    halts = "threads wait for each other" if quota is None else "the container is halted for parts of each 100 ms"
    costs = f"more threads than cores: {halts}, and every host time scatters"
    return Result("limited", told, costs, f"export OMP_NUM_THREADS={max(1, int(granted))}, or grant more cores")


def check_shared_memory(seen: ObservedMachine) -> Result:
    """Check whether loader workers have room to hand batches over."""
    found = seen.disk(seen.path(SHARED_MEMORY))
    if found is None:
        return Result("not applicable", "this system has none")
    told = f"{format_bytes(found[0])}, {format_bytes(found[1])} free"
    if found[0] >= 1 << 30:  # batches of a few workers take some hundred MB; Docker's default is 64 MB
        return Result("ok", told)
    costs = "DataLoader workers hand batches over in it: 'Bus error' where it is full"
    return Result("limited", told, costs, "docker run --shm-size=8g (or --ipc=host)")


def check_open_files(_: ObservedMachine) -> Result:
    """Return how many files a process may hold open."""
    try:
        import resource
    except ImportError:  # Windows
        return Result("not applicable", "this system has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A worker holds a descriptor for each tensor that it hands over (file_descriptor sharing of torch.multiprocessing)
    if soft == resource.RLIM_INFINITY or soft >= 4096:
        return Result("ok", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    top = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    fix = f"ulimit -n {top}" if top > soft else "raise the limit in /etc/security/limits.conf"
    return Result("limited", f"up to {soft:,}", "DataLoader workers fail with 'Too many open files' where batches hold many tensors", fix)

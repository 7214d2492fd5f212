"""The machine as `gpudiag doctor` sees it: system files and answers of child processes; what a check is."""

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
from typing import Any, Literal

import msgspec

from gpudiag.model.bundle import UNREADABLE

Status = Literal["ok", "missing", "limited", "not applicable", "unknown"]
Need = Literal["core", "train", "gpu", "compile", "telemetry", "dashboard", "mcp", "cluster"]


class Check(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    status: Status
    found: str
    """Version, path or figure; why, where it is not known or does not apply."""
    costs: str = ""
    """What does not work, or is not known, because of it."""
    fix: str = ""
    needs: tuple[Need, ...] = ()
    """What fails with it: where it is missing; where it was asked for, also where it is not known or does not apply."""


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
            code = child.wait(limit_s)
            end = "" if code == 0 else f"the probe ended with signal {-code}" if code < 0 else f"the probe ended with code {code}"
        except OSError as error:
            end = f"no process could be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            end = f"no answer within {limit_s:.0f} s"
            child.kill()  # one that hangs in the kernel is left behind
        said.seek(0)
        stages = {}
        for line in said.read().splitlines():
            with contextlib.suppress(*UNREADABLE, AttributeError):
                answer = msgspec.json.decode(line, type=dict[str, Any])
                stages[str(answer.pop("stage", ""))] = answer
        return ProbeAnswers(stages, end)

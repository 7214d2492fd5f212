"""What the checks look at: the system's files, and the answers of children that may hang or crash in the driver."""

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
from typing import Any

import msgspec

from gpudiag.model.decoding import UNREADABLE

LIMIT_S = 30.0
"""A child that says nothing for longer is ended: importing torch from a slow network disk takes 20 s, a driver that hangs for ever."""

MAX_TEXT = 1 << 16


class Answers(msgspec.Struct, frozen=True):
    """What a child said."""

    stages: Mapping[str, Mapping[str, Any]] = {}
    """Stage -> facts, as far as it came."""
    end: str = ""
    """How it ended, in words; '' where it said everything."""

    def get(self, stage: str, fact: str) -> Any:
        """Return a fact; None where it is not known."""
        return self.stages.get(stage, {}).get(fact)

    def why(self, stage: str) -> str:
        """Return why a stage said nothing."""
        return str(self.get(stage, "error") or self.end or "nothing was said")


class Seen:
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
                return file.read(MAX_TEXT).strip()
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
        """Return whether the driver of NVIDIA is loaded."""
        return self.path("/proc/driver/nvidia/version").exists() or self.path("/dev/nvidiactl").exists()

    @property
    def amd(self) -> bool:
        """Return whether the driver of AMD is loaded."""
        return self.path("/dev/kfd").exists()

    @cached_property
    def children(self) -> Mapping[str, Answers]:
        """Return what the children said; all are started at once, when first asked for."""
        with ThreadPoolExecutor(2, "gpudiag-doctor") as pool:
            found = {name: pool.submit(asked, name, self._limit_s) for name in ("torch", "nvml")}
            return {name: future.result() for name, future in found.items()}

    @property
    def torch(self) -> Answers:
        """Return what torch says of itself."""
        return self.children["torch"]

    @property
    def nvml(self) -> Answers:
        """Return what NVML says."""
        return self.children["nvml"]


def asked(probe: str, limit_s: float) -> Answers:
    """Return what `python -m gpudiag.capture.probes PROBE` says within `limit_s` seconds."""
    command = [sys.executable, "-m", "gpudiag.capture.probes", probe]
    with tempfile.TemporaryFile() as said:  # a pipe would lose what was said before the end
        try:
            child = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return Answers(end=f"no process could be started: {error.strerror}")
        try:
            code = child.wait(limit_s)
            end = "" if code == 0 else f"the probe ended with signal {-code}" if code < 0 else f"the probe ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"no answer within {limit_s:.0f} s"
        finally:
            _stop(child)
        said.seek(0)
        return Answers(_stages(said.read()), end)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child; one that hangs in the kernel is left behind."""
    if child.poll() is None:
        with contextlib.suppress(OSError):
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)


def _stages(said: bytes) -> dict[str, dict[str, Any]]:
    found = {}
    for line in said.splitlines():
        with contextlib.suppress(*UNREADABLE, AttributeError):
            answer = msgspec.json.decode(line, type=dict[str, Any])
            found[str(answer.pop("stage", ""))] = answer
    return found

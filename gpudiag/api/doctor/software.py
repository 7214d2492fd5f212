"""Checks of what is installed: Python, gpudiag's own dependencies, torch and what it comes with."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sysconfig
from importlib import metadata
from typing import Literal

from gpudiag.api.doctor.check import Check, idle, limited, missing, ok, unknown
from gpudiag.api.doctor.seen import Seen
from gpudiag.api.installed import version

_LOWER_BOUND = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*>=\s*([\d.]+)")
_COMPILER_S = 10.0

_TORCH_FIX = "pip install torch, the build for your device as https://pytorch.org/get-started says"


def python(_: Seen) -> Check:
    """Return which Python this is."""
    return ok("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def dependencies(_: Seen) -> Check:
    """Return whether gpudiag's own dependencies are there, new enough."""
    asked = [text for text in metadata.requires("gpudiag") or [] if "extra ==" not in text] if version("gpudiag") else []
    bad = _too_old(asked)
    if not asked:
        return unknown("gpudiag's libraries", "gpudiag runs from its source, uninstalled: what it needs is not listed", "pip install -e .")
    if bad:
        return missing(
            "gpudiag's libraries", "; ".join(bad), "commands fail, or read files wrongly", "pip install --upgrade gpudiag", "core"
        )
    return ok("gpudiag's libraries", f"all {len(asked)} are there, new enough")


def _too_old(requirements: list[str]) -> list[str]:
    """Return what is wrong with each requirement that is not met; markers for other systems and versions of Python are left out."""
    found = []
    for text in requirements:
        match = _LOWER_BOUND.match(text)
        if match is None or not _applies(text):
            continue
        installed = version(match[1])
        if installed is None:
            found.append(f"{match[1]} is not installed")
        elif _release(installed) < _release(match[2]):
            found.append(f"{match[1]} {installed} is older than {match[2]}")
    return found


def _applies(requirement: str) -> bool:
    marker = requirement.partition(";")[2]
    if "platform_machine" in marker:
        return platform.machine() in marker
    return "python_version" not in marker or platform.python_version_tuple()[:2] < ("3", "11")


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers before anything else ('2.13.0+cpu': 2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def torch(seen: Seen) -> Check:
    """Return whether torch can be imported."""
    installed = version("torch")
    if installed is None:
        costs = "nothing can be recorded or tried: run, ab, calibrate, demo (recordings of others are analysed all the same)"
        return missing("torch", "not installed", costs, _TORCH_FIX, "train", "gpu", "compile")
    found = seen.torch.get("versions", "version")
    if found is None:
        return missing(
            "torch", f"{installed}: {seen.torch.why('versions')}", "nothing can be recorded or tried", _TORCH_FIX, "train", "core"
        )
    built = f"CUDA {seen.torch.get('versions', 'cuda')}" if seen.torch.get("versions", "cuda") else ""
    built = built or (f"ROCm {seen.torch.get('versions', 'hip')}" if seen.torch.get("versions", "hip") else "CPU only")
    return ok("torch", f"{found}, built for {built}")


def training_tools(_: Seen) -> Check:
    """Return whether what experiments need beside torch is there."""
    if version("torch") is None:
        return idle("experiments", "torch is not installed")
    lacking = [name for name in ("scipy", "nvtx") if version(name) is None]
    if "scipy" in lacking:
        costs = "gpudiag ab has no statistics" + ("; recordings have no NVTX ranges" if "nvtx" in lacking else "")
        return missing("experiments", f"{' and '.join(lacking)} not installed", costs, "pip install 'gpudiag[train]'", "train")
    if lacking:
        return limited("experiments", "nvtx is not installed", "steps have no ranges in Nsight Systems", "pip install 'gpudiag[train]'")
    return ok("experiments", f"scipy {version('scipy')}, nvtx {version('nvtx')}")


def profiler(seen: Seen) -> Check:
    """Return whether torch.profiler records ops."""
    if version("torch") is None:
        return idle("torch.profiler", "torch is not installed", "train")
    if seen.torch.get("versions", "version") is None:
        return idle("torch.profiler", "torch cannot be imported", "train")
    if seen.torch.get("versions", "kineto") is False:
        return missing("torch.profiler", "this torch was built without Kineto", "nothing can be recorded", _TORCH_FIX, "train", "gpu")
    events = seen.torch.get("profile", "events")
    fix = "run a training with torch.profiler alone, and see what it says"
    if seen.torch.get("profile", "error"):
        return missing(
            "torch.profiler", f"a test recording failed: {seen.torch.why('profile')}", "nothing can be recorded", fix, "train", "gpu"
        )
    if events is None:
        return unknown("torch.profiler", f"a test recording did not end: {seen.torch.why('profile')}", fix, "train", "gpu")
    return ok("torch.profiler", f"a test recording has {events} events")


def compiler(seen: Seen) -> Check:
    """Return whether Inductor finds what it compiles C++ with."""
    if version("torch") is None:
        return idle("C++ compiler", "torch is not installed")
    name = seen.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    costs = "torch.compile fails on CPU code, and where Triton builds its launcher: the fix `compile` cannot be tried"
    if name is None or shutil.which(name) is None:
        return missing(
            "C++ compiler", f"no {name or 'g++ or clang++'}", costs, "apt-get install g++ (or load your cluster's module)", "compile"
        )
    lacking = [header for header in ("Python.h", "omp.h") if not _includes(name, header)]
    if "Python.h" in lacking:
        fix = f"apt-get install python{'.'.join(platform.python_version_tuple()[:2])}-dev"
        return missing("C++ compiler", f"{name} finds no Python.h", costs, fix, "compile")
    if lacking:
        return limited(
            "C++ compiler",
            f"{name} has no OpenMP",
            "compiled CPU code runs on one thread, or fails",
            "apt-get install libomp-dev, or use g++",
        )
    return ok("C++ compiler", f"{shutil.which(name)}, with Python.h and OpenMP")


def _includes(compiler: str, header: str) -> bool:
    """Return whether `compiler` finds a header; nothing is compiled."""
    command = [compiler, "-fopenmp", "-x", "c++", "-E", "-I", sysconfig.get_path("include"), "-"]
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler, as torch would call it
            command, input=f"#include <{header}>\n".encode(), capture_output=True, timeout=_COMPILER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def triton(seen: Seen) -> Check:
    """Return whether torch.compile can generate code for a GPU."""
    if not (seen.nvidia or seen.amd):
        return idle("Triton", "no GPU")
    if seen.torch.get("versions", "triton"):
        return ok("Triton", version("triton") or version("pytorch-triton") or version("pytorch-triton-rocm") or "there")
    return missing(
        "Triton", "not installed", "torch.compile fails on the GPU", "pip install triton (it comes with torch's builds for GPUs)", "compile"
    )


def backends(seen: Seen) -> Check:
    """Return over what several processes can train together."""
    found = seen.torch.get("backends", "backends")
    if found is None:
        return (
            idle("torch.distributed", "torch is not installed")
            if version("torch") is None
            else unknown("torch.distributed", seen.torch.why("backends"))
        )
    if not found:
        return limited("torch.distributed", "not in this build", "trainings of several processes cannot be recorded", _TORCH_FIX)
    if seen.nvidia and seen.torch.get("gpu", "available") and "nccl" not in found:
        return limited(
            "torch.distributed",
            ", ".join(found),
            "GPUs exchange gradients through the host's memory",
            "use torch's build for Linux and CUDA",
        )
    return ok("torch.distributed", ", ".join(found))


def dashboard(_: Seen) -> Check:
    """Return whether the dashboard can be served."""
    return _extra("dashboard", ("dash", "waitress"), "no dashboard in a browser; reports as HTML work")


def cluster(_: Seen) -> Check:
    """Return whether many ranks can be read on several machines."""
    return _extra("cluster", ("distributed",), "ranks are read on this machine only (--scheduler does not work)")


def _extra(name: Literal["dashboard", "cluster"], packages: tuple[str, ...], costs: str) -> Check:
    lacking = [package for package in packages if version(package) is None]
    if lacking:
        return missing(name, f"{' and '.join(lacking)} not installed", costs, f"pip install 'gpudiag[{name}]'", name)
    return ok(name, ", ".join(f"{package} {version(package)}" for package in packages))

"""`gpudiag doctor`: what is installed, what is missing, what that costs, and the fix of each."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.api import machine
from gpudiag.api.machine import (
    Check,
    Need,
    ObservedMachine,
    Status,
    build_limited,
    build_missing,
    build_not_applicable,
    build_ok,
    build_unknown,
)
from gpudiag.api.result_cache import find_version
from gpudiag.hardware.peaks_cache import build_peaks_key, find_measurement_time, find_peaks_folder
from gpudiag.model.bundle import Machine
from gpudiag.units import format_bytes

_NO_GPU = "no driver of a GPU is loaded"


def check_gpu(seen: ObservedMachine) -> Check:
    """Check whether torch can compute on the GPU, and why not."""
    if not (seen.nvidia or seen.amd):
        return build_not_applicable("GPU", _NO_GPU, "gpu")
    if find_version("torch") is None:
        return build_not_applicable("GPU", "torch is not installed")
    if seen.torch.get("gpu", "available"):
        names = seen.torch.get("gpu", "devices") or []
        size = format_bytes(seen.torch.get("gpu", "memory_bytes"))
        return build_ok("GPU", f"{len(names)} x {names[0]}, {size}" if names else "there")
    costs = "trainings run on the CPU, and nothing of the GPU can be recorded"
    build = "cuda" if seen.nvidia else "hip"
    if "versions" in seen.torch.stages and not seen.torch.get("versions", build):
        vendor = "CUDA" if seen.nvidia else "ROCm"
        fix = f"install torch's build for {vendor}: https://pytorch.org/get-started"
        return build_missing("GPU", f"there, but torch is built without {vendor}", costs, fix, "gpu")
    why = str(seen.torch.get("gpu", "why") or seen.torch.why("gpu"))
    hidden = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if seen.environ.get(name) in ("", "-1")), None)
    if hidden:
        fix = f"unset {hidden}, which hides it"
    elif "driver" in why and "old" in why:
        fix = "update the driver, or install a torch built for an older CUDA"
    elif seen.nvidia:
        fix = "nvidia-smi must show it; in a container: docker run --gpus all"
    else:
        fix = "rocminfo must show it; join the group render"
    return build_missing("GPU", f"there, but torch does not reach it: {why}", costs, fix, "gpu")


def check_device_events(seen: ObservedMachine) -> Check:
    """Check whether the profiler sees kernels (CUPTI, roctracer)."""
    if not seen.torch.get("gpu", "available"):
        return build_not_applicable("kernels in recordings", "torch uses no GPU", "gpu")
    found = seen.torch.get("profile", "device_events")
    if found:
        return build_ok("kernels in recordings", f"a test recording has {found} events of the device")
    if found is None:
        fix = "record a training with torch.profiler alone, and look for kernels"
        return build_unknown("kernels in recordings", seen.torch.why("profile"), fix, "gpu")
    costs = "recordings hold no kernel: what the GPU did stays unknown"
    others, library, allow = ("DCGM profiling, Nsight", "CUPTI", "allow CUPTI: docker run --cap-add SYS_ADMIN")
    if not seen.nvidia:
        others, library, allow = ("rocprof", "roctracer", "hand the GPU over: docker run --device=/dev/kfd --device=/dev/dri")
    fix = f"end other profilers on this GPU ({others}); in a container {allow}; with KINETO_LOG_LEVEL=1 a recording says why"
    return build_missing("kernels in recordings", f"none in a test recording ({library} gave no event)", costs, fix, "gpu")


def check_telemetry(seen: ObservedMachine) -> Check:
    """Check whether NVML can be asked."""
    if not seen.nvidia:
        if seen.amd:
            return build_limited(
                "telemetry",
                "AMD's SMI is not read by this version",
                "no clocks, power or temperature beside the steps",
                "watch amd-smi beside it",
            )
        return build_not_applicable("telemetry", _NO_GPU)
    costs = "no clocks, power, temperature or throttling beside the steps; peaks are taken at the boost clock"
    if find_version("nvidia-ml-py") is None:
        return build_missing("telemetry", "nvidia-ml-py is not installed", costs, "pip install 'gpudiag[train]'", "telemetry")
    driver = seen.nvml.get("nvml", "driver")
    if driver is None:
        fix = "nvidia-smi must work; in a container: NVIDIA_DRIVER_CAPABILITIES=all"
        return build_missing("telemetry", f"NVML does not answer: {seen.nvml.why('nvml')}", costs, fix, "telemetry")
    silent = {name: why for device in seen.nvml.get("counters", "devices") or [] for name, why in device["silent"].items()}
    if silent:
        told = ", ".join(f"{name} ({why})" for name, why in silent.items())
        return build_limited(
            "telemetry",
            f"driver {driver}; not told: {told}",
            "those figures are missing in recordings",
            "none, where the board has no such counter",
        )
    return build_ok("telemetry", f"NVML of driver {driver}: clocks, power, energy, temperature, throttling")


def check_counters(seen: ObservedMachine) -> Check:
    """Return who may read hardware counters."""
    params = seen.text("/proc/driver/nvidia/params")
    if params is None:
        return build_not_applicable(
            "hardware counters", "no driver of NVIDIA" if not seen.nvidia else "the driver does not say who may read them"
        )
    if "RmProfilingAdminOnly: 1" not in params:
        return build_ok("hardware counters", "every user may read them")
    costs = "Nsight Compute works for root only; gpudiag and torch.profiler do not need them"
    fix = "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then load the driver anew"
    return build_limited("hardware counters", "for root only (RmProfilingAdminOnly)", costs, fix)


def check_gpu_mode(seen: ObservedMachine) -> Check:
    """Check whether the GPU is cut into parts, or sleeps between programs."""
    devices = seen.nvml.get("counters", "devices")
    if not devices:
        return build_not_applicable("GPU mode", "NVML says nothing" if seen.nvidia else "no driver of NVIDIA")
    if any(device["mig"] for device in devices):
        costs = "power, clocks and temperature are those of the whole board, which others share"
        return build_limited("GPU mode", "MIG is on", costs, "measure on a whole GPU where figures must be exact")
    if any(device["persistence"] is False for device in devices):
        costs = "the driver starts anew with each program: seconds at the start, and clocks that begin low"
        return build_limited("GPU mode", "persistence mode is off", costs, "sudo nvidia-smi -pm 1")
    return build_ok("GPU mode", "whole GPUs, persistence mode on")


_LOWER_BOUND = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*>=\s*([\d.]+)")
_COMPILER_S = 10.0

_TORCH_FIX = "pip install torch, the build for your device as https://pytorch.org/get-started says"


def check_python(_: ObservedMachine) -> Check:
    """Check which Python this is."""
    return build_ok("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def check_dependencies(_: ObservedMachine) -> Check:
    """Check whether gpudiag's own dependencies are there, new enough."""
    asked = [text for text in metadata.requires("gpudiag") or [] if "extra ==" not in text] if find_version("gpudiag") else []
    bad = []
    for text in asked:
        match = _LOWER_BOUND.match(text)
        if match is None or not _is_for_this_system(text):
            continue
        installed = find_version(match[1])
        if installed is None:
            bad.append(f"{match[1]} is not installed")
        elif _parse_release(installed) < _parse_release(match[2]):
            bad.append(f"{match[1]} {installed} is older than {match[2]}")
    if not asked:
        return build_unknown(
            "gpudiag's libraries", "gpudiag runs from its source, uninstalled: what it needs is not listed", "pip install -e ."
        )
    if bad:
        return build_missing(
            "gpudiag's libraries", "; ".join(bad), "commands fail, or read files wrongly", "pip install --upgrade gpudiag", "core"
        )
    return build_ok("gpudiag's libraries", f"all {len(asked)} are there, new enough")


def _is_for_this_system(requirement: str) -> bool:
    marker = requirement.partition(";")[2]
    if "platform_machine" in marker:
        return platform.machine() in marker
    return "python_version" not in marker or platform.python_version_tuple()[:2] < ("3", "11")


def _parse_release(text: str) -> tuple[int, ...]:
    """Parse the numbers before anything else ('2.13.0+cpu': 2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_torch(seen: ObservedMachine) -> Check:
    """Check whether torch can be imported."""
    installed = find_version("torch")
    if installed is None:
        costs = "nothing can be recorded or tried: run, ab, calibrate, demo (recordings of others are analysed all the same)"
        return build_missing("torch", "not installed", costs, _TORCH_FIX, "train", "gpu", "compile")
    found = seen.torch.get("versions", "version")
    if found is None:
        return build_missing(
            "torch", f"{installed}: {seen.torch.why('versions')}", "nothing can be recorded or tried", _TORCH_FIX, "train", "core"
        )
    built = f"CUDA {seen.torch.get('versions', 'cuda')}" if seen.torch.get("versions", "cuda") else ""
    built = built or (f"ROCm {seen.torch.get('versions', 'hip')}" if seen.torch.get("versions", "hip") else "CPU only")
    return build_ok("torch", f"{found}, built for {built}")


def check_training_tools(_: ObservedMachine) -> Check:
    """Check whether what experiments need beside torch is there."""
    if find_version("torch") is None:
        return build_not_applicable("experiments", "torch is not installed")
    lacking = [name for name in ("scipy", "nvtx") if find_version(name) is None]
    if "scipy" in lacking:
        costs = "gpudiag ab has no statistics" + ("; recordings have no NVTX ranges" if "nvtx" in lacking else "")
        return build_missing("experiments", f"{' and '.join(lacking)} not installed", costs, "pip install 'gpudiag[train]'", "train")
    if lacking:
        return build_limited(
            "experiments", "nvtx is not installed", "steps have no ranges in Nsight Systems", "pip install 'gpudiag[train]'"
        )
    return build_ok("experiments", f"scipy {find_version('scipy')}, nvtx {find_version('nvtx')}")


def check_profiler(seen: ObservedMachine) -> Check:
    """Check whether torch.profiler records ops."""
    if find_version("torch") is None:
        return build_not_applicable("torch.profiler", "torch is not installed", "train")
    if seen.torch.get("versions", "version") is None:
        return build_not_applicable("torch.profiler", "torch cannot be imported", "train")
    if seen.torch.get("versions", "kineto") is False:
        return build_missing("torch.profiler", "this torch was built without Kineto", "nothing can be recorded", _TORCH_FIX, "train", "gpu")
    events = seen.torch.get("profile", "events")
    fix = "run a training with torch.profiler alone, and see what it says"
    if seen.torch.get("profile", "error"):
        return build_missing(
            "torch.profiler", f"a test recording failed: {seen.torch.why('profile')}", "nothing can be recorded", fix, "train", "gpu"
        )
    if events is None:
        return build_unknown("torch.profiler", f"a test recording did not end: {seen.torch.why('profile')}", fix, "train", "gpu")
    return build_ok("torch.profiler", f"a test recording has {events} events")


def check_compiler(seen: ObservedMachine) -> Check:
    """Check whether Inductor finds what it compiles C++ with."""
    if find_version("torch") is None:
        return build_not_applicable("C++ compiler", "torch is not installed")
    name = seen.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    costs = "torch.compile fails on CPU code, and where Triton builds its launcher: the fix `compile` cannot be tried"
    if name is None or shutil.which(name) is None:
        return build_missing(
            "C++ compiler", f"no {name or 'g++ or clang++'}", costs, "apt-get install g++ (or load your cluster's module)", "compile"
        )
    lacking = [header for header in ("Python.h", "omp.h") if not _finds_header(name, header)]
    if "Python.h" in lacking:
        fix = f"apt-get install python{'.'.join(platform.python_version_tuple()[:2])}-dev"
        return build_missing("C++ compiler", f"{name} finds no Python.h", costs, fix, "compile")
    if lacking:
        return build_limited(
            "C++ compiler",
            f"{name} has no OpenMP",
            "compiled CPU code runs on one thread, or fails",
            "apt-get install libomp-dev, or use g++",
        )
    return build_ok("C++ compiler", f"{shutil.which(name)}, with Python.h and OpenMP")


def _finds_header(compiler: str, header: str) -> bool:
    command = [compiler, "-fopenmp", "-x", "c++", "-E", "-I", sysconfig.get_path("include"), "-"]
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler, as torch would call it
            command, input=f"#include <{header}>\n".encode(), capture_output=True, timeout=_COMPILER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def check_triton(seen: ObservedMachine) -> Check:
    """Check whether torch.compile can generate code for a GPU."""
    if not (seen.nvidia or seen.amd):
        return build_not_applicable("Triton", "no GPU")
    if seen.torch.get("versions", "triton"):
        return build_ok(
            "Triton", find_version("triton") or find_version("pytorch-triton") or find_version("pytorch-triton-rocm") or "there"
        )
    return build_missing(
        "Triton", "not installed", "torch.compile fails on the GPU", "pip install triton (it comes with torch's builds for GPUs)", "compile"
    )


def check_backends(seen: ObservedMachine) -> Check:
    """Return over what several processes can train together."""
    found = seen.torch.get("backends", "backends")
    if found is None:
        return (
            build_not_applicable("torch.distributed", "torch is not installed")
            if find_version("torch") is None
            else build_unknown("torch.distributed", seen.torch.why("backends"))
        )
    if not found:
        return build_limited("torch.distributed", "not in this build", "trainings of several processes cannot be recorded", _TORCH_FIX)
    if seen.nvidia and seen.torch.get("gpu", "available") and "nccl" not in found:
        return build_limited(
            "torch.distributed",
            ", ".join(found),
            "GPUs exchange gradients through the host's memory",
            "use torch's build for Linux and CUDA",
        )
    return build_ok("torch.distributed", ", ".join(found))


def check_dashboard(_: ObservedMachine) -> Check:
    """Check whether the dashboard can be served."""
    return _check_extra("dashboard", ("dash", "waitress"), "no dashboard in a browser; reports as HTML work")


def check_cluster(_: ObservedMachine) -> Check:
    """Check whether many ranks can be read on several machines."""
    return _check_extra("cluster", ("distributed",), "ranks are read on this machine only (--scheduler does not work)")


def _check_extra(name: Literal["dashboard", "cluster"], packages: tuple[str, ...], costs: str) -> Check:
    lacking = [package for package in packages if find_version(package) is None]
    if lacking:
        return build_missing(name, f"{' and '.join(lacking)} not installed", costs, f"pip install 'gpudiag[{name}]'", name)
    return build_ok(name, ", ".join(f"{package} {find_version(package)}" for package in packages))


MIN_FREE_BYTES = 2 << 30
"""Recordings of a large model with stacks take some hundred MB each before they are compressed."""

NO_ROOM_BYTES = 128 << 20
"""Where less is free, no trace is written beside the training (capture.recording.RESERVE_BYTES)."""

OLD_DAYS = 180
_DAY_S = 86_400


def check_recordings(seen: ObservedMachine) -> Check:
    """Check whether recordings have room, in runs/ of this folder."""
    folder = next(path for path in (Path("runs"), Path()) if path.is_dir())
    found = seen.disk(folder)
    if not os.access(folder, os.W_OK):
        return build_missing(
            "place for recordings",
            f"{folder.resolve()} may not be written",
            "nothing can be recorded here",
            "cd to another folder, or give -o",
            "train",
        )
    if found is None:
        return build_unknown("place for recordings", f"{folder.resolve()}: the system does not tell how much is free")
    free = f"{format_bytes(found[1])} free in {folder.resolve()}"
    if found[1] < NO_ROOM_BYTES:
        return build_missing("place for recordings", free, "no trace is written", "make room, or give -o with another place", "train")
    if found[1] < MIN_FREE_BYTES:
        return build_limited(
            "place for recordings", free, "recordings with stacks may end early", "make room, or give -o with another place"
        )
    return build_ok("place for recordings", free)


def check_peaks_cache(_: ObservedMachine) -> Check:
    """Check whether measured peaks can be kept."""
    folder = find_peaks_folder()
    costs = "peaks are measured again with every recording, which takes seconds"
    if folder is None:
        return build_limited("cache", "there is no home folder", costs, "export XDG_CACHE_HOME to a folder that may be written")
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None or not os.access(there, os.W_OK):
        return build_limited("cache", f"{folder} may not be written", costs, "export XDG_CACHE_HOME to a folder that may be written")
    return build_ok("cache", str(folder))


def check_calibration(seen: ObservedMachine) -> Check:
    """Check whether the peaks of this device were measured, and when."""
    if find_version("torch") is None:
        return build_not_applicable("measured peaks", "torch is not installed")
    recorded = seen.torch.get("machine", "machine")
    if recorded is None:
        return build_unknown("measured peaks", f"of which device they would be is not known: {seen.torch.why('machine')}")
    device = seen.torch.get("device", "device")
    gpu = None if device is None else device.get("key") or device.get("name")
    at = find_measurement_time(build_peaks_key(msgspec.convert(recorded, Machine), threads=seen.torch.get("versions", "threads"), gpu=gpu))
    if at is None:
        costs = "a CPU is measured after the first recording; rooflines of a GPU take the datasheet's peaks"
        return build_limited("measured peaks", "none of this device and torch", costs, "gpudiag calibrate (about a minute)")
    days = max(0, int((time.time() - at) // _DAY_S))
    ago = "today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
    told = f"of this device, measured {ago}"
    if days > OLD_DAYS:
        return build_limited("measured peaks", told, "driver and libraries may have changed since", "gpudiag calibrate")
    return build_ok("measured peaks", told)


CHECKS: tuple[Callable[[ObservedMachine], Check], ...] = (
    check_dependencies,
    check_torch,
    check_gpu,
    check_profiler,
    check_device_events,
    check_recordings,
    check_training_tools,
    machine.check_processors,
    machine.check_shared_memory,
    check_telemetry,
    check_compiler,
    check_triton,
    check_calibration,
    machine.check_open_files,
    machine.check_frequency,
    check_gpu_mode,
    machine.check_clock,
    check_backends,
    check_peaks_cache,
    check_dashboard,
    check_cluster,
    check_counters,
    machine.check_memory,
    machine.check_numa,
    machine.check_tracing,
    check_python,
)
"""Those whose failure costs most come first."""

ORDER: tuple[Status, ...] = ("missing", "limited", "unknown", "not applicable", "ok")


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What `gpudiag doctor` found."""

    verdict: str
    """In one sentence."""
    failed: tuple[str, ...]
    """Names of the checks that fail what was asked for, or what is installed; none: exit code 0."""
    checks: tuple[Check, ...]
    """By status in the order of ORDER, then by what they cost."""


def examine(needs: Collection[Need] = (), seen: ObservedMachine | None = None) -> Examination:
    """Return what all checks find. `needs`: what must work beside what is installed. Never raises for what a machine lacks."""
    seen = seen or ObservedMachine()
    checks = []
    for function in CHECKS:
        try:
            checks.append(function(seen))
        except Exception as error:  # noqa: BLE001 - a machine of an odd kind is what this command is for
            why = f"the check failed: {type(error).__name__}: {error}"
            checks.append(build_unknown(function.__name__.removeprefix("check_").replace("_", " "), why))
    checks.sort(key=lambda check: ORDER.index(check.status))
    # what is installed must not be broken: with torch a recording works, and that of the GPU where there is one
    implied: set[Need] = {"core"}
    if find_version("torch") is not None:
        implied |= {"train", "gpu"} if seen.nvidia or seen.amd else {"train"}
    failed = []
    for check in checks:
        asked = not set(needs).isdisjoint(check.needs)
        broken = check.status == "missing" and not implied.isdisjoint(check.needs)
        if broken or (asked and check.status in ("missing", "unknown", "not applicable")):
            failed.append(check.name)
    if failed:
        start = f"not working: {', '.join(failed[:-1])} and {failed[-1]}" if len(failed) > 1 else f"not working: {failed[0]}"
    elif find_version("torch") is None:
        start = "recordings can be analysed; without torch nothing can be recorded"
    else:
        start = f"trainings on {'the GPU' if seen.torch.get('gpu', 'available') else 'this CPU'} can be recorded and analysed"
    count = {status: sum(check.status == status for check in checks) for status in ORDER}
    rest = [f"{count[status]} {status}" for status in ("missing", "limited", "unknown") if count[status]]
    return Examination(
        verdict=f"{start}; {', '.join(rest)} of {len(checks)} checks" if rest else f"{start}; nothing is missing",
        failed=tuple(failed),
        checks=tuple(checks),
    )

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
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from gpudiag.cache import find_version
from gpudiag.cores import count_usable_cores
from gpudiag.doctor.machine import Check, Need, ObservedMachine, Status
from gpudiag.hardware.peaks_cache import build_peaks_key, find_measurement_time
from gpudiag.model.bundle import Machine
from gpudiag.units import format_bytes

Result = partial(Check, "")  # `examine` names it
_NO_GPU = "no driver of a GPU is loaded"


def _check_gpu(seen: ObservedMachine) -> Check:
    if not (seen.nvidia or seen.amd):
        return Result("not applicable", _NO_GPU, needs=("gpu",))
    if find_version("torch") is None:
        return Result("not applicable", "torch is not installed")
    if seen.torch.get("gpu", "available"):
        names = seen.torch.get("gpu", "devices") or []
        size = format_bytes(seen.torch.get("gpu", "memory_bytes"))
        return Result("ok", f"{len(names)} x {names[0]}, {size}" if names else "there")
    costs = "trainings run on the CPU, and nothing of the GPU can be recorded"
    build = "cuda" if seen.nvidia else "hip"
    if "versions" in seen.torch.stages and not seen.torch.get("versions", build):
        vendor = "CUDA" if seen.nvidia else "ROCm"
        fix = f"install torch's build for {vendor}: https://pytorch.org/get-started"
        return Result("missing", f"there, but torch is built without {vendor}", costs, fix, ("gpu",))
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
    return Result("missing", f"there, but torch does not reach it: {why}", costs, fix, ("gpu",))


def _check_device_events(seen: ObservedMachine) -> Check:
    if not seen.torch.get("gpu", "available"):
        return Result("not applicable", "torch uses no GPU", needs=("gpu",))
    found = seen.torch.get("profile", "device_events")
    if found:
        return Result("ok", f"a test recording has {found} events of the device")
    if found is None:
        fix = "record a training with torch.profiler alone, and look for kernels"
        return Result("unknown", seen.torch.why("profile"), fix=fix, needs=("gpu",))
    costs = "recordings hold no kernel: what the GPU did stays unknown"
    others, library, allow = ("DCGM profiling, Nsight", "CUPTI", "allow CUPTI: docker run --cap-add SYS_ADMIN")
    if not seen.nvidia:
        others, library, allow = ("rocprof", "roctracer", "hand the GPU over: docker run --device=/dev/kfd --device=/dev/dri")
    fix = f"end other profilers on this GPU ({others}); in a container {allow}; with KINETO_LOG_LEVEL=1 a recording says why"
    return Result("missing", f"none in a test recording ({library} gave no event)", costs, fix, ("gpu",))


def _check_telemetry(seen: ObservedMachine) -> Check:
    if not seen.nvidia:
        if not seen.amd:
            return Result("not applicable", _NO_GPU)
        costs = "no clocks, power or temperature beside the steps"
        return Result("limited", "AMD's SMI is not read by this version", costs, "watch amd-smi beside it")
    costs = "no clocks, power, temperature or throttling beside the steps; peaks are taken at the boost clock"
    if find_version("nvidia-ml-py") is None:
        return Result("missing", "nvidia-ml-py is not installed", costs, "pip install 'gpudiag[train]'", ("telemetry",))
    driver = seen.nvml.get("nvml", "driver")
    if driver is None:
        fix = "nvidia-smi must work; in a container: NVIDIA_DRIVER_CAPABILITIES=all"
        return Result("missing", f"NVML does not answer: {seen.nvml.why('nvml')}", costs, fix, ("telemetry",))
    return Result("ok", f"NVML of driver {driver}")


def _check_gpu_mode(seen: ObservedMachine) -> Check:
    devices = seen.nvml.get("modes", "devices")
    if not devices:
        return Result("not applicable", "NVML says nothing" if seen.nvidia else "no driver of NVIDIA")
    if any(device["mig"] for device in devices):
        costs = "power, clocks and temperature are those of the whole board, which others share"
        return Result("limited", "MIG is on", costs, "measure on a whole GPU where figures must be exact")
    if any(device["persistence"] is False for device in devices):
        costs = "the driver starts anew with each program: seconds at the start, and clocks that begin low"
        return Result("limited", "persistence mode is off", costs, "sudo nvidia-smi -pm 1")
    return Result("ok", "whole GPUs, persistence mode on")


_NO_TORCH = Result("not applicable", "torch is not installed")
_TORCH_FIX = "pip install torch, the build for your device as https://pytorch.org/get-started says"


def _check_dependencies(_: ObservedMachine) -> Check:
    """Check whether gpudiag's own dependencies are there, new enough; those of some platforms alone are not looked at."""
    asked = [text for text in metadata.requires("gpudiag") or [] if ";" not in text] if find_version("gpudiag") else []
    if not asked:
        return Result("unknown", "gpudiag runs from its source, uninstalled: what it needs is not listed", fix="pip install -e .")
    bad = []
    for name, least in (text.split(">=") for text in asked):
        installed = find_version(name)
        if installed is None:
            bad.append(f"{name} is not installed")
        elif _parse_release(installed) < _parse_release(least):
            bad.append(f"{name} {installed} is older than {least}")
    if bad:
        return Result("missing", "; ".join(bad), "commands fail, or read files wrongly", "pip install --upgrade gpudiag", ("core",))
    return Result("ok", f"all {len(asked)} are there, new enough")


def _parse_release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _check_torch(seen: ObservedMachine) -> Check:
    installed = find_version("torch")
    if installed is None:
        costs = "nothing can be recorded or tried: run, ab, calibrate, demo (recordings of others are analysed all the same)"
        return Result("missing", "not installed", costs, _TORCH_FIX, ("train", "gpu", "compile"))
    found = seen.torch.get("versions", "version")
    if found is None:
        why = f"{installed}: {seen.torch.why('versions')}"
        return Result("missing", why, "nothing can be recorded or tried", _TORCH_FIX, ("train", "core"))
    cuda, hip = seen.torch.get("versions", "cuda"), seen.torch.get("versions", "hip")
    return Result("ok", f"{found}, built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU only'}")


def _check_profiler(seen: ObservedMachine) -> Check:
    if find_version("torch") is None:
        return msgspec.structs.replace(_NO_TORCH, needs=("train",))
    if seen.torch.get("versions", "version") is None:
        return Result("not applicable", "torch cannot be imported", needs=("train",))
    needs: tuple[Need, ...] = ("train", "gpu")
    costs = "nothing can be recorded"
    if seen.torch.get("versions", "kineto") is False:
        return Result("missing", "this torch was built without Kineto", costs, _TORCH_FIX, needs)
    events, why = seen.torch.get("profile", "events"), seen.torch.why("profile")
    fix = "run a training with torch.profiler alone, and see what it says"
    if seen.torch.get("profile", "error"):
        return Result("missing", f"a test recording failed: {why}", costs, fix, needs)
    if events is None:
        return Result("unknown", f"a test recording did not end: {why}", fix=fix, needs=needs)
    return Result("ok", f"a test recording has {events} events")


def _check_compiler(seen: ObservedMachine) -> Check:
    if find_version("torch") is None:
        return _NO_TORCH
    name = seen.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    costs = "torch.compile fails on CPU code, and where Triton builds its launcher: the fix `compile` cannot be tried"
    if name is None or shutil.which(name) is None:
        fix = "apt-get install g++ (or load your cluster's module)"
        return Result("missing", f"no {name or 'g++ or clang++'}", costs, fix, ("compile",))
    lacking = [header for header in ("Python.h", "omp.h") if not _finds_header(name, header)]
    if "Python.h" in lacking:
        fix = f"apt-get install python{'.'.join(platform.python_version_tuple()[:2])}-dev"
        return Result("missing", f"{name} finds no Python.h", costs, fix, ("compile",))
    if lacking:
        costs = "compiled CPU code runs on one thread, or fails"
        return Result("limited", f"{name} has no OpenMP", costs, "apt-get install libomp-dev, or use g++")
    return Result("ok", f"{shutil.which(name)}, with Python.h and OpenMP")


def _finds_header(compiler: str, header: str) -> bool:
    command = [compiler, "-fopenmp", "-x", "c++", "-E", "-I", sysconfig.get_path("include"), "-"]
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler, as torch would call it
            command, input=f"#include <{header}>\n".encode(), capture_output=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _check_triton(seen: ObservedMachine) -> Check:
    if not (seen.nvidia or seen.amd):
        return Result("not applicable", "no GPU")
    if seen.torch.get("versions", "triton"):
        versions = map(find_version, ("triton", "pytorch-triton", "pytorch-triton-rocm"))
        return Result("ok", next(filter(None, versions), "there"))
    fix = "pip install triton (it comes with torch's builds for GPUs)"
    return Result("missing", "not installed", "torch.compile fails on the GPU", fix, ("compile",))


def _check_extra(need: Need, packages: tuple[str, ...], costs: str, _: ObservedMachine) -> Check:
    lacking = [package for package in packages if find_version(package) is None]
    if lacking:
        return Result("missing", f"{' and '.join(lacking)} not installed", costs, f"pip install 'gpudiag[{need}]'", (need,))
    return Result("ok", ", ".join(f"{package} {find_version(package)}" for package in packages))


def _check_setting(path: str, fast: Callable[[str], bool], costs: str, fix: str, seen: ObservedMachine) -> Check:
    setting = seen.text(path)
    if not setting:
        return Result("not applicable", "the system does not tell, as in a virtual machine")
    return Result("ok", setting) if fast(setting) else Result("limited", setting, costs, fix)


SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to


def _check_processors(seen: ObservedMachine) -> Check:
    cores = count_usable_cores()
    threads = seen.torch.get("versions", "threads")
    version_1 = " ".join(seen.text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    words = (seen.text("/sys/fs/cgroup/cpu.max") or version_1).split()  # how many cores the container grants
    known = len(words) == 2 and all(word.isdecimal() and int(word) for word in words)
    quota = int(words[0]) / int(words[1]) if known else None
    granted = cores if quota is None else min(quota, float(cores))
    told = f"{cores} cores"
    told += "" if quota is None else f", of which the container grants {quota:g}"
    told += f"; torch uses {threads} threads" if threads else ""
    if not threads or threads <= granted + 0.5:
        return Result("ok", told)
    halts = "threads wait for each other" if quota is None else "the container is halted for parts of each 100 ms"
    costs = f"more threads than cores: {halts}, and every host time scatters"
    return Result("limited", told, costs, f"export OMP_NUM_THREADS={max(1, int(granted))}, or grant more cores")


def _check_shared_memory(seen: ObservedMachine) -> Check:
    found = seen.disk(seen.path(SHARED_MEMORY))
    if found is None:
        return Result("not applicable", "this system has none")
    told = f"{format_bytes(found[0])}, {format_bytes(found[1])} free"
    if found[0] >= 1 << 30:  # batches of a few workers take some hundred MB; Docker's default is 64 MB
        return Result("ok", told)
    costs = "DataLoader workers hand batches over in it: 'Bus error' where it is full"
    return Result("limited", told, costs, "docker run --shm-size=8g (or --ipc=host)")


def _check_open_files(_: ObservedMachine) -> Check:
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


def _check_recordings(seen: ObservedMachine) -> Check:
    folder = next(path for path in (Path("runs"), Path()) if path.is_dir())
    found = seen.disk(folder)
    if not os.access(folder, os.W_OK):
        why = f"{folder.resolve()} may not be written"
        return Result("missing", why, "nothing can be recorded here", "cd to another folder, or give -o", ("train",))
    if found is None:
        return Result("unknown", f"{folder.resolve()}: the system does not tell how much is free")
    free, fix = f"{format_bytes(found[1])} free in {folder.resolve()}", "make room, or give -o with another place"
    if found[1] < 128 << 20:  # where less is free, no trace is written beside the training (bundle.writer.RESERVE_BYTES)
        return Result("missing", free, "no trace is written", fix, ("train",))
    if found[1] < 2 << 30:  # recordings of a large model with stacks take some hundred MB each before they are compressed
        return Result("limited", free, "recordings with stacks may end early", fix)
    return Result("ok", free)


def _check_calibration(seen: ObservedMachine) -> Check:
    if find_version("torch") is None:
        return _NO_TORCH
    recorded = seen.torch.get("machine", "machine")
    if recorded is None:
        return Result("unknown", f"of which device they would be is not known: {seen.torch.why('machine')}")
    device = seen.torch.get("device", "device")
    gpu = None if device is None else device.get("key") or device.get("name")
    at = find_measurement_time(build_peaks_key(msgspec.convert(recorded, Machine), threads=seen.torch.get("versions", "threads"), gpu=gpu))
    if at is None:
        costs = "a CPU is measured after the first recording; rooflines of a GPU take the datasheet's peaks"
        return Result("limited", "none of this device and torch", costs, "gpudiag calibrate (about a minute)")
    days = max(0, int((time.time() - at) // 86_400))
    told = f"of this device, measured {f'{days} days ago' if days else 'today'}"
    if days > 180:
        return Result("limited", told, "driver and libraries may have changed since", "gpudiag calibrate")
    return Result("ok", told)


CHECKS: dict[str, Callable[[ObservedMachine], Check]] = {
    "gpudiag's libraries": _check_dependencies,
    "torch": _check_torch,
    "GPU": _check_gpu,
    "torch.profiler": _check_profiler,
    "kernels in recordings": _check_device_events,
    "place for recordings": _check_recordings,
    "experiments": partial(_check_extra, "train", ("scipy",), "gpudiag ab has no statistics"),
    "processors": _check_processors,
    SHARED_MEMORY: _check_shared_memory,
    "telemetry": _check_telemetry,
    "C++ compiler": _check_compiler,
    "Triton": _check_triton,
    "measured peaks": _check_calibration,
    "open files": _check_open_files,
    "CPU frequency": partial(
        _check_setting, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance".__eq__,
        "cores slow down between steps: launches take longer, and host times scatter", "sudo cpupower frequency-set -g performance",
    ),
    "GPU mode": _check_gpu_mode,
    "clock": partial(
        _check_setting, "/sys/devices/system/clocksource/clocksource0/current_clocksource",
        lambda name: name not in ("hpet", "acpi_pm", "refined-jiffies", "jiffies"),
        "reading the time takes about a microsecond: recordings slow the host down more",
        "boot with clocksource=tsc, or ask whoever runs the machine",
    ),
    "dashboard": partial(_check_extra, "dashboard", ("dash", "waitress"), "no dashboard in a browser; reports as HTML work"),
    "mcp": partial(_check_extra, "mcp", ("mcp",), "no tools for coding agents; gpudiag report --brief works"),
    "cluster": partial(_check_extra, "cluster", ("distributed",), "ranks are read on this machine only (--scheduler does not work)"),
    "Python": lambda _: Result("ok", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
}  # fmt: skip
"""Those whose failure costs most come first."""

ORDER: tuple[Status, ...] = ("missing", "limited", "unknown", "not applicable", "ok")


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What `gpudiag doctor` found."""

    verdict: str
    failed: tuple[str, ...]
    """Names of the checks that fail what was asked for, or what is installed; none: exit code 0."""
    checks: tuple[Check, ...]


def examine(needs: Collection[Need] = (), seen: ObservedMachine | None = None) -> Examination:
    """Return what all checks find. `needs`: what must work beside what is installed. Never raises for what a machine lacks."""
    seen = seen or ObservedMachine()
    checks = []
    for name, function in CHECKS.items():
        try:
            result = function(seen)
        except Exception as error:  # noqa: BLE001 - a machine of an odd kind is what this command is for
            result = Result("unknown", f"the check failed: {type(error).__name__}: {error}")
        checks.append(msgspec.structs.replace(result, name=name))
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

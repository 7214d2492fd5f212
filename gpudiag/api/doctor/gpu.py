"""Checks of the GPU: does torch reach it, do CUPTI and NVML answer, what may be read."""

from __future__ import annotations

from gpudiag.api.doctor.check import Check, idle, limited, missing, ok, unknown
from gpudiag.api.doctor.seen import Seen
from gpudiag.api.installed import version
from gpudiag.units import format_bytes

_NO_GPU = "no driver of a GPU is loaded"


def gpu(seen: Seen) -> Check:
    """Return whether torch can compute on the GPU, and why not."""
    if not (seen.nvidia or seen.amd):
        return idle("GPU", _NO_GPU, "gpu")
    if version("torch") is None:
        return idle("GPU", "torch is not installed")
    if seen.torch.get("gpu", "available"):
        names = seen.torch.get("gpu", "devices") or []
        size = format_bytes(seen.torch.get("gpu", "memory_bytes"))
        return ok("GPU", f"{len(names)} x {names[0]}, {size}" if names else "there")
    costs = "trainings run on the CPU, and nothing of the GPU can be recorded"
    build = "cuda" if seen.nvidia else "hip"
    if "versions" in seen.torch.stages and not seen.torch.get("versions", build):
        vendor = "CUDA" if seen.nvidia else "ROCm"
        fix = f"install torch's build for {vendor}: https://pytorch.org/get-started"
        return missing("GPU", f"there, but torch is built without {vendor}", costs, fix, "gpu")
    why = str(seen.torch.get("gpu", "why") or seen.torch.why("gpu"))
    return missing("GPU", f"there, but torch does not reach it: {why}", costs, _fix(seen, why), "gpu")


def _fix(seen: Seen, why: str) -> str:
    hidden = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if seen.environ.get(name) in ("", "-1")), None)
    if hidden:
        return f"unset {hidden}, which hides it"
    if "driver" in why and "old" in why:
        return "update the driver, or install a torch built for an older CUDA"
    return (
        "nvidia-smi must show it; in a container: docker run --gpus all" if seen.nvidia else "rocminfo must show it; join the group render"
    )


def device_events(seen: Seen) -> Check:
    """Return whether the profiler sees kernels (CUPTI, roctracer)."""
    if not seen.torch.get("gpu", "available"):
        return idle("kernels in recordings", "torch uses no GPU", "gpu")
    found = seen.torch.get("profile", "device_events")
    if found:
        return ok("kernels in recordings", f"a test recording has {found} events of the device")
    if found is None:
        fix = "record a training with torch.profiler alone, and look for kernels"
        return unknown("kernels in recordings", seen.torch.why("profile"), fix, "gpu")
    costs = "recordings hold no kernel: what the GPU did stays unknown"
    others, library, allow = ("DCGM profiling, Nsight", "CUPTI", "allow CUPTI: docker run --cap-add SYS_ADMIN")
    if not seen.nvidia:
        others, library, allow = ("rocprof", "roctracer", "hand the GPU over: docker run --device=/dev/kfd --device=/dev/dri")
    fix = f"end other profilers on this GPU ({others}); in a container {allow}; with KINETO_LOG_LEVEL=1 a recording says why"
    return missing("kernels in recordings", f"none in a test recording ({library} gave no event)", costs, fix, "gpu")


def telemetry(seen: Seen) -> Check:
    """Return whether NVML can be asked."""
    if not seen.nvidia:
        if seen.amd:
            return limited(
                "telemetry",
                "AMD's SMI is not read by this version",
                "no clocks, power or temperature beside the steps",
                "watch amd-smi beside it",
            )
        return idle("telemetry", _NO_GPU)
    costs = "no clocks, power, temperature or throttling beside the steps; peaks are taken at the boost clock"
    if version("nvidia-ml-py") is None:
        return missing("telemetry", "nvidia-ml-py is not installed", costs, "pip install 'gpudiag[train]'", "telemetry")
    driver = seen.nvml.get("nvml", "driver")
    if driver is None:
        fix = "nvidia-smi must work; in a container: NVIDIA_DRIVER_CAPABILITIES=all"
        return missing("telemetry", f"NVML does not answer: {seen.nvml.why('nvml')}", costs, fix, "telemetry")
    silent = {name: why for device in seen.nvml.get("counters", "devices") or [] for name, why in device["silent"].items()}
    if silent:
        told = ", ".join(f"{name} ({why})" for name, why in silent.items())
        return limited(
            "telemetry",
            f"driver {driver}; not told: {told}",
            "those figures are missing in recordings",
            "none, where the board has no such counter",
        )
    return ok("telemetry", f"NVML of driver {driver}: clocks, power, energy, temperature, throttling")


def counters(seen: Seen) -> Check:
    """Return who may read hardware counters."""
    params = seen.text("/proc/driver/nvidia/params")
    if params is None:
        return idle("hardware counters", "no driver of NVIDIA" if not seen.nvidia else "the driver does not say who may read them")
    if "RmProfilingAdminOnly: 1" not in params:
        return ok("hardware counters", "every user may read them")
    costs = "Nsight Compute works for root only; gpudiag and torch.profiler do not need them"
    fix = "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then load the driver anew"
    return limited("hardware counters", "for root only (RmProfilingAdminOnly)", costs, fix)


def mode(seen: Seen) -> Check:
    """Return whether the GPU is cut into parts, or sleeps between programs."""
    devices = seen.nvml.get("counters", "devices")
    if not devices:
        return idle("GPU mode", "NVML says nothing" if seen.nvidia else "no driver of NVIDIA")
    if any(device["mig"] for device in devices):
        costs = "power, clocks and temperature are those of the whole board, which others share"
        return limited("GPU mode", "MIG is on", costs, "measure on a whole GPU where figures must be exact")
    if any(device["persistence"] is False for device in devices):
        costs = "the driver starts anew with each program: seconds at the start, and clocks that begin low"
        return limited("GPU mode", "persistence mode is off", costs, "sudo nvidia-smi -pm 1")
    return ok("GPU mode", "whole GPUs, persistence mode on")

"""What torch and NVML say of themselves, in a child of `gpudiag doctor`: one JSON line for each stage.

A stage that hangs or crashes (a broken driver) takes only those after it along: what was said before stands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

Answer = dict[str, Any]
Stage = Callable[[], Answer]


def _read_versions() -> Answer:
    import torch

    return {
        "version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip, "threads": torch.get_num_threads(),
        "kineto": bool(torch.profiler.kineto_available()), "triton": find_spec("triton") is not None,
    }  # fmt: skip


def _read_machine() -> Answer:
    import msgspec

    from gpudiag.capture.environment import read_machine

    return {"machine": msgspec.to_builtins(read_machine())}


def _list_backends() -> Answer:
    from torch import distributed

    if not distributed.is_available():
        return {"backends": []}
    asked = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    return {"backends": [name for name, function in asked.items() if getattr(distributed, function, lambda: False)()]}


def _read_gpu() -> Answer:
    """Ask for the device: this starts the driver."""
    import torch

    available = torch.cuda.is_available()
    why = ""
    if not available and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001 - the reason is what is wanted
            why = str(error).strip().partition("\n")[0][:300]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if available else []
    return {"available": available, "why": why, "devices": names, "memory_bytes": torch.cuda.mem_get_info()[1] if names else None}


def _read_observed() -> Answer:
    """Say under which key measured peaks of this device are kept."""
    import msgspec
    import torch

    from gpudiag.capture.environment import read_observed_device

    if torch.cuda.is_available():
        torch.cuda.init()
    found = read_observed_device()
    return {"device": None if found is None else msgspec.to_builtins(found)}


def _record_product() -> Answer:
    """Record a product: are there events of ops, and of the device?"""
    import torch
    from torch.autograd.profiler import profile  # that of torch.profiler imports Inductor first, which takes seconds

    on_gpu = torch.cuda.is_available()
    values = torch.ones(64, 64, device="cuda" if on_gpu else "cpu")
    with profile(use_device="cuda" if on_gpu else None) as recording:
        torch.mm(values, values)
        if on_gpu:
            torch.cuda.synchronize()
    events = recording.kineto_results.events()
    on_device = sum(event.device_type() != torch.autograd.DeviceType.CPU for event in events)
    return {"events": len(events), "device_events": on_device}


def _read_nvml() -> Answer:
    import pynvml

    pynvml.nvmlInit()
    return {"driver": _decode(pynvml.nvmlSystemGetDriverVersion()), "count": pynvml.nvmlDeviceGetCount()}


def _decode(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _read_counters() -> Answer:
    """Ask each device for what telemetry samples; the reason where it does not tell."""
    import pynvml

    return {"devices": [_read_device(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]}


def _read_device(lib: Any, handle: Any) -> Answer:
    asked: dict[str, Callable[[], Any]] = {
        "clock": lambda: lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_SM),
        "power": lambda: lib.nvmlDeviceGetPowerUsage(handle),
        "energy": lambda: lib.nvmlDeviceGetTotalEnergyConsumption(handle),
        "throttle reasons": lambda: lib.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "utilisation": lambda: lib.nvmlDeviceGetUtilizationRates(handle).gpu,
        "temperature": lambda: lib.nvmlDeviceGetTemperature(handle, lib.NVML_TEMPERATURE_GPU),
    }
    name, silent = _decode(lib.nvmlDeviceGetName(handle)), {}
    for question, ask in asked.items():
        try:
            ask()
        except Exception as error:  # noqa: BLE001 - what NVML says is the answer
            silent[question] = str(error)[:100]
    mig, persistence = (lambda: lib.nvmlDeviceGetMigMode(handle)[0]), (lambda: lib.nvmlDeviceGetPersistenceMode(handle))
    return {"name": name, "silent": silent, "mig": _read_state(mig), "persistence": _read_state(persistence)}


def _read_state(call: Callable[[], Any]) -> bool | None:
    try:
        return bool(call())
    except Exception:  # noqa: BLE001 - a board without it
        return None


STAGES: dict[str, dict[str, Stage]] = {
    "torch": {
        "versions": _read_versions,
        "machine": _read_machine,
        "backends": _list_backends,
        "gpu": _read_gpu,
        "device": _read_observed,
        "profile": _record_product,
    },
    "nvml": {"nvml": _read_nvml, "counters": _read_counters},
}


def run_stages(probe: str) -> Iterator[Answer]:
    """Yield what each stage finds, with its name; what a stage raises is its answer."""
    for name, stage in STAGES[probe].items():
        try:
            yield {"stage": name, **stage()}
        except Exception as error:  # noqa: BLE001 - said, and the next stage is asked
            yield {"stage": name, "error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}


if __name__ == "__main__":
    for answer in run_stages(sys.argv[1]):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

"""What torch and NVML say of themselves, in a child of `gpudiag doctor`: one JSON line for each stage.

A stage that hangs or crashes (a broken driver) takes only those after it along: what was said before stands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any


@contextmanager
def answer_stage(name: str) -> Iterator[dict[str, Any]]:
    """Write what is put into the dictionary as the answer of stage `name`; what the block raises is the answer, and the next is asked."""
    answer: dict[str, Any] = {"stage": name}
    try:
        yield answer
    except Exception as error:  # noqa: BLE001 - said, and the next stage is asked
        answer = {"stage": name, "error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def probe_torch() -> None:
    """Ask torch for its build, this machine and its devices, and whether a product of matrices can be recorded.

    Each stage imports what it needs: one that cannot is the only one that says so.
    """
    with answer_stage("versions") as answer:
        import torch

        answer |= {
            "version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip, "threads": torch.get_num_threads(),
            "kineto": bool(torch.profiler.kineto_available()), "triton": find_spec("triton") is not None,
        }  # fmt: skip
    with answer_stage("machine") as answer:
        import msgspec

        from gpudiag.capture.environment import read_machine

        answer["machine"] = msgspec.to_builtins(read_machine())
    with answer_stage("gpu") as answer:  # what torch says of its devices, or why it has none: this starts the driver
        import torch

        available, why = torch.cuda.is_available(), ""
        if not available and (torch.version.cuda or torch.version.hip):
            try:
                torch.cuda.init()
            except Exception as error:  # noqa: BLE001 - the reason is what is wanted
                why = str(error).strip().partition("\n")[0][:300]
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if available else []
        memory_bytes = torch.cuda.mem_get_info()[1] if names else None
        answer |= {"available": available, "why": why, "devices": names, "memory_bytes": memory_bytes}
    with answer_stage("device") as answer:  # under which key measured peaks of this device are kept
        import msgspec
        import torch

        from gpudiag.capture.environment import read_observed_device

        if torch.cuda.is_available():
            torch.cuda.init()
        device = read_observed_device()
        answer["device"] = None if device is None else msgspec.to_builtins(device)
    with answer_stage("profile") as answer:  # are there events of ops, and of the device?
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
        answer |= {"events": len(events), "device_events": on_device}


def probe_nvml() -> None:
    """Ask NVML for its driver, and each device for its mode."""
    with answer_stage("nvml") as answer:
        import pynvml

        pynvml.nvmlInit()
        answer["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    with answer_stage("modes") as answer:
        import pynvml

        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        answer["devices"] = [_read_device(pynvml, handle) for handle in handles]


def _read_device(lib: Any, handle: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"mig": None, "persistence": None}
    with suppress(Exception):  # a board without it
        answer["mig"] = bool(lib.nvmlDeviceGetMigMode(handle)[0])
    with suppress(Exception):
        answer["persistence"] = bool(lib.nvmlDeviceGetPersistenceMode(handle))
    return answer


PROBES: dict[str, Callable[[], None]] = {"torch": probe_torch, "nvml": probe_nvml}

if __name__ == "__main__":
    PROBES[sys.argv[1]]()

"""Trains a small network, bare or recorded with everything on and one fault planted; prints what the training came to.

`python faulty_training.py FOLDER FAULT`: FAULT is `bare`, `none` or a key of FAULTS.
"""

from __future__ import annotations

import hashlib
import random
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS = 30


def disk_full() -> None:
    """No file may grow beyond 2 kB: manifests, segments and traces fail to be written, by Python and by torch's own code."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))


def _raising(method: str) -> Callable[[], None]:
    def plant() -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

        setattr(torch.profiler.profile, method, fail)

    return plant


def no_threads() -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = fail  # type: ignore[method-assign]


def _nvml(**options: Any) -> Callable[[], None]:
    def plant() -> None:
        from fakenvml import FakeNvml, identity

        from gpudiag.capture import standard_parts
        from gpudiag.capture.telemetry.sampler import Telemetry

        lib = FakeNvml("h100_sxm", **options)
        standard_parts.Telemetry = lambda hz: Telemetry(hz, load_nvml=lambda: lib, device=lambda: identity("h100_sxm"))  # type: ignore[misc,assignment]

    return plant


FAULTS: dict[str, Callable[[], None]] = {
    "disk_full": disk_full,
    "profiler_start": _raising("start"),
    "profiler_stop": _raising("stop"),
    "profiler_step": _raising("step"),
    "profiler_export": _raising("export_chrome_trace"),
    "no_threads": no_threads,
    "nvml_random": _nvml(raising=0.5),
    "nvml_hangs": _nvml(hang_s=0.5),
    "nvml_missing": _nvml(init=999),
    "unwritable": lambda: None,
}


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    FAULTS.get(fault, lambda: None)()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 16), torch.randn(8 * STEPS, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    context: Any = nullcontext()
    if fault != "bare":
        import gpudiag

        (folder / "file").write_text("in the way")
        path = folder / ("file/run" if fault == "unwritable" else "run")
        context = gpudiag.profile(path, skip=2, record=4, memory=True, nvtx=True, telemetry_hz=50)
    with context as prof:
        for x, y in loader if prof is None else prof.steps(loader):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sys.stdout.write(f"{loss.item().hex()}\n")
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    states = (random.random(), float(np.random.rand()), torch.rand(1).item())
    sys.stdout.write(f"{digest.hexdigest()} {states}\n")


if __name__ == "__main__":
    main()

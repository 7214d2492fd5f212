"""Recording on a real GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.demo import train_demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]


def test_a_gpu_run_has_kernels_in_every_step_and_names_the_device(tmp_path: Path) -> None:
    run = train_demo(tmp_path / "run", seconds=2, device="cuda")
    bundle = open_bundle(run.path)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert bundle.manifest.device_kind == "gpu"
    assert bundle.manifest.device is not None
    assert bundle.manifest.device.name == properties.name
    assert bundle.manifest.device.sm_count == properties.multi_processor_count
    assert format_notices(bundle.notices) == ()
    events = json.loads(gzip.decompress(bundle.windows()[0].read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation"]
    assert len(steps) == 6
    first, last = min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)
    inside = [kernel for kernel in kernels if first <= kernel["ts"] < last]
    assert len(inside) >= 6 * 50


def test_losses_on_the_gpu_are_those_of_the_same_run(tmp_path: Path) -> None:
    first, second = (train_demo(tmp_path / name, seconds=0, device="cuda") for name in ("a", "b"))
    assert first.first_loss == pytest.approx(second.first_loss, rel=1e-5)
    assert second.last_loss < second.first_loss


def test_further_windows_on_the_gpu_hold_kernels_too(tmp_path: Path) -> None:
    from gpudiag.capture.session import Session

    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    with Session(tmp_path / "run", skip=2, warm=1, record=2, sites=1, at_steps=(40,)) as prof:
        for batch in prof.steps(torch.randn(8, 64) for _ in range(60)):
            (batch.to("cuda") @ weight).sum().backward()
            torch.cuda.synchronize()
    bundle = open_bundle(prof.path)
    assert [(window.index, window.trigger) for window in bundle.recorded().values()] == [(0, "schedule"), (1, "schedule"), (2, "step 40")]
    for path in bundle.windows():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events)

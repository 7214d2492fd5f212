"""What a bundle says of a run on a real GPU: its driver, its device, and the optimizer as torch runs it there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import Ranges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]


def test_driver_device_and_foreach(tmp_path: Path) -> None:
    model = nn.Conv2d(4, 8, 3, device="cuda").to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    with Session(tmp_path / "run", parts=[Inventory(), Ranges()], skip=1, warm=1, record=2, sites=0) as prof:
        for _ in prof.steps(range(8)):
            model(torch.ones(2, 4, 8, 8, device="cuda")).sum().backward()
            optimizer.step()
    manifest = open_bundle(prof.path).manifest
    (found,) = manifest.settings.optimizers
    assert (found.implementation, found.channels_last) == ("foreach", True)
    if torch.version.hip is None:
        assert re.fullmatch(r"\d+(\.\d+)+", manifest.machine.driver or "")
    assert manifest.machine.gpu_uuid == str(torch.cuda.get_device_properties(0).uuid)


def test_asking_synchronises_nothing(tmp_path: Path) -> None:
    """torch raises at every call of its own that synchronises in this mode."""
    torch.ones(1, device="cuda")
    with Session(tmp_path / "run", parts=[Inventory(), Ranges()], skip=1, warm=1, record=2, sites=0) as prof:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in prof.steps(range(8)):
                torch.ones(4, device="cuda").mul_(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert open_bundle(prof.path).manifest.program is not None

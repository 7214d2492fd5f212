"""`gpudiag run` on a GPU: steps are found where autograd works in threads of its own, and no mark waits for the device."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gpudiag.bundle.reader import open_bundle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BEGIN = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    x = torch.randn(32, 64, device="cuda")
    """
PLAIN = """
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    """
IN_BACKWARD = """
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(40):
        model(x).square().mean().backward()
    """
SCALED = """
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """


@pytest.mark.parametrize("loop", [PLAIN, IN_BACKWARD, SCALED], ids=["plain", "in backward", "scaled"])
def test_steps_are_found_on_a_gpu(tmp_path: Path, loop: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(loop))
    command = [sys.executable, "-m", "gpudiag", "run", "--no-report", "-o", "run", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.device_kind == "gpu"
    assert bundle.step_records.height >= 30
    assert {1} == set(bundle.step_records["backwards"].to_list()) or loop is SCALED
    assert [window.kind for window in bundle.manifest.windows] == ["timing", "sites"]

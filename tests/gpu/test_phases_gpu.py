"""The phases of steps by CUDA events, on a real GPU."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.phases import Phases
from gpudiag.capture.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

SIZE = 2048


def _train(prof: Session, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, SIZE)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(SIZE, SIZE).pin_memory() for _ in range(4)]
    losses = []
    for step in prof.steps(range(steps)):
        x = batches[step % 4].to("cuda", non_blocking=True)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return [loss.item() for loss in losses]


def test_phases_are_times_of_the_device_and_add_up_to_the_steps(tmp_path: Path) -> None:
    before = torch.Tensor.to
    with Session(tmp_path / "run", parts=[Phases()]) as prof:
        _train(prof, 60)
    rows = open_bundle(prof.path).step_records.filter(pl.col("step") >= 25)
    assert rows["phase_clock"].to_list() == ["device"] * rows.height
    assert rows.select("h2d_ns", "forward_ns", "backward_ns", "optimizer_ns").min_horizontal().min() > 0
    parts = rows.select(pl.sum_horizontal("h2d_ns", "forward_ns", "backward_ns", "optimizer_ns"))
    assert 0.5 < parts.sum().item() / rows["wall_ns"].sum() < 1.1
    copy = SIZE * SIZE * 4 / (rows["h2d_ns"].median() * 1e-9)  # type: ignore[operator]
    assert 1e9 < copy < 1e12  # PCIe 1.0 x16 to NVLink-C2C
    assert rows["backward_ns"].median() > rows["forward_ns"].median()  # twice the products
    assert torch.Tensor.to is before


def test_losses_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for name, parts in (("a", []), ("b", [Phases()])):
        with Session(tmp_path / name, parts=parts) as prof:
            found.append(_train(prof, 20))
    assert found[0] == found[1]


def test_a_graph_is_captured_inside_a_step(tmp_path: Path) -> None:
    x = torch.ones(64, 64, device="cuda")
    y = torch.empty_like(x)
    (x @ x).sum()
    torch.cuda.synchronize()
    with Session(tmp_path / "run", sites=0, parts=[Phases()]) as prof:
        for step in prof.steps(range(20)):
            if step == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y.copy_(x @ x)
            elif step > 3:
                x.copy_(torch.ones(64, 64))
                graph.replay()
    assert y[0, 0].item() == 64
    rows = open_bundle(prof.path).step_records
    assert rows.filter(pl.col("step") > 3)["h2d_ns"].null_count() <= 1

"""Reasons to wait that were planted into a training loop on a GPU: each is the largest idle cause, at the line where it stands."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch
from planted import Plant, analysed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

# A device that is about as busy as the host: without work in the queue a blocking call costs nothing.
_WORK = "work = torch.ones(4096, 4096, device=DEVICE)"
_BUSY = "for _ in range(20):\n    work @ work\n"

_SMALL = "for _ in range(100):\n    model[0].bias.data.add_(1)"
_RING = "ring = []\nfor _ in range(50_000):\n    ring.append([ring])"

PLANTS = {
    "slow loader": Plant("idle_data", "time.sleep", item="time.sleep(0.002)"),
    "collections": Plant("idle_gc", "gc.collect", plant="gc.collect()", setup=_RING),
    "checkpoints": Plant(
        "idle_io", "torch.save", plant='torch.save(big, BUNDLE + ".pt")', setup="big = torch.ones(2_000_000, device=DEVICE)"
    ),
    "item in each step": Plant("idle_sync", "loss.item", setup=_WORK, plant=f"{_BUSY}loss.item()\n{_SMALL}"),
    "pageable copies": Plant(
        "idle_sync", "host.to", setup=f"{_WORK}\nhost = torch.ones(4_000_000)", plant=f"{_BUSY}host.to(DEVICE)\n{_SMALL}"
    ),
    "cache emptied in each step": Plant(
        "idle_allocation", "empty_cache",
        plant="torch.cuda.empty_cache()\nkept = [torch.empty(30_000_000, device=DEVICE) for _ in range(8)]\ndel kept",
    ),
    "sleep": Plant("idle_launch", "time.sleep", plant="time.sleep(0.01)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_reason_is_the_largest_cause_at_its_line(name: str, tmp_path: Path) -> None:
    found = analysed(tmp_path, PLANTS[name], "cuda")
    sums = found.analysis.idle.group_by("cause").agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum()).sort("time", descending=True)
    assert found.cause == PLANTS[name].cause, (found.place, found.evidence, sums.rows())
    assert found.place in found.lines, (found.place, found.evidence, found.lines)
    found.analysis.breakdown.validate()

"""Memory of a training on a real GPU: categories to the block, and the allocator's own history."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gpudiag.bundle.reader import read_memory_files
from gpudiag.capture.memory import Memory
from gpudiag.capture.session import Session
from gpudiag.memory_report import memory
from gpudiag.trace.memory_snapshot import read_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

WIDTH, LAYERS, BATCH = 1024, 4, 512


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batches = [torch.randn(BATCH, WIDTH) for _ in range(22)]
    with Session(tmp_path_factory.mktemp("memory") / "run", parts=[Memory()]) as prof:
        for x in prof.steps(batches):
            loss = model(x.cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert prof.warnings == []
    return prof.path


def test_the_model_and_its_state_are_known_to_the_byte(trained: Path) -> None:
    """4 weights of 4 MiB, as much gradient, twice as much state: whole blocks; Adam's steps stand on the CPU (capturable=False)."""
    found = memory(str(trained)).memory
    weights = 4 * WIDTH * WIDTH * LAYERS
    assert found.device == "cuda:0"
    assert found.provenance == "owners"
    assert found.by_category["parameters"] == weights
    assert found.by_category["optimizer_state"] == 2 * weights
    assert found.by_category.get("gradients", 0) in range(0, weights + 1)
    assert sum(found.by_category.values()) == found.peak_bytes
    assert found.peak_bytes <= (found.run_peak_bytes or 0)


def test_activations_are_those_of_the_layers(trained: Path) -> None:
    """Each Tanh keeps its output, which the next layer needs too: 4 x 2 MiB; the batch is an input."""
    found = memory(str(trained)).memory
    if found.peak_phase in ("forward", "backward"):
        assert found.by_category["activations"] >= 4 * BATCH * WIDTH


def test_the_snapshot_is_of_this_run_and_the_history_is_off(trained: Path) -> None:
    files = read_memory_files(trained, 0)
    assert files.snapshot is not None
    assert files.owners is not None
    assert files.owners.notes == ()
    snapshot = read_snapshot(files.snapshot)
    assert sum(segment.total_size for segment in snapshot.segments) > 0
    assert any(entry.action == "alloc" and entry.frames for entry in snapshot.device_traces[0])
    assert not torch._C._cuda_isHistoryEnabled()
    found = memory(str(files.snapshot)).memory
    assert found.by_site


def test_counters_and_fragmentation_are_known(trained: Path) -> None:
    found = memory(str(trained)).memory
    assert found.retries == 0
    assert found.fragmentation_share is not None
    assert 0 <= found.fragmentation_share < 1
    assert found.largest_free_bytes is not None
    assert found.capacity_bytes == torch.cuda.get_device_properties(0).total_memory

"""Facts about tensors that live in host memory, and about work on graphs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import Work, analysis, gap, kernel, mark, table

from gpudiag.facts import Facts
from gpudiag.model.bundle import Manifest, Program
from gpudiag.model.finding import Missing

MIB = 1 << 20


def copy(start: float, end: float, way: str, size: int) -> Work:
    return kernel("aten::copy_", start, end, name=f"Memcpy {way} (Pinned)", kind="memcpy", copied=size, stream=13)


def test_state_that_goes_out_and_comes_back() -> None:
    work = [
        kernel("aten::mm", 0, 300), copy(250, 400, "DtoH", 96 * MIB), copy(400, 500, "HtoD", 128 * MIB), copy(500, 501, "HtoD", 4),
    ]  # fmt: skip
    marks = [mark("Optimizer.step#AdamW.step", 500, 1000)]
    found = Facts(analysis(work, steps=2, marks=marks, idle=[gap(501, 1000)]))
    assert found.value("offloaded_bytes_per_step") == 48 * MIB
    assert found.value("large_copy_exposed_ns") == 200_000
    assert found.value("host_optimizer_ns") == 499_000
    assert found.value("offload_ns") == 699_000
    assert found.value("offload_share") == pytest.approx(0.699)


def test_batches_are_not_offloaded() -> None:
    found = Facts(analysis([kernel("aten::mm", 0, 300), copy(300, 400, "HtoD", 512 * MIB)]))
    assert found.value("offloaded_bytes_per_step") == 0
    assert found.value("offload_ns") == 100_000  # no optimizer step was seen: the copies alone


def named(packages: dict[str, str], **changes: Any) -> Facts:
    return Facts(analysis([kernel("aten::mm", 0, 100)], manifest=Manifest(program=Program(packages=packages)), **changes))


def test_sampling_from_a_graph_is_seen_in_ops_and_packages() -> None:
    assert isinstance(named({"torch": "2.9", "dgl": "2.1"}).value("neighbours_sampled"), Missing)  # it may join small graphs
    assert named({"torch": "2.9"}).value("neighbours_sampled") is False
    assert Facts(analysis([kernel("pyg::neighbor_sample", 0, 100)])).value("neighbours_sampled") is True
    assert isinstance(Facts(analysis([kernel("torch_scatter::scatter_sum", 0, 100)])).value("neighbours_sampled"), Missing)


@pytest.mark.parametrize(
    ("frame", "sampled"),
    [
        ("torch_geometric/loader/neighbor_loader.py(7): f", True),
        ("torch_geometric/loader/node_loader.py(7): filter_fn", True),
        ("dgl/dataloading/dataloader.py(900): __next__", True),
        ("torch_geometric/loader/dataloader.py(27): __call__", False),  # Batch.from_data_list
        ("torch_geometric/nn/conv/gcn_conv.py(3): forward", False),
        ("train.py(7): dgl_like", False),
    ],
)
def test_sampling_from_a_graph_is_seen_in_frames(frame: str, sampled: bool) -> None:
    made = analysis([kernel("aten::mm", 0, 100)])
    frames = table("frames", [{"thread": 0, "name": frame, "start_ns": 0, "end_ns": 1}])
    assert (
        Facts(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, frames=frames))).value("neighbours_sampled")
        is sampled
    )


def test_waiting_for_batches_and_their_copies() -> None:
    wait = mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 200)
    found = Facts(
        analysis([kernel("aten::mm", 200, 900)], marks=[wait], idle=[gap(0, 200, cause="idle_data")], buckets={"exposed_copy": 100})
    )
    assert found.value("feeding_share") == pytest.approx(0.3)
    assert found.value("without_feeding_ns") == pytest.approx(300_000)

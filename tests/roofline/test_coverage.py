"""Shares of the kernel time: what is linked, what has a cost."""

from __future__ import annotations

from pathlib import Path

import kept
import polars as pl
import pytest
from examples import sample
from factories import A100
from handmade import call, costed, kernel, linked, op, steps

from gpudiag.attribution.cuda_graphs import map_replays
from gpudiag.model import trace
from gpudiag.model.analysis import Coverage
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.roofline.op_table import measure_coverage

TRACES = (
    "h100_qwen1.5-0.5b_prefill", "a100-80g_sam_fast_compiled_cudagraph", "a100_dlrm_train_cudagraph_triton_rank0of16",
    "mi300x_flux1_xdit_compiled", "mi300x_vllm_gptoss_decode_fullgraph", "mi300x_resnet18_ddp8_actckpt_train_rank0",
    "rtx2080ti_resnet18_train_noshapes", "v100_resnet50_train_2021_memory_callstack", "mi210_gpu_only_no_ops",
)  # fmt: skip


def _parts(found: Coverage) -> list[float]:
    """Return the shares that partition the kernel time."""
    words = ("attributable", "collective", "copy", "without_launch", "replay", "outside_ops", "without_shapes")
    return [getattr(found, f"{word}_share") for word in words]


def test_shares_of_the_kernel_time() -> None:
    events = [
        op("aten::mm", 0, 10, [[8, 8], [8, 8]]), call(5, 1), kernel(1000, 1400, 1),  # 400 modelled
        op("my::op", 10, 20, [[100]]), call(15, 2), kernel(1400, 1500, 2),  # 100 generic
        op("my::other", 20, 30, []), call(25, 3), kernel(1500, 1600, 3),  # 100 with shapes of nothing: unknown
        op("aten::relu", 30, 40), call(35, 4), kernel(1600, 1700, 4),  # 100 without shapes
        call(45, 5), kernel(1700, 1750, 5),  # 50 outside every op
        kernel(900, 1000, 77),  # 100 launched before the window
        call(50, 6, api="cudaGraphLaunch"), kernel(1750, 1800, 6),  # 50 replayed (outside every op too)
        op("aten::copy_", 60, 70, [[8], [8]]), call(65, 7), kernel(1800, 1900, 7, "Memcpy DtoD (Device -> Device)", bytes=32),  # 100
    ]  # fmt: skip
    found = measure_coverage(costed(*steps(0, 2000), *events, device=A100))
    assert (found.kernels, found.kernel_ns, found.attributable_ns) == (8, 1_000_000, 600_000)
    assert found.modelled_share == 400 / 600
    assert found.generic_share == 100 / 600
    assert found.unknown_share == 100 / 600
    assert found.modelled_share_of_all == 0.4
    assert found.linked_share == 0.8
    assert found.without_launch_share == 0.1
    assert found.outside_ops_share == 0.05
    assert found.without_shapes_share == 0.1
    assert found.replay_share == 0.05
    assert _parts(found) == [0.6, 0.0, 0.1, 0.1, 0.05, 0.05, 0.1]


def test_replays_mapped_to_their_ops_are_attributable() -> None:
    capture = [call(0, 1, api="cudaStreamBeginCapture"), op("aten::mm", 10, 20, [[8, 8], [8, 8]]), call(12, 2)]
    end = call(30, 3, api="cudaStreamEndCapture")
    replay = [call(100, 4, api="cudaGraphLaunch"), kernel(200, 300, 4, "ampere_sgemm_64x64_nn")]
    found = measure_coverage(costed(*steps(0, 1000), *capture, end, *replay, device=A100))
    assert (found.replay_share, found.mapped_replay_share, found.attributable_share) == (1.0, 0.0, 0.0)
    mapped, _ = map_replays(linked(*steps(0, 1000), *capture, end, *replay))
    after = measure_coverage(classify_kernels(mapped, find_attributed_ops(mapped, on_cpu=False), mapped_idle(), A100))
    assert (after.replay_share, after.mapped_replay_share, after.attributable_share, after.modelled_share) == (0.0, 1.0, 1.0, 1.0)


def mapped_idle() -> pl.DataFrame:
    """Return no idle time."""
    return trace.build_empty_table("idle", "cost")


@pytest.mark.parametrize("name", sample(TRACES))
def test_the_parts_of_real_traces_sum_to_the_whole(traces: Path, name: str) -> None:
    analysis = kept.analysis(traces / f"{name}.json.gz")
    found = analysis.coverage
    assert sum(_parts(found)) == pytest.approx(1, abs=1e-9)
    assert found.attributable_ns == pytest.approx(found.attributable_share * found.kernel_ns)
    if found.attributable_ns:
        assert found.modelled_share + found.generic_share + found.unknown_share == pytest.approx(1, abs=1e-9)
        assert found.modelled_share_of_all == pytest.approx(found.modelled_share * found.attributable_share)


def test_no_kernels_no_shares() -> None:
    found = measure_coverage(costed(*steps(0, 10), op("aten::mm", 0, 5), device=None))
    assert (found.kernels, found.kernel_ns, found.linked_share, found.modelled_share, found.modelled_share_of_all) == (
        0,
        0,
        None,
        None,
        None,
    )

"""The capture pass of replayed graphs in another file."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest

from gpudiag import api
from gpudiag.errors import InputError

NAME = "mi300x_vllm_gptoss_decode_fullgraph"


@pytest.mark.slow
def test_a_decoding_step_is_modelled_by_the_capture_that_belongs_to_it(traces: Path) -> None:
    alone = kept.report(traces / f"{NAME}.json.gz")
    both = api.diagnose(traces / f"{NAME}.json.gz", graph_capture=traces / f"{NAME}_capture.json.gz").data
    assert alone.trust.replay_share == pytest.approx(0.969, abs=0.001)
    assert (both.trust.replay_share, both.trust.mapped_replay_share) == (0, alone.trust.replay_share)
    assert both.trust.attributable_share > 0.99
    assert both.device_time == alone.device_time
    products = [row for row in both.ops if row.name in ("aten::mm", "aten::addmm")]
    assert sum(row.count for row in products) == 73
    assert sum(row.flops for row in products) == 24 * 2 * 32 * (5120 * 2880 + 2880 * 4096 + 32 * 2880) + 2 * 32 * 201_088 * 2880
    assert all(row.efficiency is None or 0 < row.efficiency < 1 for row in products)


def test_what_is_no_capture_is_said(traces: Path) -> None:
    found = api.diagnose(traces / f"{NAME}.json.gz", graph_capture=traces / "h100_bert-small.json.gz").data
    assert any("no graph was captured while it was recorded" in text for text in found.trust.warnings)
    assert found.trust.mapped_replay_share == 0


def test_a_capture_without_a_replay_is_not_read(traces: Path, tmp_path: Path) -> None:
    found = api.diagnose(traces / "h100_bert-small.json.gz", graph_capture=tmp_path / "missing.json").data
    assert any("not needed" in text for text in found.trust.warnings)


def test_a_capture_that_cannot_be_read_is_one_clear_line(traces: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json"):
        api.diagnose(traces / f"{NAME}.json.gz", graph_capture=tmp_path / "missing.json")


def test_classes_stand_in_the_table_of_kernels(traces: Path) -> None:
    rows = kept.report(traces / f"{NAME}.json.gz").kernels
    assert {row.kernel_class for row in rows if row.kind == "kernel"} >= {"gemm", "attention", "norm", "triton_pointwise"}
    assert all(row.kernel_class is None for row in rows if row.kind != "kernel")


@pytest.mark.slow
def test_a_folder_of_captures_is_searched_for_the_one_that_fits(traces: Path, tmp_path: Path) -> None:
    """Servers write one trace for each captured batch size; here the right one lies beside one of another run."""
    for number, name in enumerate(("h100_bert-small", f"{NAME}_capture")):
        (tmp_path / f"bs_{number}.json.gz").symlink_to(traces / f"{name}.json.gz")
    found = api.diagnose(traces / f"{NAME}.json.gz", graph_capture=tmp_path).data
    assert found.trust.replay_share == 0

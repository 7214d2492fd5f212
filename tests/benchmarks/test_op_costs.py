"""Cost models and device table against measured times of single ops (sources: bench_op_costs.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import polars as pl
import pytest

sys.path.append(str(Path(__file__).parent))

from bench_op_costs import OPS, find_device, judge, read_neusight
from results import replace_section

from gpudiag.model.ops import OVER_ROOF_ABOVE

pytestmark = pytest.mark.skipif(not OPS.is_dir(), reason="needs the measured times of ../shared/evidence/ops")

DEVICES = ("NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB", "Tesla T4", "Tesla P4")
STREAMS = ("add", "addu", "mul", "mulu", "div", "divu", "relu", "tanh", "gelu", "pow", "powu")
PRODUCTS = ("linear", "bmm")


@pytest.fixture(scope="module")
def neusight() -> dict[str, pl.DataFrame]:
    """Every third row of each device; `make bench-ops` judges all."""
    return {name: judge(ops[::3], find_device(name)) for name, ops in read_neusight().items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DEVICES)
def test_no_op_beats_its_roofline(neusight: dict[str, pl.DataFrame], name: str) -> None:
    found = neusight[name]["efficiency"]
    assert found.null_count() == 0
    assert (found > OVER_ROOF_ABOVE).sum() == 0
    assert (found > 1).mean() <= 0.005  # the table's 14.0 TFLOP/s of a V100 PCIe is 14.13 rounded down


@pytest.mark.parametrize("name", DEVICES)
def test_the_best_ops_come_near_their_roofline(neusight: dict[str, pl.DataFrame], name: str) -> None:
    """A count or a peak that is off by two in either direction shows: streams reach 70 to 95 % of DRAM, the best product 80 % of fp32."""
    rows = neusight[name]
    streams = rows.filter(pl.col("kind").is_in(STREAMS))["efficiency"]
    assert 0.70 <= streams.median() <= 0.95  # type: ignore[operator]
    assert rows.filter(pl.col("kind").is_in(PRODUCTS))["efficiency"].max() >= 0.8  # type: ignore[operator]


def test_a_peak_that_is_half_of_what_it_should_be_is_found() -> None:
    ops = [timed for timed in read_neusight()["Tesla V100-PCIE-32GB"] if timed.kind in ("add", "linear")][::10]
    device = find_device("Tesla V100-PCIE-32GB")
    assert device is not None
    assert device.bandwidth_byte_per_s is not None
    slow = msgspec.structs.replace(device, peaks={key: peak / 2 for key, peak in device.peaks.items()})
    narrow = msgspec.structs.replace(device, bandwidth_byte_per_s=device.bandwidth_byte_per_s / 2)
    for kind, planted in (("linear", slow), ("add", narrow)):
        rows = judge([timed for timed in ops if timed.kind == kind], planted)
        assert (rows["efficiency"] > OVER_ROOF_ABOVE).mean() > 0.9  # type: ignore[operator]


def test_a_section_is_replaced_in_its_place() -> None:
    page = "# Page\n\n## One\n\na\n\n## Two\n\nb\n"
    assert replace_section(page, "## One", "## One\n\nc\n") == "# Page\n\n## One\n\nc\n\n## Two\n\nb\n"
    assert replace_section(page, "## Three", "## Three\n\nc") == page + "\n## Three\n\nc\n"
    assert replace_section(page, "## Two", "") == "# Page\n\n## One\n\na\n"

"""Recorded properties agree with a row as torch and Kineto write them on NVIDIA and AMD; what was not recorded decides nothing."""

from __future__ import annotations

import pytest

from gpudiag.hardware.device_table import compare_evidence, is_capability, load_table
from gpudiag.model.hardware import ObservedDevice

ROWS = {row.id: row for row in load_table().devices}


@pytest.mark.parametrize(
    ("known", "recorded"),
    [("9.0", "9.0"), ("9.0", "sm_90"), ("10.0", "sm_100"), ("gfx942", "gfx942:sramecc+:xnack-"), ("gfx942", "9.4"), ("gfx90a", "9.0")],
)
def test_same_capability(known: str, recorded: str) -> None:
    assert is_capability(known, recorded)


@pytest.mark.parametrize(
    ("known", "recorded"),
    [("9.0", "9.4"), ("8.9", "8.6"), ("gfx942", "gfx950"), ("gfx942", "9.5"), ("gfx90a", "gfx908"), ("9.0", "gfx90a"), ("9.0", "")],
)
def test_other_capability(known: str, recorded: str) -> None:
    assert not is_capability(known, recorded)


def test_gfx_numbers() -> None:
    # deviceProperties of ROCm traces: MI210 (gfx90a) 9.0, MI300X (gfx942) 9.4.
    for name, number in (("gfx90a", "9.0"), ("gfx942", "9.4"), ("gfx950", "9.5"), ("gfx1100", "11.0")):
        assert is_capability(name, number)


def test_the_warp_size_parts_an_mi210_from_an_h100() -> None:
    mi210 = ObservedDevice(0, "", 104, 68702699520, "9.0", 64)
    assert compare_evidence(ROWS["mi210"], mi210).enough
    assert compare_evidence(ROWS["h100-pcie"], mi210).chip is False


@pytest.mark.parametrize(
    ("row_id", "recorded_bytes"),
    [
        ("h200-sxm", 143156 * 2**20), ("h20", 97285 * 2**20), ("a10g", int(22.1 * 2**30)), ("b200", 182642 * 2**20),
        ("mi300x", 206141652992), ("a100-sxm4-40gb", 42505273344), ("v100-sxm2-32gb", 34089730048), ("t4", 15109 * 2**20),
    ],
)  # fmt: skip
def test_reported_memory_is_that_of_the_marketing_size(row_id: str, recorded_bytes: int) -> None:
    assert compare_evidence(ROWS[row_id], ObservedDevice(0, "", None, recorded_bytes)).memory is True


def test_sizes_of_one_line_are_told_apart() -> None:
    assert compare_evidence(ROWS["a100-sxm4-40gb"], ObservedDevice(0, "", None, 84990623744)).memory is False
    assert compare_evidence(ROWS["h100-sxm5-80gb"], ObservedDevice(0, "", None, 95 * 2**30)).memory is False


def test_what_is_not_recorded_neither_agrees_nor_contradicts() -> None:
    nothing = compare_evidence(ROWS["t4"], ObservedDevice())
    assert nothing == (None, None, None)
    assert not nothing.enough
    assert not compare_evidence(ROWS["t4"], ObservedDevice(0, "", 40)).enough  # an SM count alone names no chip

"""Recorded devices resolve to what they were: by name, and by everything else where the name is no key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noticewords import format_notices

from gpudiag.hardware.device_peaks import Resolution, build_device, resolve_device
from gpudiag.hardware.device_table import Row, load_table
from gpudiag.model.hardware import Device, ObservedDevice

TABLE = load_table()
ROWS = {row.id: row for row in TABLE.devices}
GIB = 2**30


def observed(name: str = "", sms: int | None = None, memory: float | None = None, capability: str | None = None, warp: int | None = None):
    return ObservedDevice(0, name, sms, None if memory is None else int(memory), capability, warp)


def found(*arguments) -> Device:
    device = resolve_device(observed(*arguments)).device
    assert device is not None
    return device


# name, SMs, totalGlobalMem, compute capability and warp size as deviceProperties of real traces (2020 to 2026) state them.
SEEN = [
    ("NVIDIA PG509-210", 108, 84990623744, "8.0", 32, "a100-sxm4-80gb"),
    ("NVIDIA A100-SXM4-80GB", 108, 84990623744, "8.0", 32, "a100-sxm4-80gb"),
    ("NVIDIA A100-PG509-200", 108, 42505273344, "8.0", 32, "a100-sxm4-40gb"),
    ("NVIDIA H100 80GB HBM3", 132, 85018279936, "9.0", 32, "h100-sxm5-80gb"),
    ("AMD Instinct MI210", 104, 68702699520, "9.0", 64, "mi210"),
    ("AMD Instinct MI300X", 304, 206141652992, "9.4", 64, "mi300x"),
    ("AMD Instinct MI300X VF", 304, 206141652992, "9.4", 64, "mi300x"),
    ("AMD Radeon Graphics", 304, 206141652992, "9.4", 64, "mi300x"),
    ("", 304, 206141652992, "9.4", 64, "mi300x"),
    ("NVIDIA GeForce RTX 2080 Ti", 68, 11554586624, "7.5", 32, "rtx-2080-ti"),
    ("Tesla V100-SXM2-32GB", 80, 34089730048, "7.0", 32, "v100-sxm2-32gb"),
    ("Tesla V100-SXM2-32GB", 80, 34079899648, "7.0", 32, "v100-sxm2-32gb"),
    ("Tesla V100-DGXS-32GB", 80, 34084028416, "7.0", 32, "v100-sxm2-32gb"),
    ("AMD Instinct MI250X/MI250", 104, 68702699520, "9.0", 64, "mi210"),
    ("AMD Instinct MI250X", 110, 68702699520, "gfx90a:sramecc+:xnack-", 64, "mi250x-gcd"),
    ("NVIDIA H200", 132, 143156 * 2**20, "9.0", 32, "h200-sxm"),
    ("NVIDIA GH200 480GB", 132, 97871 * 2**20, "9.0", 32, "gh200-96gb"),
    ("NVIDIA H20", 78, 97285 * 2**20, "9.0", 32, "h20"),
    ("NVIDIA A10G", 80, 22.1 * GIB, "8.6", 32, "a10g"),
    ("NVIDIA B200", 148, 182642 * 2**20, "10.0", 32, "b200"),
    ("NVIDIA H100", 114, 85 * 10**9, "9.0", 32, "h100-pcie"),
]


@pytest.mark.parametrize(("name", "sms", "memory", "capability", "warp", "row_id"), SEEN)
def test_devices_seen_in_real_traces(name, sms, memory, capability, warp, row_id) -> None:
    device = found(name, sms, memory, capability, warp)
    row = build_device(ROWS[row_id], TABLE)
    assert device.id == row_id
    assert (device.peaks, device.bandwidth_byte_per_s) == (row.peaks, row.bandwidth_byte_per_s)
    assert device.memory_bytes == int(memory)


@pytest.mark.parametrize("row", TABLE.devices, ids=lambda row: row.id)
def test_a_row_recorded_in_full_resolves_to_itself_without_a_warning(row: Row) -> None:
    chip = row.chip
    resolution = resolve_device(observed(row.names[0], chip.sm_count, row.memory.gib * GIB * 0.99, chip.compute_capability, chip.warp_size))
    assert format_notices(resolution.notices) == ()
    assert resolution.device is not None
    assert resolution.device.id == row.id
    assert resolution.device.provenance == row.provenance.confidence


@pytest.mark.parametrize("row", TABLE.devices, ids=lambda row: row.id)
def test_a_nameless_device_gets_a_roof_within_six_percent_or_says_that_it_is_unsure(row: Row) -> None:
    chip = row.chip
    resolution = resolve_device(observed("", chip.sm_count, row.memory.gib * GIB * 0.99, chip.compute_capability, chip.warp_size))
    device = resolution.device
    assert device is not None
    assert format_notices(resolution.notices)
    mine = row.peaks_tflop_per_s["fp16"] * 1e12
    if device.provenance == "unverified":
        assert device.id == row.id or any("fits as well" in text for text in format_notices(resolution.notices))
    else:
        assert device.peaks["fp16"] == pytest.approx(mine, rel=0.06)
        assert device.bandwidth_byte_per_s == pytest.approx(row.memory.gbyte_per_s * 1e9, rel=0.06)


def test_how_a_nameless_device_was_settled_is_said() -> None:
    (warning,) = format_notices(resolve_device(observed("", 304, 206141652992, "9.4", 64)).notices)
    assert warning == "a device without a name: taken as Instinct MI300X, settled by 304 SMs, 192 GiB, compute capability 9.4, warp size 64"


def test_rivals_with_other_roofs_are_named_and_cost_the_provenance() -> None:
    resolution = resolve_device(observed("Tesla V100-DGXS-32GB", 80, 34084028416, "7.0", 32))
    assert resolution.device is not None
    assert resolution.device.provenance == "unverified"
    assert resolution.device.link_byte_per_s is None  # SXM2 has NVLink, PCIe has not
    assert "Tesla V100 PCIe 32 GB (fp16 112 TFLOP/s, 900 GB/s)" in format_notices(resolution.notices)[1]


class TestParts:
    """A name of the table with other hardware under it."""

    def test_mig_instance(self) -> None:
        # A100 user guide: a 3g.20gb instance has 42 SMs (3 x 14) and half of the 8 memory slices.
        device = found("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 19.5 * GIB, "8.0", 32)
        assert device.provenance == "derived"
        assert device.sm_count == 42
        assert device.peaks["bf16"] == pytest.approx(312e12 * 42 / 108)
        assert device.bandwidth_byte_per_s == pytest.approx(1555e9 / 2)
        assert device.cache_bytes == 20 * 2**20
        assert device.link_byte_per_s is None

    def test_mig_instance_known_by_name_only(self) -> None:
        device = found("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
        assert device.peaks["bf16"] == pytest.approx(312e12 / 7)
        assert device.bandwidth_byte_per_s == pytest.approx(1555e9 / 8)

    def test_compute_partition_of_an_mi300x(self) -> None:
        device = found("AMD Instinct MI300X", 38, 48 * GIB, "9.4", 64)  # CPX with NPS4: one of eight XCDs, a quarter of the memory
        assert device.peaks["fp16"] == pytest.approx(1307.4e12 / 8)
        assert device.bandwidth_byte_per_s == pytest.approx(5325e9 / 4)

    def test_partition_that_sees_all_memory_keeps_the_bandwidth(self) -> None:
        device = found("AMD Instinct MI300X", 38, 206141652992, "9.4", 64)
        assert device.bandwidth_byte_per_s == 5325e9

    def test_board_with_other_memory_keeps_the_peaks_and_loses_the_bandwidth(self) -> None:
        resolution = resolve_device(observed("NVIDIA H100", 132, 95 * GIB, "9.0", 32))  # the custom 96 GB HBM2e board
        assert resolution.device is not None
        assert resolution.device.peaks["bf16"] == 989.4e12
        assert resolution.device.bandwidth_byte_per_s is None
        assert "its bandwidth is unknown" in format_notices(resolution.notices)[0]

    def test_vgpu_has_all_sms_and_the_full_bandwidth(self) -> None:
        resolution = resolve_device(observed("GRID A10-8Q", 72, 8 * GIB, "8.6", 32))
        assert resolution.device is not None
        assert (resolution.device.id, resolution.device.bandwidth_byte_per_s, format_notices(resolution.notices)) == ("a10", 600e9, ())

    def test_custom_board_of_a_known_line(self) -> None:
        device = found("NVIDIA A100-SXM-64GB", 124, 64 * GIB, "8.0", 32)
        assert device.peaks["bf16"] == pytest.approx(312e12 * 124 / 108)
        assert (device.provenance, device.bandwidth_byte_per_s) == ("derived", None)

    def test_name_that_the_chip_contradicts(self) -> None:
        resolution = resolve_device(observed("NVIDIA H100 PCIe", 108, 42505273344, "8.0", 32))
        assert resolution.device is not None
        assert resolution.device.id == "a100-sxm4-40gb"
        assert "contradicts" in format_notices(resolution.notices)[0]


class TestDerived:
    """Products that the table does not hold: SMs x rate of the architecture x the clock of its kin."""

    def test_geforce_halves_the_tensor_rate(self) -> None:
        # RTX 3050 Ti Laptop: 20 SMs, up to 1695 MHz: 8.7 TFLOP/s fp32, twice that in fp16 with fp32 accumulation
        device = found("NVIDIA GeForce RTX 3050 Ti Laptop GPU", 20, 4 * GIB, "8.6", 32)
        assert device.id == "unknown-geforce-rtx-3050-ti-laptop-gpu"
        assert device.provenance == "derived"
        assert device.peaks["fp16"] == 2 * device.peaks["fp32"]
        assert device.peaks["fp32"] == pytest.approx(8.7e12, rel=0.1)
        assert device.bandwidth_byte_per_s is None
        assert device.cache_bandwidth_byte_per_s is None

    def test_professional_board_does_not(self) -> None:
        device = found("NVIDIA RTX A5500", 80, 24 * GIB, "8.6", 32)  # has the SMs and memory of an A10G, and twice its tensor rate
        assert device.peaks["fp16"] == pytest.approx(136.4e12, rel=0.05)  # data sheet: 272.8 sparse

    def test_apu_of_a_known_architecture(self) -> None:
        assert found("AMD Instinct MI300A", 228, 128 * GIB, "gfx942", 64).peaks["bf16"] == pytest.approx(980.6e12, rel=0.001)  # data sheet

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("",), "SM count is not recorded"),
            (("NVIDIA GeForce RTX 3050 Ti Laptop GPU",), "SM count is not recorded"),
            (("", 132), "compute capability is not recorded"),
            (("NVIDIA GB10", 48, 120 * GIB, "12.1", 32), "no rates are known"),
            (("AMD Instinct MI100", 120, 32 * GIB, "9.0", 64), "no rates are known"),  # gfx908: shares 9.0 with gfx90a
            (("AMD Instinct MI100", 120, 32 * GIB, "9.0", None), "no rates are known"),  # and with the H100
            (("AMD Radeon RX 7900 XTX", 96, 24 * GIB, "11.0", 32), "no rates are known"),
            (("", 0, 0, "", 0), "SM count is not recorded"),
        ],
    )
    def test_nothing_is_made_up(self, arguments, reason: str) -> None:
        resolution = resolve_device(observed(*arguments))
        assert resolution.device is None
        assert reason in format_notices(resolution.notices)[-1]


@given(
    name=st.one_of(st.text(max_size=30), st.sampled_from([name for row in TABLE.devices for name in row.names])),
    sms=st.one_of(st.none(), st.integers(-1, 400)),
    memory=st.one_of(st.none(), st.integers(-1, 2**40)),
    capability=st.one_of(st.none(), st.sampled_from(["7.0", "8.6", "9.0", "9.4", "gfx942", "12.0", "x", "9", "\x00"])),
    warp=st.one_of(st.none(), st.sampled_from([0, 32, 64])),
)
def test_any_recording_gives_a_device_or_a_reason(name, sms, memory, capability, warp) -> None:
    resolution = resolve_device(ObservedDevice(0, name, sms, memory, capability, warp))
    assert isinstance(resolution, Resolution)
    if resolution.device is None:
        assert format_notices(resolution.notices)
        return
    device = resolution.device
    assert all(peak > 0 for peak in device.peaks.values())
    assert device.bandwidth_byte_per_s is None or device.bandwidth_byte_per_s > 0
    if sms is not None and sms > 0:
        assert device.sm_count == sms  # peaks always belong to the SMs that were recorded
    assert all(character.isprintable() for text in format_notices(resolution.notices) for character in text)

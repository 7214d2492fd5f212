"""The device of a recording: clocks of the bundle's telemetry, and the key that measured peaks are kept under."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import call, kernel, op, steps, write
from handmade import trace as make_trace
from noticewords import format_notices
from segments import segment

from gpudiag import api
from gpudiag.capture.bundle import OpenedBundle, open_bundle
from gpudiag.devices import (
    FoundDevice,
    build_recording_peaks_key,
    derate_to_observed_clock,
    find_device,
    load_or_measure_peaks,
)
from gpudiag.hardware import calibration
from gpudiag.hardware.device_peaks import build_device
from gpudiag.hardware.device_table import load_table
from gpudiag.model.bundle import Machine, Manifest, Settings, TelemetryInfo, Window
from gpudiag.model.hardware import Device, ObservedDevice, build_device_key
from gpudiag.model.trace import build_table_schema

UNIX = 1_700_000_000_000_000_000
NAMES = {0: "NVIDIA A100-SXM4-80GB", 1: "NVIDIA A100-SXM4-80GB", 2: "NVIDIA H100 80GB HBM3"}
WINDOW = np.array([[1000, 2000], [3000, 4000]])


@pytest.fixture(scope="module")
def a100() -> Device:
    table = load_table()
    return build_device(next(row for row in table.devices if row.id == "a100-sxm4-80gb"), table)


def bundle(folder: Path, **segments: pl.DataFrame) -> OpenedBundle:
    """Return a bundle with telemetry segments by file name."""
    (folder / "telemetry" / "rank0").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(Manifest(finished=True)))
    for name, frame in segments.items():
        (folder / "telemetry" / "rank0" / f"{name}.parquet").write_bytes(segment("telemetry", frame))
    return open_bundle(folder)


def clocks(*pairs: tuple[int, float], **more: float) -> pl.DataFrame:
    rows = [(UNIX + moment, clock) for moment, clock in pairs]
    return pl.DataFrame(rows, schema={"t_ns": pl.Int64, "sm_clock_mhz": pl.Int64}, orient="row").with_columns(
        pl.lit(value).alias(name) for name, value in more.items()
    )


def test_peaks_follow_the_clock_of_the_analysed_steps(tmp_path: Path, a100: Device) -> None:
    # 1,410 before, 1,050 and 1,080 within the two steps, 210 after them; other columns of a sampler do no harm
    opened = bundle(tmp_path, s0=clocks((0, 1410), (1000, 1050)), s1=clocks((3500, 1080), (4000, 210), power_w=400.0))
    device = derate_to_observed_clock(a100, opened, WINDOW, UNIX)
    assert device is not None
    assert device.peaks["bf16"] == pytest.approx(312e12 * 1065 / 1410)  # 1,050 still holds at 3000
    assert device.notes[0].startswith("Peaks at the observed 1,065 of 1,410 MHz")
    assert opened.telemetry.columns == list(build_table_schema("telemetry"))
    assert opened.telemetry["power_w"].to_list() == [None, None, 400.0, 400.0]
    assert opened.telemetry["energy_mj"].null_count() == 4


@pytest.mark.parametrize("unix", [None, UNIX])
def test_without_telemetry_or_a_known_clock_of_the_trace_the_boost_clock_counts(tmp_path: Path, a100: Device, unix: int | None) -> None:
    opened = bundle(tmp_path) if unix else bundle(tmp_path, s0=clocks((1000, 1050)))
    for found in (derate_to_observed_clock(a100, opened, WINDOW, unix), derate_to_observed_clock(a100, None, WINDOW, unix)):
        assert found is not None
        assert found.peaks == a100.peaks
        assert "was not recorded" in found.notes[0]
    assert derate_to_observed_clock(None, opened, WINDOW, unix) is None


@pytest.mark.parametrize(("asked", "since", "mhz"), [(0, 0, None), (1, 0, 1050), (1, 500, 1050), (1, 1500, None), (None, 0, 1050)])
def test_clocks_of_another_gpu_say_nothing(tmp_path: Path, a100: Device, asked: int | None, since: int, mhz: float | None) -> None:
    opened = bundle(tmp_path, s0=clocks((1000, 1050)))
    info = TelemetryInfo(source="nvml", interval_ns=1, samples=1, device_index=asked, device_since_unix_ns=UNIX + since)
    opened = msgspec.structs.replace(opened, manifest=msgspec.structs.replace(opened.manifest, telemetry=info))
    device = derate_to_observed_clock(a100, opened, WINDOW, UNIX, 1)
    assert device is not None
    assert device.notes[0].startswith("Peaks at the boost clock" if mhz is None else f"Peaks at the observed {mhz:,.0f}")


def of_trace(*indices: int, number: int, measured: int | None) -> FoundDevice:
    """Return what is found for kernels on device `number`; the trace describes `indices`, and `measured` has measured peaks."""
    properties = [{"id": index, "name": NAMES[index]} for index in indices]
    trace = make_trace(kernel(50, 4050, 1, device=number), deviceProperties=properties)
    peaks = Device(id="m", name="measured", kind="gpu", provenance="measured", source="s", peaks={"fp32": 1e12})
    manifest = None if measured is None else Manifest(device=ObservedDevice(index=measured, name=NAMES[measured]), peaks=peaks)
    return find_device(trace, "gpu", manifest)


def test_measured_peaks_are_used_for_such_a_device_only() -> None:
    same, twin, other = of_trace(1, number=1, measured=1), of_trace(0, 1, number=1, measured=0), of_trace(0, 2, number=2, measured=0)
    assert [found.device.provenance for found in (same, twin, other) if found.device] == ["measured", "measured", "datasheet"]
    assert [text for text in format_notices(other.notices) if "measured peaks are of device 0, not of device 2" in text]
    assert not [text for text in (*format_notices(same.notices), *format_notices(twin.notices)) if "measured peaks are" in text]


def test_a_device_that_the_recording_does_not_describe_is_judged_like_another_with_a_word() -> None:
    assert [text for text in format_notices(of_trace(0, number=2, measured=None).notices) if "does not describe device 2" in text]
    assert not [text for text in format_notices(of_trace(0, number=2, measured=2).notices) if "does not describe" in text]


def test_a_damaged_segment_is_left_out_and_said(tmp_path: Path, a100: Device) -> None:
    (tmp_path / "telemetry" / "rank0").mkdir(parents=True)
    (tmp_path / "telemetry" / "rank0" / "s9.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(Manifest(finished=True)))
    opened = open_bundle(tmp_path)
    assert format_notices(opened.notices) == ("telemetry/rank0/s9.parquet could not be read and is left out",)
    assert opened.telemetry.height == 0


def test_measured_peaks_are_kept_for_this_very_gpu() -> None:
    def key(device: ObservedDevice) -> str:
        return build_recording_peaks_key(Manifest(device_kind="gpu", device=device, machine=Machine(torch="2.13.0")))

    one, two = (ObservedDevice(name="NVIDIA H200", key=build_device_key("NVIDIA H200", 0, uuid, 132)) for uuid in ("a-1", "a-2"))
    assert len({key(one), key(two), key(ObservedDevice(name="NVIDIA H200"))}) == 3


def test_a_key_holds_no_serial_number_and_tells_partitions_apart() -> None:
    uuid = "GPU-6d5b3c9e-1111-2222-3333-444455556666"
    keys = {build_device_key("NVIDIA H100", 0, uuid, sms) for sms in (132, 16, None)}
    assert len(keys) == 3
    assert all(uuid not in key and "6d5b" not in key for key in keys)
    assert build_device_key("NVIDIA H100", 0, uuid, 132) == f"NVIDIA H100 {hashlib.sha256(f'{uuid} 132'.encode()).hexdigest()[:16]}"
    assert build_device_key("Tesla V100", 1, None, 80) == "Tesla V100 #1"


def test_settings_and_clock_of_a_bundle_reach_the_roofline(tmp_path: Path) -> None:
    events = [*steps(0, 100_000), op("aten::mm", 5, 30, [[4096, 4096], [4096, 4096]]), call(10, 1), kernel(50, 4050, 1)]
    properties = [
        {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "totalGlobalMem": 85_000_000_000, "computeMajor": 8, "computeMinor": 0}
    ]
    (tmp_path / "trace").mkdir()
    plain = write(tmp_path / "plain.json", *events, deviceProperties=properties, baseTimeNanoseconds=UNIX)
    (tmp_path / "trace" / "rank0-w0.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    settings = Settings(cuda_matmul_allow_tf32=True)
    window = Window(
        rank=0, index=0, kind="timing", file="trace/rank0-w0.json.gz", first_step=0, steps=1, record_shapes=True, with_stack=False
    )
    manifest = Manifest(finished=True, device_kind="gpu", settings=settings, windows=(window,))
    bundle(tmp_path, s0=clocks((0, 705)))
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    report = api.diagnose(str(tmp_path)).data
    (row,) = report.ops
    assert (row.engine, row.engine_by) == ("tf32", "settings")
    assert row.t_roof_ns == pytest.approx(2 * 4096**3 / (156e12 * 705 / 1410) * 1e9)  # half the clock, half the peak
    assert report.device is not None
    assert report.device.notes[0].startswith("Peaks at the observed 705 of 1,410 MHz")


@pytest.mark.parametrize(("disturbed", "measured"), [(False, 1), (True, 2)])
def test_peaks_measured_beside_other_programs_serve_their_own_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: bool, measured: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    device = Device(id="cpu", name="a CPU", kind="cpu", provenance="measured", source="a test", disturbed=disturbed)
    monkeypatch.setattr(calibration, "measure_in_child", lambda *given: asked.append(given) or device)
    for _ in range(2):
        assert load_or_measure_peaks(Manifest(machine=Machine(cpu="a CPU", torch="2.13.0"))) == device
    assert len(asked) == measured

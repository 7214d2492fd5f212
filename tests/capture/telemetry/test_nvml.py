"""What nvml.py makes of the answers of several boards (recorded: boards.yaml), through the real code path."""

from __future__ import annotations

import pynvml
import pytest
from fakenvml import FakeNvml, identity

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.capture.telemetry.nvml import NvmlSource
from gpudiag.capture.telemetry.readings import SECOND, AllocatorSource
from gpudiag.model import trace

HOST = {"t_ns", "cpu_util_pct", "system_cpu_util_pct", "cpu_freq_mhz", "rss_bytes", "child_threads"}
GPU = set(trace.build_table_schema("telemetry")) - HOST - set(AllocatorSource.columns)


def opened(board: str, **options: float) -> tuple[NvmlSource, FakeNvml]:
    lib = FakeNvml(board, **options)  # type: ignore[arg-type]
    return NvmlSource(lib, identity(board)), lib


def test_an_h100_answers_every_column_in_the_units_of_the_table() -> None:
    source, _ = opened("h100_sxm")
    first, second = source.sample(SECOND), source.sample(20 * SECOND)
    assert set(first) == GPU
    assert source.missing() == {}
    assert (first["sm_clock_mhz"], second["sm_clock_mhz"]) == (1980, 1755)
    assert (first["clock_event_reasons"], second["clock_event_reasons"]) == (0, pynvml.nvmlClocksEventReasonSwPowerCap)
    assert second["power_w"] == pytest.approx(698.5)  # 698,500 mW
    assert second["energy_mj"] == 918273680000
    assert first["mem_used_bytes"] == 71_000_000_000  # version 2, without what the driver reserves
    assert first["pcie_rx_bytes_per_s"] == 9.2e9  # 9,200,000 KB/s
    assert (first["nvlink_rx_bytes"], first["nvlink_tx_bytes"]) == (1 << 30, 2 << 30)  # KiB
    assert source.notes()["power_w"] == "instantaneous"
    assert source.limits() == {
        "max_sm_clock_mhz": 1980, "max_mem_clock_mhz": 2619, "power_limit_w": 700, "max_pcie_link_gen": 5, "max_pcie_link_width": 16,
        "memory_bytes": 85520809984, "slowdown_temperature_c": 92,
    }  # fmt: skip


def test_xid_errors_are_counted_and_named_and_the_event_set_is_freed() -> None:
    source, lib = opened("h100_sxm")
    seen = [source.sample(at * 3 * SECOND).get("xid_events") for at in range(1, 4)]
    assert seen[0] == 0
    assert seen[-1] is not None
    assert seen[-1] >= 1
    assert "Xid 79" in source.notes()["xid_events"]
    source.close()
    assert lib.calls["nvmlEventSetFree"] == 1


def test_what_a_laptop_does_not_have_is_null_in_the_words_of_nvml_and_asked_once() -> None:
    source, lib = opened("laptop_rtx4070")
    for at in range(1, 60):
        source.sample(at * 5 * SECOND)
    missing = source.missing()
    assert set(missing) == {"nvlink_rx_bytes", "nvlink_tx_bytes", "ecc_uncorrected", "xid_events"}
    assert set(missing.values()) == {"Not Supported"}
    assert lib.calls["nvmlDeviceGetTotalEccErrors.1.0"] == 1
    assert lib.calls["field.139.4294967295"] == 1
    assert "averaged over one second" in source.notes()["power_w"]
    assert source.sample(10**12)["power_w"] == pytest.approx(78.2)
    assert "power_limit_w" not in source.limits()


def test_a_mig_instance_has_its_own_memory_and_the_rest_of_its_board() -> None:
    source, _ = opened("mig_3g40gb")
    found = source.sample(SECOND)
    assert found["mem_used_bytes"] == 30_000_000_000
    assert found["sm_clock_mhz"] == 1755
    assert "whole board" in source.notes()["energy_mj"]
    assert source.notes()["power_w"].startswith("instantaneous; of the whole board")
    assert source.missing()["gpu_util_pct"] == "Not Supported"


def test_an_old_driver_is_asked_by_the_older_names() -> None:
    source, lib = opened("v100_old_driver")
    found = source.sample(SECOND)
    assert found["clock_event_reasons"] == pynvml.nvmlClocksThrottleReasonHwSlowdown
    assert (found["power_w"], found["energy_mj"], found["mem_used_bytes"]) == (287.0, 120000, 15_000_000_000)
    source.sample(2 * SECOND)
    assert lib.calls["nvmlDeviceGetCurrentClocksEventReasons"] == 1  # once, then the name that works
    assert lib.calls["nvmlDeviceGetMemoryInfo.v2"] == 1


def test_garbage_is_null_with_the_reason() -> None:
    source, _ = opened("garbage")
    found = source.sample(SECOND)
    assert found == {"mem_util_pct": 12.0}
    missing = source.missing()
    assert "implausible" in missing["sm_clock_mhz"]
    assert "implausible" in missing["gpu_util_pct"]
    assert missing["power_w"] == "Not Supported"  # the field had an unknown type, and the board no other way
    assert missing["mem_clock_mhz"] == "GPU is lost"


def test_failures_that_may_pass_are_asked_again_and_said() -> None:
    source, lib = opened("h100_sxm")
    lib.raising = 1.0
    assert source.sample(SECOND) == {}
    lib.raising = 0.0
    assert source.sample(2 * SECOND) == {}  # not at once
    assert set(source.sample(20 * SECOND)) == GPU
    assert all(why.startswith("at times: ") for why in source.missing().values())


def test_the_device_is_found_by_uuid_address_or_index() -> None:
    known = identity("h100_sxm")
    for way in (known, known._replace(uuid=None), DeviceIdentity(None, None, 0), known._replace(uuid="0000")):
        NvmlSource(FakeNvml("h100_sxm"), way)


@pytest.mark.parametrize("wrong", [DeviceIdentity("0000", None, None), DeviceIdentity(None, None, None)])
def test_init_and_shutdown_are_balanced_also_where_the_device_is_not_found(wrong: DeviceIdentity) -> None:
    lib = FakeNvml("h100_sxm")
    with pytest.raises((pynvml.NVMLError, LookupError)):
        NvmlSource(lib, wrong)
    assert lib.open == 0
    source, lib = opened("h100_sxm")
    assert lib.open == 1
    source.close()
    assert lib.open == 0


def test_every_function_and_constant_that_is_used_exists_in_nvidia_ml_py() -> None:
    """The fake answers to any name that it has; this holds nvml.py to the real module."""
    import re
    from pathlib import Path

    from gpudiag.capture.telemetry import nvml

    text = Path(nvml.__file__).read_text()
    names = set(re.findall(r'(?:lib\.|")(nvml[A-Z]\w+|NVML_[A-Z_]+)', text))
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []

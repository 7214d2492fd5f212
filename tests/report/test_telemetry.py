"""How telemetry reads: calm where nothing was held down, plain where something was."""

from __future__ import annotations

import msgspec
from rendered import render_html, render_markdown, render_text
from report_sample import HOSTILE
from report_sample import report as sample

from gpudiag.model.hardware import ClockEvent, ColumnRange, Energy, Telemetry
from gpudiag.model.report import ReportData, decode_report, encode_report
from gpudiag.report import data_quality, telemetry

ENERGY = Energy(
    joule_per_step=31.24, joule_per_sample=0.488, mean_power_w=412.3, steps=1204, duration_ns=91 * 10**9, of="unprofiled steps",
    provenance="counter", uncertain_share=0.001,
)  # fmt: skip
CALM = Telemetry(
    source="nvml",
    interval_ns=50_000_000,
    samples=1800,
    over="analysed steps",
    columns={
        "sm_clock_mhz": ColumnRange(1965, 1980, 1980, 20, "MHz"),
        "rss_bytes": ColumnRange(4e9, 5e9, 5.2e9, 4, "B"),
        "pcie_link_gen": ColumnRange(1, 5, 5, 4, ""),
        "pcie_link_width": ColumnRange(16, 16, 16, 4, ""),
        "pcie_rx_bytes_per_s": ColumnRange(0, 1e9, 9.2e9, 4, "B/s"),
        "ecc_uncorrected": ColumnRange(0, 0, 0, 1, ""),
    },
    clock_events=(ClockEvent("GPU Idle", 0.05, False),),
    throttle_share=0.0,
    rss_growth_share=0.01,
    limits={"max_sm_clock_mhz": 1980, "max_pcie_link_gen": 5, "max_pcie_link_width": 16},
)


def report(found: Telemetry | None = CALM, energy: Energy | None = ENERGY) -> ReportData:
    return msgspec.structs.replace(sample(), telemetry=found, energy=energy)


def said(found: Telemetry | None = CALM, energy: Energy | None = ENERGY) -> dict[str, str]:
    return dict(telemetry.list_telemetry(found, energy))


def changed(**fields: object) -> Telemetry:
    return msgspec.structs.replace(CALM, **fields)


def test_a_run_that_nothing_held_back_has_two_calm_lines() -> None:
    assert said() == {
        "energy": "31.2 J a step, 488 mJ a sample, 412 W on average (by the device's energy counter, over 1,204 unprofiled steps).",
        "clocks": "SM clock 1,980 of 1,980 MHz; nothing held it down.",
    }
    assert said(None, None) == {}


def test_what_held_the_clock_down_is_named() -> None:
    events = (ClockEvent("SW Power Cap", 0.12, True), ClockEvent("GPU Idle", 0.05, False), ClockEvent("HW Slowdown", 0.004, True))
    found = said(
        changed(clock_events=events, throttle_share=0.12, columns=CALM.columns | {"sm_clock_mhz": ColumnRange(1300, 1410, 1980, 20, "MHz")})
    )
    assert found["clocks"] == "SM clock 1,410 of 1,980 MHz; held down 12 % of the time (SW Power Cap 12 %)."


def test_a_slow_link_errors_growing_memory_and_other_load_are_said() -> None:
    columns = CALM.columns | {
        "pcie_link_gen": ColumnRange(1, 3, 3, 4, ""), "xid_events": ColumnRange(0, 2, 2, 4, ""),
        "system_cpu_util_pct": ColumnRange(80, 90, 99, 9, "%"), "cpu_util_pct": ColumnRange(90, 100, 110, 9, "%"),
    }  # fmt: skip
    found = said(changed(columns=columns, rss_growth_share=0.4, notes={"xid_events": "latest: Xid 79"}, limits=CALM.limits | {"cpus": 4}))
    assert found["link"] == "The PCIe link was 3.0 x16 at best, where 5.0 x16 is possible: 25 % of its rate."
    assert found["device errors"].startswith("2 Xid errors (latest: Xid 79)")
    assert found["memory"] == "Resident memory of the process grew by 40 % in the second half of the run, to 5.20 GB."
    assert found["other load"] == "Other programs kept 65 % of the machine's CPUs busy meanwhile."


def test_ecc_errors_alone_point_to_the_system_log() -> None:
    found = said(changed(columns=CALM.columns | {"ecc_uncorrected": ColumnRange(0, 1, 1, 4, "")}))
    assert found["device errors"] == "1 uncorrected ECC error during the run: see the system log."


def test_what_is_known_for_a_part_of_the_time_says_so() -> None:
    assert said(changed(throttle_covered_share=0.004))["clocks"] == (
        "SM clock 1,980 of 1,980 MHz; nothing held it down while it was sampled (known for <1 % of the time)."
    )
    events = (ClockEvent("SW Power Cap", 0.12, True),)
    found = said(changed(clock_events=events, throttle_share=0.12, throttle_covered_share=0.3))
    assert found["clocks"].endswith("held down 12 % of the time (known for 30 % of it) (SW Power Cap 12 %).")


def test_peaks_at_the_observed_clock_say_so() -> None:
    made = report()
    assert made.device is not None
    scaled = msgspec.structs.replace(made.device, provenance="derived", source="a data sheet; peaks scaled by SM clock 1,410 / 1,980 MHz")
    line = data_quality.format_device(msgspec.structs.replace(made, device=scaled))
    assert line.endswith(": published peak rates, scaled to the clock that was observed.")


def test_unknown_energy_is_explained_on_a_gpu_and_no_topic_on_a_cpu() -> None:
    unknown = Energy(reason="the device does not tell its power (Not Supported)")
    assert said(energy=unknown)["energy"] == "Unavailable: the device does not tell its power (Not Supported)."
    assert "energy" not in said(changed(source="psutil"), unknown)
    assert said(changed(columns={}, missing={"sm_clock_mhz": "Not Supported"}))["clocks"] == "SM clock unavailable: Not Supported."


def test_the_figures_stand_in_every_format() -> None:
    made = report()
    page, page_md = render_html(made), render_markdown(made)
    for output in (render_text(made), page, page_md):
        assert "nothing held it down" in " ".join(output.split())
    assert "| SM clock | 1,965 MHz | 1,980 MHz | 1,980 MHz |" in page_md
    assert "9.20 GB/s" in page_md
    assert "1,800 samples in the whole run" in page
    assert decode_report(encode_report(made)) == made
    assert "Clocks, power and load" not in render_markdown(report(None, None))


def test_hostile_reasons_are_cleaned() -> None:
    for hostile in HOSTILE:
        found = changed(
            columns={"xid_events": ColumnRange(0, 1, 1, 1, "")}, missing={"sm_clock_mhz": hostile}, notes={"xid_events": hostile}
        )
        made = report(found, Energy(reason=hostile))
        shown = render_text(made)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "<script>alert(1)" not in render_html(made)

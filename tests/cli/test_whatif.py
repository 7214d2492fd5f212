"""`gpudiag whatif` and `gpudiag export`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import handmade as h
import pytest

import gpudiag
from gpudiag.cli.completion import complete_device


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return h.write(tmp_path / "trace.json", *h.PRODUCTS)


@pytest.fixture
def on_a100(tmp_path: Path) -> Path:
    return h.write(tmp_path / "a100.json", *h.PRODUCTS, deviceProperties=[h.A100_PROPERTIES])


def test_another_device_is_predicted_with_its_interval_and_its_limits(command, on_a100: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = command("whatif", on_a100, "--device", "H200", "--json", target)
    assert result.code == 0, result.err
    for told in ("A100 SXM4 80 GB", "H200 SXM", "A prediction, no bound", "Measured on", "What it cannot know"):
        assert told in result.out
    found = json.loads(target.read_text())["projection"]
    assert found["target_id"] == "h200-sxm"
    assert 0 < found["low_ns"] <= found["then_ns"] <= found["high_ns"]
    assert str(gpudiag.whatif(str(on_a100), device="H200")).strip() == result.out.strip()


def test_shells_complete_devices_by_id_and_by_name() -> None:
    assert ("h200-sxm", "H200 SXM") in complete_device("h200")
    assert "rtx-3090" in {row for row, _ in complete_device("RTX 3090")}


def test_settings_hold_on_the_other_device_too(on_a100: Path) -> None:
    found = [gpudiag.whatif(str(on_a100), settings, device="H200").projection for settings in ((), ("host=0.5",))]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].then_ns < found[0].then_ns


def test_what_cannot_be_predicted_is_one_line(command, on_a100: Path, tmp_path: Path) -> None:
    products = [h.op("aten::mm", start + 10, start + 60, [[64, 64], [64, 64]]) for start in (0, 100, 200)]
    nameless = h.write(tmp_path / "nameless.json", *h.PRODUCTS)
    on_cpu = h.write(tmp_path / "cpu.json", *h.steps(0, 100, 200, 300), *products)
    shapeless = [
        *h.steps(0, 100, 200),
        *(event for k in (0, 1) for event in (h.call(100 * k + 5, k + 1), h.kernel(100 * k + 10, 100 * k + 60, k + 1))),
    ]
    unknown = h.write(tmp_path / "unknown.json", *shapeless, deviceProperties=[h.A100_PROPERTIES])
    for path, device, why in (
        (on_a100, "a100-sxm4-80gb", "recorded on that device"),
        (nameless, "H200", "peaks of the device that recorded"),
        (on_cpu, "H200", "on a CPU"),
        (unknown, "H200", "neither FLOPs nor bytes are known"),
    ):
        result = command("whatif", path, "--device", device)
        assert result.code == 0, result.err
        assert why in " ".join(result.out.split())
        assert result.out.startswith("No what-ifs: nothing can be predicted for the ")
        assert len(result.out.strip().splitlines()) <= 2


def test_the_table_goes_to_stdout_and_the_whole_result_to_json(command, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = command("whatif", trace, "--json", target)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("Replay of ")
    assert any(line.startswith("host=0.5") for line in lines)
    assert "\x1b" not in result.out
    found = json.loads(target.read_text())
    assert found["trust"]["error_share"] >= 0
    assert [row["name"] for row in found["what_ifs"]]


def test_what_is_written_fits_the_schema(command, trace: Path, tmp_path: Path) -> None:
    """Every key of the file stands in the schema, and every key that must be there is."""
    printed = command("schema", "whatif")
    assert printed.code == 0
    schema = json.loads(printed.out)
    assert command("whatif", trace, "--json", tmp_path / "out.json").code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    types = {name: schema["$defs"][name] for name in ("WhatIfs", "WhatIf", "ReplayTrust", "ReplayedStep")}
    assert schema["$ref"] == "#/$defs/WhatIfs"
    parts = {"WhatIfs": [found], "WhatIf": found["what_ifs"], "ReplayTrust": [found["trust"]], "ReplayedStep": found["trust"]["steps"]}
    for name, rows in parts.items():
        assert rows, name
        for row in rows:
            assert set(types[name]["required"]) <= set(row) <= set(types[name]["properties"]), name


def test_settings_are_applied_together(command, trace: Path) -> None:
    result = command("whatif", trace, "--set", "kernel:gemm=0.5", "--set", "host=0.5")
    assert result.code == 0, result.err
    assert "kernel:gemm=0.5, host=0.5" in result.out


def test_the_result_of_the_function_prints_as_the_command_does(command, trace: Path) -> None:
    assert str(gpudiag.whatif(str(trace), ["host=0"])).strip() == command("whatif", trace, "--set", "host=0").out.strip()


def test_the_list_names_every_what_if_and_all_that_apply_are_in_it(command, trace: Path) -> None:
    listed = command("whatif", "--list")
    assert listed.code == 0, listed.err
    names = {line.split("  ")[0] for line in listed.out.splitlines() if line[:1].isalpha()}
    assert {"launch=0", "fused", "kernel:NAME=0.5", "copies=overlapped"} <= names
    shown = {line.split("  ")[0] for line in command("whatif", trace).out.splitlines() if "=" in line.split("  ")[0]}
    assert shown
    assert shown <= names


def test_no_replay_is_said_and_is_no_failure(command, tmp_path: Path) -> None:
    path = h.write(tmp_path / "trace.json", *h.steps(0, 100, 200), h.kernel(10, 50, None))
    result = command("whatif", path)
    assert result.code == 0
    assert result.out.startswith("No what-ifs: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("whatif", "TRACE", "--set", "lunch=0"), "no such what-if"),
        (("whatif", "TRACE", "--set", "loader=0"), "does not apply"),
        (("whatif", "TRACE", "--set", "launch=0", "--set", "launch=0.5"), "launch is given more than once"),
        (("whatif", "TRACE", "--json", "x.txt"), "the format is not known"),
        (("whatif", "TRACE", "--device", "MI30X"), "did you mean 'MI300X'?"),
        (("whatif", ""), "PATH is empty"),
        (("whatif", "missing.json"), "does not exist"),
        (("export", "perfetto", "TRACE", "-o", "TRACE"), "will not overwrite"),
        (("export", "perfetto", "TRACE", "-o", "x.txt"), "the format is not known"),
        (("export", "csv", "TRACE", "-o", "TRACE"), "it is a file"),
        (("export", "parquet", "missing.json", "-o", "x"), "does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(command, trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = command(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_perfetto_writes_a_document_with_both_and_with_the_overlay_alone(command, trace: Path, tmp_path: Path) -> None:
    both, alone = tmp_path / "both.json", tmp_path / "alone.json"
    assert command("export", "perfetto", trace, "-o", both).code == 0
    assert command("export", "perfetto", trace, "-o", alone, "--overlay-only").code == 0
    count = {path: len(json.loads(path.read_text())["traceEvents"]) for path in (trace, both, alone)}
    assert count[both] == count[trace] + count[alone]


def test_tables_are_written_into_a_new_folder(command, trace: Path, tmp_path: Path) -> None:
    result = command("export", "parquet", trace, "-o", tmp_path / "tables")
    assert result.code == 0
    assert (tmp_path / "tables" / "kernels.parquet").is_file()

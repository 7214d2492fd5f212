"""What `gpudiag doctor` says of machines that are made up: files of a system, answers of torch and NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gpudiag.doctor import checks as doctor
from gpudiag.doctor import machine as looking
from gpudiag.doctor.checks import CHECKS, examine
from gpudiag.doctor.machine import Check, ObservedMachine, ProbeAnswers, run_probe
from gpudiag.hardware.peaks_cache import build_peaks_key, store_peaks
from gpudiag.model.bundle import Machine
from gpudiag.model.hardware import Device

MACHINE = {"python": "3.11.7", "torch": "2.13.0", "cpu": "some CPU", "isa": "AVX2"}
VERSIONS = {"version": "2.13.0", "cuda": "12.8", "hip": None, "threads": 8, "kineto": True, "triton": True}
GPU = {"available": True, "why": "", "devices": ["NVIDIA H100 80GB HBM3"], "memory_bytes": 85_000_000_000}
TORCH = {
    "versions": VERSIONS, "machine": {"machine": MACHINE}, "gpu": GPU,
    "device": {"device": {"name": "NVIDIA H100 80GB HBM3"}}, "profile": {"events": 9, "device_events": 2},
}  # fmt: skip
BOARD = {"mig": False, "persistence": True}
NVML = {"nvml": {"driver": "570.86.15"}, "modes": {"devices": [BOARD]}}


def _seen(
    root: Path, torch: dict[str, Any] | None = None, nvml: dict[str, Any] | None = None, files: dict[str, str] | None = None
) -> ObservedMachine:
    """Return a machine with these answers and files."""
    found = ObservedMachine(root, environ={})
    found.__dict__["children"] = {
        "torch": ProbeAnswers(torch or {}, "" if torch else "gone"),
        "nvml": ProbeAnswers(nvml or {}, "" if nvml else "gone"),
    }
    for name, text in (files or {}).items():
        found.path(name).parent.mkdir(parents=True, exist_ok=True)
        found.path(name).write_text(text)
    return found


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions that count as installed, for the test to change."""
    found: dict[str, str | None] = {
        "gpudiag": "0.1", "torch": "2.13.0", "scipy": "1.17", "nvtx": "0.2", "nvidia-ml-py": "13.0", "triton": "3.5", "dash": "4.0",
        "waitress": "3.0", "distributed": "2026.8", "mcp": "2.3",
    }  # fmt: skip
    monkeypatch.setattr(doctor, "find_version", found.get)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: [])
    monkeypatch.setattr(doctor, "_finds_header", lambda *_: True)
    return found


def _with(facts: dict[str, Any], stage: str, **changed: Any) -> dict[str, Any]:
    return {**facts, stage: {**facts[stage], **changed}}


NVIDIA = {"/proc/driver/nvidia/version": "NVRM"}


def test_a_machine_on_which_all_is_well_has_no_failure(tmp_path: Path) -> None:
    found = examine(["gpu", "train", "telemetry"], _seen(tmp_path, TORCH, NVML, NVIDIA))
    assert found.failed == ()
    assert found.verdict.startswith("trainings on the GPU can be recorded and analysed")
    by_name = {check.name: check for check in found.checks}
    assert len(by_name) == len(CHECKS)
    assert by_name["GPU"].found == "1 x NVIDIA H100 80GB HBM3, 85.0 GB"
    assert by_name["telemetry"].found.startswith("NVML of driver 570.86.15")
    assert {by_name[name].status for name in ("GPU", "kernels in recordings", "telemetry", "GPU mode")} == {"ok"}


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (_with(_with(TORCH, "versions", cuda=None), "gpu", available=False), "built without CUDA"),
        (_with(TORCH, "gpu", available=False, why="The NVIDIA driver on your system is too old"), "too old"),
        ({"versions": VERSIONS}, "gone"),  # the driver took the child along
    ],
)
def test_a_gpu_that_torch_does_not_reach_fails(tmp_path: Path, torch: dict[str, Any], words: str) -> None:
    seen = _seen(tmp_path, None, NVML, NVIDIA)
    seen.__dict__["children"]["torch"] = ProbeAnswers(torch, "gone")
    found = CHECKS["GPU"](seen)
    assert found.status == "missing"
    assert words in found.found
    assert found.costs
    assert found.fix
    assert "GPU" in examine([], seen).failed


def test_a_gpu_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    """Without a driver there is nothing to check, and no failure but where a GPU was asked for."""
    without = _with(_with(TORCH, "gpu", available=False), "profile", device_events=0)
    assert examine([], _seen(tmp_path, without)).failed == ()
    assert examine(["gpu"], _seen(tmp_path, without)).failed == ("GPU", "kernels in recordings")


def test_a_test_recording_that_does_not_come_to_its_end_is_not_taken_for_one(tmp_path: Path) -> None:
    silent = {stage: facts for stage, facts in TORCH.items() if stage != "profile"}
    assert examine([], _seen(tmp_path, silent)).failed == ()
    assert "torch.profiler" in examine(["train"], _seen(tmp_path, silent)).failed
    broken = {**TORCH, "profile": {"error": "RuntimeError: no"}}
    assert "torch.profiler" in examine([], _seen(tmp_path, broken)).failed


def test_a_gpu_that_is_hidden_is_called_so(tmp_path: Path) -> None:
    seen = _seen(tmp_path, _with(TORCH, "gpu", available=False, why="No CUDA GPUs are available"), NVML, NVIDIA)
    seen.environ = {"CUDA_VISIBLE_DEVICES": ""}
    assert CHECKS["GPU"](seen).fix == "unset CUDA_VISIBLE_DEVICES, which hides it"


def test_recordings_without_kernels_fail(tmp_path: Path) -> None:
    found = CHECKS["kernels in recordings"](_seen(tmp_path, _with(TORCH, "profile", device_events=0), NVML, NVIDIA))
    assert (found.status, found.needs) == ("missing", ("gpu",))
    assert "CUPTI" in found.found
    amd = _seen(tmp_path / "amd", _with(TORCH, "profile", device_events=0), files={"/dev/kfd": ""})
    assert "roctracer" in CHECKS["kernels in recordings"](amd).found
    assert "CUPTI" not in CHECKS["kernels in recordings"](amd).fix


def _telemetry(seen: ObservedMachine) -> tuple[str, str]:
    found = CHECKS["telemetry"](seen)
    return found.status, found.found


def test_telemetry_says_what_it_lacks(tmp_path: Path, installed: dict[str, str | None]) -> None:
    assert _telemetry(_seen(tmp_path, TORCH, NVML, NVIDIA)) == ("ok", "NVML of driver 570.86.15")
    assert _telemetry(_seen(tmp_path, TORCH, None, NVIDIA)) == ("missing", "NVML does not answer: gone")
    installed["nvidia-ml-py"] = None
    assert _telemetry(_seen(tmp_path, TORCH, NVML, NVIDIA)) == ("missing", "nvidia-ml-py is not installed")
    assert _telemetry(_seen(tmp_path / "other")) == ("not applicable", "no driver of a GPU is loaded")
    assert _telemetry(_seen(tmp_path / "amd", files={"/dev/kfd": ""}))[0] == "limited"


def test_modes_of_the_gpu(tmp_path: Path) -> None:
    for changed, words in (({"mig": True}, "MIG is on"), ({"persistence": False}, "persistence mode is off")):
        nvml = {**NVML, "modes": {"devices": [{**BOARD, **changed}]}}
        assert CHECKS["GPU mode"](_seen(tmp_path, TORCH, nvml, NVIDIA)).found == words


def test_more_threads_than_the_container_grants(tmp_path: Path) -> None:
    for files, granted in (
        ({"/sys/fs/cgroup/cpu.max": "200000 100000"}, 2), ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1.5),
    ):  # fmt: skip
        found = CHECKS["processors"](_seen(tmp_path / str(granted), TORCH, files=files))
        assert found.status == "limited"
        assert f"the container grants {granted:g}" in found.found
        assert f"OMP_NUM_THREADS={max(1, int(granted))}" in found.fix
    bare = CHECKS["processors"](_seen(tmp_path / "bare", _with(TORCH, "versions", threads=10_000)))
    assert bare.status == "limited"
    assert "container" not in bare.costs
    few = _with(TORCH, "versions", threads=1)
    for text in ("max 100000", "", "nonsense", "-1 0"):
        assert CHECKS["processors"](_seen(tmp_path / "free", few, files={"/sys/fs/cgroup/cpu.max": text})).status == "ok"


def test_shared_memory_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen(tmp_path)
    for total, status in ((64 << 20, "limited"), (8 << 30, "ok")):
        monkeypatch.setattr(seen, "disk", lambda _, total=total: (total, total))
        assert CHECKS[doctor.SHARED_MEMORY](seen).status == status
    monkeypatch.setattr(seen, "disk", lambda _: None)
    assert CHECKS[doctor.SHARED_MEMORY](seen).status == "not applicable"


CPU0 = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


@pytest.mark.parametrize(
    ("check", "files", "status", "words"),
    [
        ("CPU frequency", {CPU0: "powersave\n"}, "limited", "powersave"),
        ("CPU frequency", {CPU0: "performance\n"}, "ok", "performance"),
        ("CPU frequency", {}, "not applicable", "virtual machine"),
        ("clock", {CLOCK: "hpet\n"}, "limited", "hpet"),
        ("clock", {CLOCK: "tsc\n"}, "ok", "tsc"),
    ],
)
def test_files_of_the_system(tmp_path: Path, check: str, files: dict[str, str], status: str, words: str) -> None:
    found = CHECKS[check](_seen(tmp_path, files=files))
    assert found.status == status
    assert words in found.found


def test_libraries_below_their_lower_bound_fail(tmp_path: Path, installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = ["polars>=1.30", "rich>=13.7", "numpy>=1.26", 'tomli>=2; python_version < "3.11"', "torch>=9; extra == 'train'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: asked_for)
    installed |= {"polars": "1.29.9", "numpy": "1.26.0", "rich": None, "tomli": "2.0"}
    found = examine([], _seen(tmp_path, TORCH))
    assert "gpudiag's libraries" in found.failed
    assert found.checks[0].found == "polars 1.29.9 is older than 1.30; rich is not installed"
    installed |= {"polars": "1.30", "rich": "14.0.0rc1"}
    assert CHECKS["gpudiag's libraries"](_seen(tmp_path)).status == "ok"


def test_an_installation_for_analysis_is_no_failure(tmp_path: Path, installed: dict[str, str | None]) -> None:
    installed["torch"] = None
    found = examine([], _seen(tmp_path))
    assert found.failed == ()
    assert "recordings can be analysed" in found.verdict
    assert "torch" in examine(["train"], _seen(tmp_path)).failed
    assert [check.name for check in found.checks if check.status == "missing"] == ["torch"]


@pytest.mark.parametrize(
    ("need", "package"), [("dashboard", "dash"), ("mcp", "mcp"), ("cluster", "distributed"), ("telemetry", "nvidia-ml-py")]
)
def test_what_was_asked_for_fails_where_it_is_missing(tmp_path: Path, installed: dict[str, str | None], need: Any, package: str) -> None:
    installed[package] = None
    seen = _seen(tmp_path, TORCH, NVML, NVIDIA)
    assert examine([], seen).failed == ()
    assert examine([need], seen).failed == (need,)


def test_peaks_that_were_measured_have_an_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = _seen(tmp_path, TORCH)
    assert CHECKS["measured peaks"](seen).fix.startswith("gpudiag calibrate")
    device = Device(id="x", name="x", kind="gpu", provenance="measured", source="")
    key = build_peaks_key(Machine(**MACHINE), threads=8, gpu="NVIDIA H100 80GB HBM3")  # type: ignore[arg-type]
    store_peaks(device, key)
    assert CHECKS["measured peaks"](seen).found == "of this device, measured today"
    assert CHECKS["measured peaks"](_seen(tmp_path)).status == "unknown"


def test_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = _seen(tmp_path)
    for free, status in ((1 << 20, "missing"), (1 << 30, "limited"), (1 << 40, "ok")):
        monkeypatch.setattr(seen, "disk", lambda _, free=free: (1 << 41, free))
        assert CHECKS["place for recordings"](seen).status == status
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert CHECKS["place for recordings"](seen).status == "missing"


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    found = CHECKS["C++ compiler"](_seen(tmp_path))
    assert (found.status, found.needs) == ("missing", ("compile",))
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "find_version", lambda _: "1")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    for lacking, status in (("Python.h", "missing"), ("omp.h", "limited"), ("none", "ok")):
        monkeypatch.setattr(doctor, "_finds_header", lambda _, header, lacking=lacking: header != lacking)
        assert CHECKS["C++ compiler"](_seen(tmp_path)).status == status


def test_a_check_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: ObservedMachine) -> Check:
        raise ZeroDivisionError("odd machine")

    monkeypatch.setattr(doctor, "CHECKS", {"odd": broken, "open files": CHECKS["open files"]})
    found = examine([], _seen(tmp_path))
    assert [check.status for check in found.checks] == ["unknown", "ok"] or found.checks[0].status in {"limited", "unknown"}
    assert any("ZeroDivisionError" in check.found for check in found.checks)


@pytest.mark.slow
def test_a_child_that_hangs_crashes_or_talks_nonsense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = 'printf \'{"stage": "versions", "version": "1"}\\nnonsense\\n[1]\\n{"stage": "gpu"\'; '
    for end, words in (("sleep 60", "no answer within 1 s"), ("kill -11 $$", "signal 11"), ("exit 3", "code 3"), ("exit 0", "")):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{told}{end}\n")
        program.chmod(0o755)
        monkeypatch.setattr(looking.sys, "executable", str(program))
        found = run_probe("torch", 1.0)
        assert words in found.end
        assert found.stages == {"versions": {"version": "1"}}
    monkeypatch.setattr(looking.sys, "executable", str(tmp_path / "nowhere"))
    assert "no process could be started" in run_probe("torch", 1.0).end


@pytest.mark.slow
def test_the_probes_answer_here() -> None:
    pytest.importorskip("torch")
    found = run_probe("torch", 300.0)
    assert found.end == ""
    assert found.get("versions", "kineto") is True
    assert found.get("profile", "events") > 0
    assert found.get("machine", "machine")["python"] == sys.version.split()[0]

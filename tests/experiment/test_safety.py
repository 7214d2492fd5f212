"""Programs that fail, leak, save or write, as arms of real comparisons: each ends as a verdict, with nothing left and nothing changed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gpudiag.experiment import guard, isolation
from gpudiag.experiment.compare import compare_arms
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.probe import probe_program
from gpudiag.hardware.cpu import read_cpu_model
from gpudiag.model.experiment import FixCall

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")]

HABITS = str(Path(__file__).with_name("habits.py"))
ONE = Design(looks=(1,), blocks=2, block_s=0.05, warm_limit_s=2.0, block_saves=True)


def arm(name: str, *arguments: str, cwd: Path | None = None, fixes: tuple[FixCall, ...] = ()) -> Arm:
    return Arm(name=name, command=(sys.executable, HABITS, *arguments), cwd=cwd, fixes=fixes)


def torchrun(name: str, *arguments: str) -> Arm:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29500", HABITS, *arguments)
    return Arm(name=name, command=command)


def left() -> set[int]:
    """Processes of experiments that this process began, or that nobody owns any more."""
    found = set()
    for pid in guard.Family("").members():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.add(pid)
    return found


def test_an_arm_that_leaks_is_ended_before_the_machine_is_full() -> None:
    limited = Design(looks=(1,), blocks=20, block_s=1.0, warm_limit_s=2.0, memory_limit_bytes=700 << 20)
    found = compare_arms(arm("plain"), arm("leaking", "--leak"), limited)
    assert (found.verdict, found.reason) == ("failed", "oom")
    assert found.notes[0].startswith("leaking was ended: its processes took")
    assert "more than the limit" in found.notes[0]
    assert not left()


def test_a_program_that_saves_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "model.pt"
    kept.write_bytes(b"a checkpoint of a real run")
    found = compare_arms(arm("a", "--save", str(kept), cwd=tmp_path), arm("b", "--save", str(kept), cwd=tmp_path), ONE)
    assert found.pairs == 1
    assert kept.read_bytes() == b"a checkpoint of a real run"
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert not left()


def test_the_probe_tells_what_a_program_writes(tmp_path: Path) -> None:
    found = probe_program(arm("a", "--save", "model.pt", "--write", "log.txt", cwd=tmp_path), ONE)
    saved, written = found.side_effects
    assert saved.startswith("torch.save (")
    assert saved.endswith("held back)")
    assert written == "writes log.txt"
    assert not (tmp_path / "model.pt").exists()
    assert (found.device, found.steps_marked_by, found.samples_per_step) == (read_cpu_model(), "SGD", 32.0)
    assert found.warm_steps >= 10
    assert 0 < found.step_ns < 1e9
    assert found.peak_bytes is not None
    assert found.peak_bytes > 50 << 20
    assert not left()


def test_an_overlay_keeps_every_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, scratch = tmp_path / "project", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (folder / "log.txt").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    (checked := tmp_path / "checked").mkdir()
    if isinstance(why := isolation._find_overlay(folder, checked), str):
        pytest.skip(f"no overlay here: {why}")
    boxed = Design(looks=(1,), blocks=2, block_s=0.05, warm_limit_s=2.0, sandbox="overlay")
    found = probe_program(arm("a", "--save", "model.pt", "--write", "log.txt", cwd=folder), boxed)
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == {"log.txt": "mine"}
    assert "thrown away" in found.notes[0]
    assert found.side_effects[0].startswith("torch.save (")
    assert list(scratch.iterdir()) == []
    assert not left()


@pytest.mark.long
def test_ranks_of_two_distributed_arms_live_beside_each_other_and_leave_by_themselves() -> None:
    begun = time.monotonic()
    found = compare_arms(torchrun("a"), torchrun("b"), ONE)
    assert found.pairs == 1, found.notes
    assert found.unit == "samples"
    assert time.monotonic() - begun < 120
    assert not left()


def test_a_rank_that_is_killed_ends_the_arm_with_all_its_ranks() -> None:
    found = compare_arms(torchrun("a", "--kill-rank", "1"), torchrun("b"), Design(looks=(1,), warm_steps=60))
    assert (found.verdict, found.reason) == ("failed", "crash")
    assert found.notes[0].startswith("a ended with exit code")
    assert found.notes[-1] == "the program fails without any change"
    assert not left()


def test_a_fix_that_does_not_suit_the_program_is_not_applied() -> None:
    found = compare_arms(arm("plain"), arm("changed", fixes=(FixCall("channels-last"),)), ONE)  # the model has no convolution
    assert (found.verdict, found.ratio, found.evidence) == ("not_applied", None, ())
    assert found.notes[0].startswith("channels-last")
    assert not left()


def test_a_full_disk_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpudiag.experiment.compare.LiveArm", full)
    found = compare_arms(arm("a"), arm("b"), ONE)
    assert (found.verdict, found.reason) == ("failed", "crash")
    assert "No space left on device" in found.notes[0]
    assert not left()

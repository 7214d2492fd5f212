"""The order of a pair, and what becomes of arms that do not fit, hold nothing, or run on a device that throttles. The arms are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpudiag.capture.environment import DeviceIdentity
from gpudiag.errors import InputError
from gpudiag.experiment import compare as pairs
from gpudiag.experiment import gpu_state
from gpudiag.experiment.arm import ArmError, LiveArm
from gpudiag.experiment.compare import Pairs
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.gpu_state import GpuSample, GpuState
from gpudiag.experiment.trial.protocol import Block, Evidence, Warmed
from gpudiag.model.experiment import Pair

ARMS = (Arm(name="A", command=("a",)), Arm(name="B", command=("b",)))
DESIGN = Design(blocks=4)
GIB = 1 << 30


class Played:
    """A machine on which arms are alive; `happened` is what was done, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.alive: set[str] = set()
        self.together = 0
        self.row: Callable[[str], Warmed] = lambda _: Warmed(10, 1_000_000_000, True, device="cpu")
        self.block: Callable[[str, int], Block] = lambda name, steps: Block(steps, steps * 10**9, steps * 32)
        self.fails: Callable[[str], ArmError | None] = lambda _: None

    def live_arm(self, arm: Arm, design: Design, folder: Path, mark: str, *, gpu: gpu_state.GpuWatch) -> Any:
        return _Live(self, arm, design, gpu)

    def turns(self) -> list[str]:
        return [word[-1] for word in self.happened if word.startswith("block")]


class _Live(LiveArm):
    def __init__(self, played: Played, arm: Arm, design: Design, gpu: gpu_state.GpuWatch) -> None:
        self.played, self.arm, self._design, self._gpu = played, arm, design, gpu
        self._limit: Any = SimpleNamespace(peak_bytes=GIB)
        self._control: Any = SimpleNamespace(done=0, give=self._give)
        self.evidence = [Evidence("bf16", "bfloat16")] if arm.name == "B" else []
        self.blocks, self.states, self._frozen = [], [], set()
        played.alive.add(arm.name)
        played.together = max(played.together, len(played.alive))
        played.happened.append(f"start {arm.name}")

    def wait_until_warm(self) -> None:
        error = self.played.fails(self.arm.name)
        if error is not None:
            raise error
        self.warmed, self.start_s = self.played.row(self.arm.name), 3.0

    def _give(self, steps: int) -> None:
        self.played.happened.append(f"block {self.arm.name}")
        self.block = self.played.block(self.arm.name, steps)

    def _wait(self, over: object, silent_limit_s: float) -> None:
        assert self._gpu is not None
        self._gpu.look()

    def _take_row(self, kind: object) -> Any:
        return self.block

    def freeze(self) -> None:
        """Nothing runs."""

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.played.alive.discard(self.arm.name)


class Device(gpu_state.GpuWatch):
    """Plays the device: `states` in the order of the blocks, then a steady one."""

    def __init__(self, states: list[GpuState] | None = None, strangers: set[int] | None = None) -> None:
        super().__init__(open_=lambda: None)
        self.states, self._strangers = states or [], strangers or set()

    @property
    def strangers(self) -> set[int]:
        return self._strangers

    def end(self) -> GpuState:
        return self.states.pop(0) if self.states else GpuState((GpuSample(1980, 0),), 12.0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    machine = Played()
    monkeypatch.setattr(pairs, "LiveArm", machine.live_arm)
    monkeypatch.setattr(pairs, "measure_spare_bytes", lambda: 100 * GIB)
    return machine


def run(tmp_path: Path, gpu: gpu_state.GpuWatch | None = None, design: Design = DESIGN) -> Pairs:
    return Pairs(ARMS, design, tmp_path, "mark", gpu=gpu or Device())


def test_both_are_alive_and_take_turns_in_abba_order(played: Played, tmp_path: Path) -> None:
    measuring = run(tmp_path)
    first, second = measuring.measure(0), measuring.measure(1)
    assert "".join(played.turns()) == "ABBAABBA" + "BAABBAAB"
    assert played.happened[:2] == ["start A", "start B"]
    assert played.together == 2
    assert first.together
    assert (first.first, first.unit) == ((32.0,) * 4, "samples")
    assert second.first_start_s == 3.0
    assert measuring.evidence == ("bf16: bfloat16",)
    assert measuring.notes == []
    assert not played.alive


def test_peaks_energy_and_faults_are_of_each_arm(played: Played, tmp_path: Path) -> None:
    played.row = lambda _: Warmed(10, 1_000_000_000, True, peak_bytes=9 * GIB, device="cuda", free_bytes=100 * GIB)
    played.block = lambda name, steps: Block(steps, steps * 10**9, steps * 32, 24 if name == "A" else 0, 5 if name == "A" else 7)
    pair = run(tmp_path).measure(0)
    assert (pair.first_peak_bytes, pair.second_peak_bytes) == (5, 7)
    assert pair.first_energy_j == pytest.approx(12.0 / (12 * 32))  # 12 J in a block of 12 steps of 32 samples
    assert (pair.first_faults, pair.second_faults) == (2.0, 0.0)


def test_a_cpu_arm_has_the_memory_of_its_processes(played: Played, tmp_path: Path) -> None:
    pair = run(tmp_path).measure(0)
    assert (pair.first_peak_bytes, pair.second_peak_bytes) == (GIB, GIB)


def test_arms_that_do_not_fit_together_run_one_after_the_other(played: Played, tmp_path: Path) -> None:
    played.row = lambda _: Warmed(10, 1_000_000_000, True, peak_bytes=50 * GIB, device="cuda", free_bytes=30 * GIB)
    measuring = run(tmp_path)
    pair = measuring.measure(0)
    assert played.together == 1
    assert not pair.together
    assert "".join(played.turns()) == "AAAABBBB"
    measuring.measure(1)
    assert "".join(played.turns()[8:]) == "BBBBAAAA"
    (note,) = measuring.notes
    assert note.startswith("one arm at a time")
    assert "53.7 GB and 53.7 GB" in note


def test_an_arm_that_finds_no_memory_beside_the_other_is_tried_alone(played: Played, tmp_path: Path) -> None:
    def fails(name: str) -> ArmError | None:
        return ArmError("oom", "B ended: out of memory", crowded=True) if "A" in played.alive and name == "B" else None

    played.fails = fails
    measuring = run(tmp_path)
    assert not measuring.measure(0).together
    assert "".join(played.turns()) == "AAAABBBB"


def test_an_arm_that_finds_no_memory_alone_has_failed(played: Played, tmp_path: Path) -> None:
    played.fails = lambda name: ArmError("oom", "B: out of memory", crowded=True) if name == "B" else None
    measuring = run(tmp_path)
    with pytest.raises(ArmError, match="B: out of memory"):
        measuring.measure(0)
    assert measuring.notes == []  # it is no matter of both at once
    assert not played.alive


def test_an_arm_over_its_own_limit_is_not_tried_again(played: Played, tmp_path: Path) -> None:
    played.fails = lambda name: ArmError("oom", "over the limit") if name == "B" else None
    with pytest.raises(ArmError, match="over the limit"):
        run(tmp_path).measure(0)
    assert played.happened == ["start A", "start B"]


def test_an_empty_block_voids_the_pair_which_is_measured_once_more(played: Played, tmp_path: Path) -> None:
    blocks = iter([Block(0, 0)])
    played.block = lambda _, steps: next(blocks, Block(steps, steps * 10**9, steps))
    measuring = run(tmp_path)
    pair = measuring.measure(0)
    assert min(pair.first + pair.second) > 0
    assert len(played.turns()) == 16
    assert "measured again" in measuring.notes[0]


def test_a_pair_that_is_void_twice_has_failed(played: Played, tmp_path: Path) -> None:
    played.block = lambda *_: Block(0, 0)
    with pytest.raises(ArmError) as caught:
        run(tmp_path).measure(0)
    assert caught.value.reason == "no_steps"


def test_a_block_pair_in_which_the_gpu_throttled_is_repeated(played: Played, tmp_path: Path) -> None:
    calm, hot = GpuState((GpuSample(1980, 0),)), GpuState((GpuSample(1980, 0x40),))
    # blocks in the order ABBAABBA: the third pair of blocks, A then B, is hot, and one of four may be repeated
    played.block = lambda name, steps: Block(steps, steps * 10**9 * (2 if len(played.turns()) in (5, 6) else 1), steps)
    measuring = run(tmp_path, Device([calm] * 5 + [hot]))
    pair = measuring.measure(0)
    assert "".join(played.turns()) == "ABBAABBA" + "AB"
    assert set(pair.first) == set(pair.second) == {1.0}, "the slow blocks are gone"
    assert "HW Thermal" in measuring.notes[0]


def test_more_than_a_quarter_of_hot_blocks_is_kept_and_said(played: Played, tmp_path: Path) -> None:
    hot = GpuState((GpuSample(1980, 0x8),))
    measuring = run(tmp_path, Device([hot] * 8))
    measuring.measure(0)
    assert len(played.turns()) == 8 + 2
    assert any("was kept" in note for note in measuring.notes)


def test_strangers_on_the_gpu_are_a_reason_to_refuse(played: Played, tmp_path: Path) -> None:
    played.row = lambda _: Warmed(10, 10**9, True, device="cuda", gpu=DeviceIdentity("aa", None, None))
    with pytest.raises(InputError, match=r"other processes compute on this GPU .*: 41"):
        run(tmp_path, Device(strangers={41})).measure(0)
    assert not played.alive
    measuring = run(tmp_path, Device(strangers={41}), Design(blocks=4, shared_ok=True))
    measuring.measure(0)
    assert measuring.notes == ["other processes computed on this GPU (41)"]


def test_many_page_faults_deserve_a_word(played: Played, tmp_path: Path) -> None:
    measuring = run(tmp_path)
    few, many = (Pair((1.0,), (1.0,), "steps", first_faults=faults) for faults in (8.0, 2421.0))
    assert measuring.finish_notes([few]) == ()
    (note,) = measuring.finish_notes([few, many])
    assert note.startswith("2,421 page faults a step")
    assert "--fix malloc" in note


def test_an_arm_that_never_became_steady_marks_the_pair(played: Played, tmp_path: Path) -> None:
    played.row = lambda name: Warmed(10, 10**9, name == "A", device="cpu")
    assert not run(tmp_path).measure(0).steady

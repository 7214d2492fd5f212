"""What a comparison makes of its pairs, without any process: pairs that are taken over, time that is over, arms that fail."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpudiag.experiment import compare as comparing
from gpudiag.experiment.arm import ArmError, BudgetError, EndedError, NotAppliedArmError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.trial.protocol import Over, Warmed
from gpudiag.model.experiment import Comparison, Pair

pytest.importorskip("scipy", reason="scipy is not installed")

FIRST, SECOND = Arm(name="A", command=("a",)), Arm(name="B", command=("b",))


def pair(ratio: float) -> Pair:
    return Pair((100.0,) * 4, (100.0 * ratio,) * 4, "samples")


class Planned:
    """Plays Pairs: what measuring pair after pair gives; an exception is raised."""

    def __init__(self, results: Sequence[Pair | BaseException], notes: tuple[str, ...] = ()) -> None:
        self.results, self.notes = list(results), notes
        self.numbers: list[int] = []
        self.designs: list[Design] = []
        self.arms: tuple[Arm, Arm] | None = None
        self.evidence, self.slow_dtype = ("bf16: bfloat16",), ""

    def __call__(self, arms: tuple[Arm, Arm], design: Design, *_: object) -> Planned:
        self.arms = arms
        self.designs.append(design)
        return self

    def measure(self, number: int) -> Pair:
        self.numbers.append(number)
        result = self.results.pop(0)
        if isinstance(result, ArmError) and self.arms is not None:
            result.arm = self.arms[0] if result.message.startswith("A") else self.arms[1]
        if isinstance(result, BaseException):
            raise result
        return result

    def finish_notes(self, pairs: Sequence[Pair]) -> tuple[str, ...]:
        return self.notes


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def experiment() -> Iterator[tuple[Path, str]]:
        yield tmp_path, "mark"

    monkeypatch.setattr(comparing, "open_experiment", experiment)


def compare(monkeypatch: pytest.MonkeyPatch, plan: Planned, design: Design | None = None, done: Sequence[Pair] = ()) -> Comparison:
    monkeypatch.setattr(comparing, "Pairs", plan)
    return comparing.compare_arms(FIRST, SECOND, design, done=done, on_pair=lambda kept: KEPT.append(kept))


KEPT: list[Pair] = []

CLEAR = [pair(ratio) for ratio in (1.20, 1.22, 1.19, 1.21)]


def test_a_clear_effect_ends_at_the_first_look_and_each_pair_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT.clear()
    found = compare(monkeypatch, Planned([*CLEAR, AssertionError("a fifth pair")]))
    assert (found.verdict, found.pairs, found.over) == ("faster", 4, "pairs")
    assert CLEAR == KEPT
    assert found.evidence == ("bf16: bfloat16",)


def test_an_arm_that_is_too_fast_for_its_script_has_blocks_of_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """249 steps, 10 of them its warm-up: blocks of 1.5 s would take more, eight blocks of 12 steps and what is dropped do not."""
    ended = EndedError("B", Over(249), Warmed(10, 6_000_000, True), Design(), "")
    plan = Planned([ended, *CLEAR])
    found = compare(monkeypatch, plan)
    assert (found.verdict, found.pairs) == ("faster", 4)
    usual, shorter = plan.designs
    assert usual.block_s > 0 == shorter.block_s
    assert shorter.block_steps >= usual.block_steps
    assert f"a pair measures {shorter.blocks} blocks of {shorter.block_steps} steps" in found.notes[-1]
    assert shorter.blocks * (shorter.block_steps + shorter.dropped_steps) <= 249 - 2 * 10
    again = compare(monkeypatch, Planned([ended, EndedError("B", Over(60), ended.warmed, Design(), "")]))
    assert (again.verdict, again.reason) == ("failed", "ended"), "once"
    resumed = Planned([ended, *CLEAR[2:]])
    assert compare(monkeypatch, resumed, done=CLEAR[:2]).pairs == 4
    assert resumed.numbers == [2, 2, 3], "what was kept of shorter blocks stays"


def test_pairs_of_an_earlier_run_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planned(CLEAR[2:])
    found = compare(monkeypatch, plan, done=CLEAR[:2])
    assert plan.numbers == [2, 3]  # their order of starting goes on too
    assert found.measured == tuple(CLEAR)
    assert compare(monkeypatch, Planned([]), done=CLEAR).verdict == "faster"


def test_each_arm_compiles_into_folders_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = Planned(CLEAR)
    compare(monkeypatch, plan)
    assert plan.arms is not None
    folders = [arm.environ["TORCHINDUCTOR_CACHE_DIR"] for arm in plan.arms]
    assert folders == [str(tmp_path / arm / "inductor") for arm in ("first", "second")]


def test_time_that_is_over_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(monkeypatch, Planned([*CLEAR[:3], BudgetError("B")]))
    assert found.verdict != "failed"
    assert found.pairs == 3
    assert "the time was over after 3 pairs" in found.notes
    late = Design(deadline=time.monotonic() - 1)
    nothing = compare(monkeypatch, Planned([]), late)
    assert (nothing.verdict, nothing.reason, nothing.pairs) == ("failed", "timeout", 0)


def test_a_crash_says_whose_it_is_and_keeps_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = compare(
        monkeypatch, Planned([CLEAR[0], CLEAR[1], ArmError("crash", "B ended with exit code 1", "Traceback ...")], ("a note",))
    )
    assert (changed.verdict, changed.reason, changed.pairs) == ("failed", "crash", 2)
    assert changed.notes == ("B ended with exit code 1", "Traceback ...", "a note")
    itself = compare(monkeypatch, Planned([ArmError("crash", "A ended with exit code 1")]))
    assert itself.notes == ("A ended with exit code 1", "the program fails without any change")
    filled = compare(monkeypatch, Planned([ArmError("oom", "A was ended: the machine had 80 MB left", crowded=True)]))
    assert filled.notes[-1].endswith("measure again when more of the machine's memory is free")


def test_a_fix_that_shows_nothing_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(monkeypatch, Planned([NotAppliedArmError("tf32", "no float32 product")]))
    assert (found.verdict, found.reason, found.ratio) == ("not_applied", "", None)
    assert found.notes == ("tf32: no float32 product",)


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(monkeypatch, Planned([OSError(errno.ENOSPC, "No space left on device")]))
    assert (found.verdict, found.reason) == ("failed", "crash")
    assert "No space left on device" in found.notes[0]
    with pytest.raises(OSError, match="something else"):
        compare(monkeypatch, Planned([OSError(errno.EPERM, "something else")]))


def test_arms_that_never_became_steady_claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unsteady = [Pair(one.first, one.second, "samples", steady=False) for one in CLEAR]
    found = compare(monkeypatch, Planned(unsteady), Design(looks=(4,)))
    assert found.verdict == "unstable"
    assert "not steady" in found.notes[-1]

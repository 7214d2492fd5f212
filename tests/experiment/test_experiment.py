"""The course of `gpudiag ab` on a machine of planted effects: what is measured, claimed, checked, kept, resumed and recommended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from fakeab import COMMAND, FOREACH, FUSED, NONE, PREFETCH, STEP_NS, Machine, run, verdicts

from gpudiag.errors import InputError, UsageError
from gpudiag.experiment import experiment as experiment_flow
from gpudiag.experiment import store as experiment_store
from gpudiag.experiment.ab import run_experiment
from gpudiag.experiment.arm import ArmError, EndedError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.plan import Options
from gpudiag.experiment.result import InterruptedExperiment, exit_code
from gpudiag.experiment.trial.protocol import Over, Warmed
from gpudiag.model.experiment import Baseline, Comparison, ExperimentData, FixCall, Outcome, Parity
from gpudiag.report.experiment.results import read_results

pytest.importorskip("scipy", reason="scipy is not installed")

# -- each by itself --------------------------------------------------------------------------------------------------------------


def test_a_fix_that_helps_is_proved_checked_and_becomes_the_recipe(machine: Machine) -> None:
    seen: list[tuple[str, int]] = []
    outcomes: list[Outcome] = []
    found = run(FUSED, tell=lambda name, comparison: seen.append((name, comparison.pairs)), done=outcomes.append)
    assert (found.verdict, found.pairs, found.evidence) == ("faster", 4, (f"{FUSED}: seen",))
    assert found.interval is not None
    assert found.interval[0] < 1.2 < found.interval[1]
    assert found.parity is not None
    assert (found.parity.verdict, machine.checked) == ("same", [(FUSED, "rounding")])
    assert found.memory == pytest.approx(0.8)
    assert found.break_even_steps == pytest.approx(1.0 / (STEP_NS * 1e-9 * (1 - 1 / 1.2)), rel=0.05)  # it starts 1 s later
    assert found.recipe.fixes == (FixCall(FUSED),)
    assert Path("bundle/recipe.toml").read_text().count("[[fix]]") == 1
    assert seen == [(FUSED, count) for count in (1, 2, 3, 4)]
    assert outcomes == list(found.data.experiments)
    assert found.data.complete
    assert found.bundle == Path("bundle")
    assert read_results(Path("bundle"))[0] == (found.data,)
    assert exit_code(found.data) == 0


def test_each_gets_its_own_verdict_and_only_what_was_proved_is_recommended(machine: Machine) -> None:
    found = run(FUSED, NONE, PREFETCH)
    assert verdicts(found) == {FUSED: "faster", NONE: "no_difference", PREFETCH: "slower"}
    assert [name for name, _ in machine.checked] == [FUSED, NONE]
    assert found.recipe.fixes == (FixCall(FUSED),)


def test_nothing_proved_leaves_the_program_as_it_is(machine: Machine) -> None:
    found = run(NONE, PREFETCH)
    assert found.recipe.fixes == ()
    assert not found.recipe.proved
    assert not Path("bundle/recipe.toml").exists()


def test_a_change_that_trains_otherwise_is_no_recipe_and_exits_with_4(machine: Machine) -> None:
    machine.differs = {FUSED}
    found = run(FUSED)
    assert found.verdict == "faster"
    assert (found.recipe.proved, exit_code(found.data)) == (False, 4)


def test_together_is_one_change_with_the_weakest_class(machine: Machine) -> None:
    machine.ratios[f"{FUSED}+{NONE}"] = 1.3
    found = run(FUSED, NONE, combine=True)
    assert verdicts(found) == {f"{FUSED}+{NONE}": "faster"}
    assert machine.checked == [(f"{FUSED}+{NONE}", "rounding")]
    assert machine.arms[f"{FUSED}+{NONE}"].fixes == (FixCall(FUSED), FixCall(NONE))
    assert found.recipe.fixes == (FixCall(FUSED), FixCall(NONE))
    with pytest.raises(InputError, match="cannot be combined"):
        run(FUSED, FOREACH, combine=True)


def test_a_variant_is_another_command_whose_class_the_user_tells(machine: Machine) -> None:
    machine.ratios["long"] = 1.5
    found = run(variants=["long:rounding=args:--batch 64", "long=env:K=V"])
    assert verdicts(found) == {"long": "faster"}
    assert machine.arms["long"].command == (*COMMAND, "--batch", "64")
    assert machine.arms["long"].environ["K"] == "V"
    assert machine.checked == [("long", "rounding")]
    assert found.recipe.changes == ("arguments: --batch 64\nexport K=V",)


def test_fewer_than_four_pairs_prove_nothing(machine: Machine) -> None:
    found = run(FUSED, looks=(2,))
    assert (found.data.experiments[0].over, found.recipe.proved) == ("blocks", False)


def test_what_is_not_applied_or_fails_is_a_result_without_parity(machine: Machine) -> None:
    machine.verdicts = {
        FUSED: Comparison(verdict="not_applied", notes=("no such optimizer",)),
        NONE: Comparison(verdict="failed", reason="crash", notes=("ended with exit code 1",)),
    }
    found = run(FUSED, NONE)
    assert verdicts(found) == {FUSED: "not_applied", NONE: "failed"}
    assert machine.checked == []
    assert exit_code(found.data) == 0
    assert exit_code(run(NONE, output="other").data) == 5


def test_a_program_that_does_not_train_is_said_so_with_what_it_printed(machine: Machine) -> None:
    machine.probe_error = ArmError("crash", "as it is ended with exit code 1", "ValueError: no data")
    found = run(FUSED)
    assert exit_code(found.data) == 5
    assert found.data.notes == ("as it is ended with exit code 1", "ValueError: no data")
    assert machine.compared == []


# -- modes ---------------------------------------------------------------------------------------------------------------------


def test_the_program_against_itself_is_no_difference_and_foretells(machine: Machine) -> None:
    found = run(aa=True)
    assert verdicts(found) == {"A/A": "no_difference"}
    assert found.data.baseline is not None
    assert found.data.baseline.noise_share is not None
    assert 0 < found.data.baseline.noise_share < 0.01
    assert any("4 pairs will show >= " in note for note in found.data.notes)
    assert not found.recipe.proved


def test_probe_only_claims_nothing(machine: Machine) -> None:
    found = run(probe_only=True)
    assert found.data.experiments == ()
    assert machine.compared == [("A/A", (3,), 0)]
    assert found.data.baseline is not None
    assert found.data.baseline.noise_share is not None
    assert any("one comparison takes" in note for note in found.data.notes)
    assert exit_code(found.data) == 0


def test_parity_alone_measures_no_speed(machine: Machine) -> None:
    machine.differs = {NONE}
    found = run(FUSED, NONE, parity_only=True)
    assert machine.compared == []
    assert [one.parity.verdict for one in found.data.experiments if one.parity] == ["same", "differs"]
    assert found.data.experiments[0].ratio is None
    assert not found.recipe.proved


def test_steady_malloc_is_in_both_arms_and_is_said(machine: Machine) -> None:
    found = run(FUSED, steady_malloc=True)
    for name in ("the baseline", FUSED):
        assert "MALLOC_TRIM_THRESHOLD_" in machine.arms[name].environ
    assert "--steady-malloc" in found.data.notes[0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "nothing to try"),
        ({"auto": True, "aa": True}, "exclude each other"),
        ({"auto": True, "variants": ["a=args:--x"]}, "takes no --fix"),
        ({"variants": ["a=args:--x", "fused=env:"]}, "no variant"),
        ({"report": "nowhere.json"}, "No such file"),
        ({"combine": True, "variants": ["a=args:--x", "b=args:--x"]}, "takes one variant"),
    ],
)
def test_what_contradicts_itself_starts_nothing(machine: Machine, asked: dict[str, Any], said: str) -> None:
    with pytest.raises((InputError, UsageError), match=said):
        run(**asked)
    assert machine.probed == 0
    assert not Path("bundle").exists()


def test_a_fix_that_is_not_known_starts_nothing(machine: Machine) -> None:
    with pytest.raises(InputError, match="did you mean 'fused-optimizer'"):
        run("fused-optimiser")
    with pytest.raises(InputError, match="two changes are named"):
        run(FUSED, variants=[f"{FUSED}=args:--x"])
    assert machine.probed == 0


# -- interruptions ---------------------------------------------------------------------------------------------------------------


def interrupted(machine: Machine, at: int, *fixes: str, **options: Any) -> InterruptedExperiment:
    machine.breaks[at] = KeyboardInterrupt()
    with pytest.raises(InterruptedExperiment) as stop:
        run(*fixes, **options)
    return stop.value


def test_ctrl_c_keeps_what_was_measured_and_resume_measures_only_the_rest(machine: Machine) -> None:
    stop = interrupted(machine, 7, FUSED, PREFETCH)  # in the third pair of the second comparison
    assert stop.bundle == Path("bundle")
    assert not stop.result.data.complete
    assert [(one.fix, one.verdict, one.pairs) for one in stop.result.data.experiments] == [(FUSED, "faster", 4), (PREFETCH, ANY, 2)]
    assert stop.result.data.experiments[-1].notes == ("broken off after 2 pairs",)
    assert not stop.result.recipe.proved  # its parity was not checked yet
    assert read_results(stop.bundle)[0] == (stop.result.data,)
    before = machine.pairs
    found = run(resume="bundle")
    assert verdicts(found) == {FUSED: "faster", PREFETCH: "slower"}
    assert machine.compared[-1] == (PREFETCH, (4, 6, 8, 12), 2)
    assert machine.pairs - before == 2
    assert (machine.probed, found.data.complete) == (1, True)
    assert [len(one.measured) for one in found.data.experiments] == [4, 4]
    with pytest.raises(InputError, match="all experiments in it are complete"):
        run(resume="bundle")


def test_resume_takes_the_command_again_but_no_other(machine: Machine) -> None:
    interrupted(machine, 2, FUSED)
    with pytest.raises(InputError, match="begun with other command"):
        run_experiment(("python", "other.py"), options=Options(resume="bundle"))
    with pytest.raises(InputError, match="begun with other fixes"):
        run(NONE, resume="bundle")
    with pytest.raises(InputError, match="begun with other --min-effect"):
        run(resume="bundle", min_effect=0.05)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    with pytest.raises(InputError, match="was begun in"):
        run(resume="../bundle")
    os.chdir("..")
    assert verdicts(run_experiment(COMMAND, fixes=[FUSED], options=Options(resume="bundle"))) == {FUSED: "faster"}


def test_a_budget_that_is_spent_says_what_was_not_measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("gpudiag.experiment.experiment.time.monotonic", lambda: clock[0])
    measure = machine.compare

    def slow(*args: Any, **kwargs: Any) -> Comparison:
        clock[0] += 100.0
        return measure(*args, **kwargs)

    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", slow)
    said: list[str] = []
    found = run(FUSED, NONE, budget_s=100.0, warn=said.append)
    assert verdicts(found) == {FUSED: "faster"}
    assert not found.data.complete
    (line,) = said
    assert "one change may take" in line
    assert "2 min of --budget are left, for 2 changes" in line
    run(FUSED, budget_s=100_000.0, warn=said.append, output="enough")
    assert said == [line]
    assert f"not measured, the budget was spent: {NONE}, parity of {FUSED}" in found.data.notes
    assert any(f"{FUSED} is faster, but no part of the recipe" in note for note in found.data.notes)
    assert not found.recipe.proved
    parity = found.data.experiments[0].parity
    assert parity is not None
    assert (parity.verdict, parity.reason) == ("not_checked", "no time was left")
    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", measure)
    assert verdicts(run(resume="bundle")) == {FUSED: "faster", NONE: "no_difference"}


def test_a_short_script_is_measured_in_fewer_and_shorter_blocks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed, used = Warmed(10, STEP_NS, steady=True), []
    machine.probe_error = EndedError("the baseline", Over(80, None), warmed, Design(), "")
    probe = machine.probe

    def measure(arm: Arm, design: Design, **more: Any) -> Baseline:
        used.append((design.blocks, design.block_steps, design.block_s))
        try:
            return probe(arm, design, **more)
        finally:
            machine.probe_error = None

    monkeypatch.setattr("gpudiag.experiment.probe.probe_program", measure)
    machine.breaks[2] = KeyboardInterrupt()
    with pytest.raises(InterruptedExperiment):
        run(FUSED)
    found = run(resume="bundle")
    assert used == [(6, 12, 1.5), (4, 13, 0.0)]
    assert verdicts(found) == {FUSED: "faster"}
    assert any("a pair measures 4 blocks of 13 steps" in note for note in found.data.notes), "also where it was resumed"
    machine.probe_error = EndedError("the baseline", Over(30, None), warmed, Design(), "")
    with_no_room = run(FUSED, output="shorter")
    assert machine.compared[-1][0] == FUSED
    assert with_no_room.data.experiments == ()
    assert "the script trains for about 33 steps; a trial takes 39 at least" in with_no_room.data.notes[0]


# -- what a kill leaves ------------------------------------------------------------------------------------------------------------


def test_a_process_that_was_killed_left_its_pairs_behind(machine: Machine) -> None:
    class KilledError(BaseException):
        pass

    machine.breaks[3] = KilledError()
    with pytest.raises(KilledError):
        run(FUSED)
    assert read_results(Path("bundle")) == ((), ())  # no result was written
    assert len(experiment_store.resume_store(Path("bundle"))[0].list_pairs(f"compare:{FUSED}")) == 2
    assert verdicts(run(resume="bundle")) == {FUSED: "faster"}
    assert machine.compared[-1][2] == 2


def test_results_of_other_versions_do_not_stop_a_new_one(machine: Machine) -> None:
    Path("bundle/experiments").mkdir(parents=True)
    Path("bundle/experiments/1.jsonl").write_text('{"type": "planned"')
    assert run(FUSED).data.complete
    assert isinstance(read_results(Path("bundle"))[0][0], ExperimentData)


def test_what_looks_faster_over_one_pair_when_the_time_is_over_goes_on_later() -> None:
    late, looks = Design(looks=(4, 8), deadline=time.monotonic() - 1), Comparison(verdict="faster", ratio=1.6, pairs=1, over="blocks")
    assert experiment_flow.is_cut_short(looks, late)
    assert not experiment_flow.is_cut_short(msgspec.structs.replace(looks, over="pairs", pairs=4), late)
    assert not experiment_flow.is_cut_short(looks, msgspec.structs.replace(late, looks=(1,))), "the one pair of a screening is all of it"
    assert not experiment_flow.is_cut_short(looks, msgspec.structs.replace(late, deadline=None))


def test_a_check_for_which_no_time_was_left_is_made_when_the_experiments_go_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    check, spent = machine.check, []

    def cut_off(*_: Any, **__: Any) -> Parity:
        spent.append(True)
        return Parity(kind="rounding", verdict="not_checked", reason="the budget was spent (the program as it is)")

    monkeypatch.setattr("gpudiag.experiment.parity.check_parity", cut_off)
    monkeypatch.setattr(experiment_flow.Budget, "spent", property(lambda _: bool(spent)))
    found = run(FUSED)
    assert not found.data.complete
    assert f"not measured, the budget was spent: parity of {FUSED}" in found.notes
    assert not found.recipe.proved
    spent.clear()
    monkeypatch.setattr("gpudiag.experiment.parity.check_parity", check)
    later = run(resume="bundle")
    assert later.parity is not None
    assert (later.parity.verdict, later.data.complete, later.recipe.proved) == ("same", True, True)
    assert machine.pairs == 4, "no pair was measured again"


def test_the_time_told_is_that_of_all_legs(machine: Machine, clock: list[float]) -> None:
    """A pair takes 18 s: three in the first command, which has no time for more, and four in the second."""
    machine.verdicts[FUSED] = Comparison(verdict="inconclusive", pairs=3)
    first = run(FUSED, budget_s=50.0)
    assert (first.data.seconds, first.data.complete) == (54.0, False)
    del machine.verdicts[FUSED]
    later = run(resume="bundle")
    assert (later.data.seconds, later.data.complete) == (126.0, True)
    assert [one.seconds for one in later.data.experiments] == [126.0]


def test_of_several_changes_in_a_small_budget_the_first_is_judged_and_the_others_are_left(machine: Machine, clock: list[float]) -> None:
    """150 s, of which 105 are for pairs: four of the first change take 72, and a second would have the time for one."""
    found = run(FUSED, NONE, PREFETCH, budget_s=150.0)
    assert clock[0] == pytest.approx(105.0)
    assert verdicts(found)[FUSED] == "faster"
    assert found.recipe.fixes == (FixCall(FUSED),)
    assert PREFETCH not in verdicts(found)
    assert any(PREFETCH in note for note in found.data.notes)

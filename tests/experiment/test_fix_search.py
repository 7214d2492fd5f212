"""The search of `gpudiag ab --auto` on a machine of planted effects: what is screened, proved, stacked, taken apart, and said."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakeab import FOREACH, FUSED, NONE, PREFETCH, Machine, run, verdicts

from gpudiag.experiment import compare as comparing
from gpudiag.experiment import experiment as experiment_flow
from gpudiag.experiment import search as fix_search
from gpudiag.experiment.arm import EndedError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.offers import Named, find_named_fixes, select_tryable
from gpudiag.experiment.result import InterruptedExperiment, exit_code
from gpudiag.experiment.trial.protocol import Over
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings, Settings
from gpudiag.model.experiment import Comparison, FixCall
from gpudiag.model.finding import Ceiling, Finding, Where

pytest.importorskip("scipy", reason="scipy is not installed")


def interrupted(machine: Machine, at: int, *fixes: str, **options: Any) -> InterruptedExperiment:
    machine.breaks[at] = KeyboardInterrupt()
    with pytest.raises(InterruptedExperiment) as stop:
        run(*fixes, **options)
    return stop.value


def finding(share: float | None, *fixes: str) -> Finding:
    ceiling = None if share is None else Ceiling(1, share, "formula", "")
    return Finding("X-01", "", "warning", "", "", ceiling=ceiling, fixes=fixes)


class Recorded(msgspec.Struct):
    findings: tuple[Finding, ...]
    device: Any = None
    telemetry: Any = None


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def name(*findings: Finding) -> None:
        monkeypatch.setattr(fix_search, "record_program", lambda _: Recorded(findings))

    return name


def test_the_search_finds_the_set_confirms_it_on_fresh_pairs_and_keeps_the_ceiling(machine: Machine, named: Callable[..., None]) -> None:
    machine.ratios.update({f"{FUSED}+{NONE}": 1.2, f"{FUSED}+{PREFETCH}": 1.1, f"{FUSED}+{NONE}+{PREFETCH}": 1.1})
    named(finding(0.1, PREFETCH, "sdpa-of-mine"), finding(0.4, FUSED), finding(None, NONE))
    found = run(auto=True)
    assert verdicts(found) == {FUSED: "faster"}
    confirmed = found.data.experiments[0]
    assert (confirmed.pairs, confirmed.ceiling_share, confirmed.screening) == (4, 0.4, False)
    screened = [one for one in found.data.experiments if one.screening]
    assert screened[0].fix == FUSED  # the largest ceiling comes first
    assert all(one.pairs == 1 for one in screened)
    assert found.recipe.fixes == (FixCall(FUSED),)
    assert any("sdpa-of-mine was not tried" in note for note in found.data.notes)
    assert machine.checked == [(FUSED, "rounding")]


def test_a_search_in_which_nothing_helps_recommends_nothing_and_confirms_nothing(machine: Machine, named: Callable[..., None]) -> None:
    machine.ratios = {PREFETCH: 0.9}
    named(finding(0.1, PREFETCH), finding(0.2, NONE))
    found = run(auto=True)
    assert verdicts(found) == {}
    assert not found.recipe.proved
    assert any("stays as it is" in note for note in found.data.notes)
    assert exit_code(found.data) == 0
    named()
    silent = run(auto=True, output="none")
    assert [one.fix for one in silent.data.experiments] == ["compile"], "no finding names it, and many programs lack it"


def test_a_winner_that_trains_otherwise_is_confirmed_without_the_fix_at_fault(machine: Machine, named: Callable[..., None]) -> None:
    both = f"{FUSED}+{NONE}"
    machine.ratios.update({NONE: 1.1, both: 1.35})
    machine.differs = {both, NONE}
    named(finding(0.4, FUSED), finding(0.2, NONE))
    found = run(auto=True)
    assert verdicts(found) == {both: "faster", FUSED: "faster"}
    assert found.recipe.fixes == (FixCall(FUSED),)
    assert exit_code(found.data) == 4
    assert any(f"{NONE} left out" in note for note in found.data.notes)


def test_each_fix_is_measured_once_by_itself_before_any_set(machine: Machine, named: Callable[..., None]) -> None:
    """A fix that gains only beside another one is found, and one that fails by itself is in no set."""
    machine.ratios.update({PREFETCH: 0.99, f"{FUSED}+{PREFETCH}": 1.5, f"{FUSED}+{NONE}": 1.2, f"{FUSED}+{NONE}+{PREFETCH}": 1.5})
    machine.verdicts = {"malloc": Comparison(verdict="failed", reason="crash", notes=("malloc ended with exit code 1",))}
    named(finding(0.4, "malloc"), finding(0.3, FUSED), finding(0.2, NONE), finding(0.1, PREFETCH))
    found = run(auto=True)
    names = [name for name, looks, _ in machine.compared if looks == (1,) and name != "A/A"]
    assert names[:5] == ["malloc", FUSED, NONE, PREFETCH, "compile"]
    assert not any("malloc" in name for name in names[5:])
    assert found.recipe.fixes == (FixCall(FUSED), FixCall(PREFETCH))


def test_a_set_that_does_not_hold_up_is_taken_apart(machine: Machine, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair flattered the set: on fresh pairs it is slower, and the better of its two fixes is proved instead."""
    both = f"{FUSED}+{NONE}"
    machine.ratios.update({NONE: 1.1, both: 1.4})
    measure = machine.compare

    def compare(first: Arm, second: Arm, design: Design, **more: Any) -> Comparison:
        machine.ratios[both] = 1.4 if design.looks == (1,) else 0.9
        return measure(first, second, design, **more)

    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", compare)
    named(finding(0.4, FUSED), finding(0.2, NONE))
    found = run(auto=True)
    assert verdicts(found) == {both: "slower", FUSED: "faster"}
    assert found.recipe.fixes == (FixCall(FUSED),)


def test_fixes_that_were_asked_for_together_are_taken_apart_where_they_lose(machine: Machine) -> None:
    machine.ratios.update({f"{FUSED}+{NONE}+{PREFETCH}": 0.8, NONE: 1.1, f"{FUSED}+{NONE}": 1.3})
    found = run(FUSED, NONE, PREFETCH, combine=True)
    assert verdicts(found) == {
        f"{FUSED}+{NONE}+{PREFETCH}": "slower",
        FUSED: "faster",
        NONE: "faster",
        PREFETCH: "slower",
        f"{FUSED}+{NONE}": "faster",
    }
    assert found.recipe.fixes == (FixCall(FUSED), FixCall(NONE))
    assert any("its parts were tried by themselves" in note for note in found.data.notes)


def test_a_failure_of_torch_compile_is_not_repeated_for_each_way_of_compiling(machine: Machine) -> None:
    machine.verdicts = {"compile": Comparison(verdict="failed", reason="crash", notes=("compile ended: CppCompileError",))}
    found = run("compile", "compile-max-autotune", FUSED, "fuse-region=head")
    assert verdicts(found) == {"compile": "failed", FUSED: "faster"}
    assert "compile failed: nothing else that uses torch.compile was tried" in found.data.notes


def test_where_the_program_fails_without_any_change_nothing_else_is_tried(machine: Machine) -> None:
    machine.verdicts = {FUSED: Comparison(verdict="failed", reason="ended", notes=("the baseline: over",), baseline_failed=True)}
    found = run(FUSED, NONE, PREFETCH)
    assert verdicts(found) == {FUSED: "failed"}
    assert f"beside {FUSED} the program failed without any change: nothing else was tried" in found.data.notes


def test_a_search_goes_on_where_it_was_interrupted_without_another_recording(
    machine: Machine, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    named(finding(0.4, FUSED), finding(0.2, NONE))
    interrupted(machine, 3, auto=True)
    monkeypatch.setattr(fix_search, "record_program", lambda _: pytest.fail("recorded again"))
    before = len(machine.compared)
    found = run(resume="bundle")
    assert verdicts(found) == {FUSED: "faster"}
    assert FUSED not in [name for name, looks, _ in machine.compared[before:] if looks == (1,)]


def test_fixes_are_ordered_by_the_largest_ceiling_of_their_findings() -> None:
    report = Recorded((finding(0.1, "bf16", "tf32"), finding(None, "compile"), finding(0.3, "tf32"), finding(0.2, "batch-size")))
    found = find_named_fixes(report)  # type: ignore[arg-type]
    assert [(str(one.fix), one.ceiling_share) for one in found] == [
        ("tf32", 0.3),
        ("batch-size=x2", 0.2),
        ("bf16", 0.1),
        ("compile", None),
    ]


def test_a_search_leaves_out_what_changes_training() -> None:
    named = [Named(FixCall("batch-size", "x2"), 0.5), Named(FixCall(FUSED), 0.1), Named(FixCall("no-such-fix"))]
    kept, notes = select_tryable(named, on_gpu=False)
    assert [one.fix.id for one in kept] == [FUSED]
    assert [note.partition(":")[0] for note in notes] == ["batch-size was not tried", "no-such-fix was not tried"]


def test_a_search_that_has_no_time_for_more_says_what_one_pair_of_each_came_to(
    machine: Machine, named: Callable[..., None], clock: list[float]
) -> None:
    machine.ratios = {FUSED: 0.5, NONE: 0.5, PREFETCH: 0.5, "compile": 0.5}
    named(finding(0.4, FUSED), finding(0.3, NONE), finding(0.2, PREFETCH))
    found = run(auto=True, budget_s=100.0)
    assert [one.fix for one in found.data.experiments] == [FUSED, NONE, PREFETCH, "compile"], (
        "two in half of its time, the others in what is left"
    )
    assert all(seconds >= 18.0 for seconds in clock), "none is cut off"
    why = f"({FUSED}, {NONE}, {PREFETCH}, compile screened by one pair)"
    assert f"nothing was proved to make it faster {why}: the program stays as it is" in found.data.notes
    assert found.data.complete
    short = run(auto=True, output="shorter", budget_s=60.0)
    assert "not measured, the budget was spent: compile" in short.data.notes
    assert not short.data.complete
    least = run(auto=True, output="short", budget_s=20.0)
    assert [one.fix for one in least.data.experiments] == [FUSED], "half of it is too short for a pair: all of it is not"
    assert "nothing could be measured: the program stays as it is" in run(auto=True, output="none", budget_s=10.0).data.notes


def test_a_search_shortens_its_blocks_where_the_budget_would_not_hold_its_pairs(
    machine: Machine, named: Callable[..., None], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two screened, and two proved by four pairs, in 70 % of 100 s: ten pairs of 7 s, blocks of 0.58 s; no block is shorter than 0.5 s."""
    monkeypatch.setattr(experiment_flow, "MIN_BLOCK_S", 0.5)
    machine.ratios = {FUSED: 1.2, "compile": 0.6}
    named(finding(0.4, FUSED))
    found = run(auto=True, budget_s=100.0)
    assert verdicts(found) == {FUSED: "faster"}
    assert "blocks take 0.6 s, so that the budget holds more pairs" in found.data.notes
    assert not any("blocks take" in note for note in run(auto=True, output="long", budget_s=300.0).data.notes)
    assert "blocks take 0.5 s, so that the budget holds more pairs" in run(auto=True, output="short", budget_s=30.0).data.notes


def test_where_one_fix_is_left_to_try_it_has_the_whole_budget(machine: Machine, named: Callable[..., None], clock: list[float]) -> None:
    """No choice, no screening: four pairs of 18 s fit into 110 s, and a fifth would not have fitted beside one of screening."""
    machine.ratios = {"compile": 1.1}
    named()
    found = run(auto=True, budget_s=110.0)
    assert verdicts(found) == {"compile": "faster"}
    assert (len(machine.compared), machine.pairs) == (1, 4)
    assert found.recipe.fixes == (FixCall("compile"),)


def test_what_one_pair_does_not_decide_is_compared_while_there_is_a_budget(
    machine: Machine, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Its screening had bad luck: 5 % slower, where it truly is 6 % faster."""
    measure = comparing.compare_arms

    def compare(first: Arm, second: Arm, design: Design, **more: Any) -> Comparison:
        machine.ratios = {FUSED: 0.95 if design.looks == (1,) else 1.06, "compile": 0.6}
        return measure(first, second, design, **more)

    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", compare)
    named(finding(0.4, FUSED))
    found = run(auto=True, budget_s=300.0)
    assert verdicts(found) == {FUSED: "faster"}, "compile was too far from it"
    assert found.recipe.fixes == (FixCall(FUSED),)


def test_the_best_single_fix_is_proved_before_sets_are_screened_and_a_set_that_beats_it_then_wins(
    machine: Machine, named: Callable[..., None]
) -> None:
    both = f"{FUSED}+{NONE}"
    machine.ratios = {FUSED: 1.2, NONE: 1.1, both: 1.4, "compile": 0.8}
    named(finding(0.4, FUSED), finding(0.2, NONE))
    found = run(auto=True)
    order = [(name, looks == (1,)) for name, looks, _ in machine.compared]
    assert order[:5] == [(FUSED, True), (NONE, True), (FUSED, False), ("compile", True), (both, True)], "no bound speaks for compile"
    assert verdicts(found) == {FUSED: "faster", both: "faster"}
    assert found.recipe.fixes == (FixCall(FUSED), FixCall(NONE))


def test_what_else_looked_faster_is_compared_only_where_no_claim_falls_by_it(
    machine: Machine, named: Callable[..., None], clock: list[float]
) -> None:
    machine.ratios = {FUSED: 1.2, NONE: 1.1, f"{FUSED}+{NONE}": 1.19, "compile": 0.8}
    named(finding(0.4, FUSED), finding(0.2, NONE))
    found = run(auto=True, budget_s=900.0)
    assert verdicts(found) == {FUSED: "faster", NONE: "faster", f"{FUSED}+{NONE}": "faster"}
    assert found.recipe.fixes == (FixCall(FUSED),)


@pytest.mark.parametrize(
    ("fixes", "said"), [((), "no fix that gpudiag can apply treats it"), ((NONE,), f"tried, and not proved to help: {NONE}")]
)
def test_a_first_finding_in_a_line_of_the_user_says_so(
    machine: Machine, named: Callable[..., None], fixes: tuple[str, ...], said: str
) -> None:
    bound, place = Ceiling(1, 0.6, "formula", ""), Where("log", "a.py", 7)
    own = Finding("X-08", "Work in Python", "critical", "", "", ceiling=bound, fixes=fixes, where=(place,))
    note = msgspec.structs.replace(finding(None), where=(Where("x", "b.py", 1),), severity="info")
    named(note, own)
    shown = f"the first finding is a line of your own, a.py:7: Work in Python (X-08, critical, up to 60 %); {said}"
    assert shown in run(auto=True).data.notes
    machine.ratios[NONE] = 1.2  # 17 % of the 60
    told = [note for note in run(auto=True, output="little").data.notes if "a.py:7" in note]
    assert told == [shown] if not fixes else f"{NONE} saves 17 % of the time a sample; most" in told[0]
    machine.ratios[NONE] = 2.0
    assert (shown in run(auto=True, output="helped").data.notes) == (not fixes)


def test_a_first_finding_that_no_fix_treats_is_named(machine: Machine, named: Callable[..., None]) -> None:
    debugging = Finding("X-07", "Debugging features are on", "critical", "", "", ceiling=Ceiling(1, 0.55, "formula", ""))
    named(debugging, finding(0.2, FUSED))
    brief = "Debugging features are on (X-07, critical, up to 55 %)"
    told = f"the first finding is yours to change: {brief}; no fix that gpudiag can apply treats it"
    assert told in run(auto=True).data.notes
    named(finding(0.2, FUSED), debugging)
    assert not any("first finding" in note for note in run(auto=True, output="other").data.notes)


def test_a_script_that_fails_beside_itself_is_tried_once(machine: Machine, named: Callable[..., None]) -> None:
    """As one that locks a file: the first process holds it, so that whatever is changed in the second fails alike."""
    fails = Comparison(verdict="failed", reason="crash", notes=("A/A ended with exit code 1: OSError: locked",))
    machine.verdicts = dict.fromkeys((FUSED, NONE, "compile", "A/A"), fails)
    named(finding(0.4, FUSED), finding(0.2, NONE))
    found = run(auto=True)
    assert [name for name, _, _ in machine.compared] == [FUSED, "A/A"]
    assert any(f"{FUSED} failed, and the program fails without any change too" in note and "locked" in note for note in found.data.notes)
    del machine.verdicts["A/A"], machine.verdicts["compile"], machine.verdicts[NONE]
    machine.compared.clear()
    run(auto=True, output="else")
    assert [name for name, _, _ in machine.compared] == [FUSED, "A/A", NONE, "compile"], "the fix alone is at fault"


@pytest.mark.parametrize(("budget_s", "times"), [(200.0, 2), (100.0, 1)])
def test_a_screening_that_was_cut_off_is_made_again_where_it_has_more_time_then(
    machine: Machine, named: Callable[..., None], clock: list[float], monkeypatch: pytest.MonkeyPatch, budget_s: float, times: int
) -> None:
    """Of 200 s screening has 100 at first, its fifth fix 28 of them, then 50; of 100 s the first fix takes 50, and then there are 25."""
    slow, begun, measure = FOREACH, [], comparing.compare_arms

    def compare(first: Arm, second: Arm, design: Design, **more: Any) -> Comparison:
        begun.append(second.name)
        if second.name != slow or begun.count(slow) > 1:
            return measure(first, second, design, **more)
        later_s = design.deadline or 0.0
        monkeypatch.setattr(time, "monotonic", lambda: later_s)
        return Comparison(verdict="failed", reason="timeout", notes=(f"the budget was spent ({slow})",))

    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", compare)
    machine.ratios = dict.fromkeys((FUSED, NONE, PREFETCH, "malloc", FOREACH, "compile"), 0.5)
    others = [FUSED, NONE, PREFETCH, "malloc"] if times == 2 else []
    named(*(finding(0.5, fix) for fix in others), finding(0.4, FOREACH))
    run(auto=True, budget_s=budget_s)
    assert begun.count(FOREACH) == times
    assert "compile" in begun, "what had no turn has one"


def test_what_findings_are_silent_about_is_named_by_the_settings(
    machine: Machine, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are started anew each epoch come before a longer queue of theirs, a fused step and a compiler last."""
    loader = LoaderSettings(num_workers=2, pin_memory=False, persistent_workers=False)
    optimizer = OptimizerSettings("AdamW", 100, 4, implementation="for-loop")
    settings = Settings(loader=loader, optimizers=(optimizer,))
    monkeypatch.setattr(fix_search, "read_manifest", lambda _: SimpleNamespace(settings=settings))
    own = Finding("INP-02", "Waits", "warning", "", "", fixes=(PREFETCH,), where=(Where("batch", "a.py", 7),))
    named(own)
    machine.ratios = {"worker-threads": 0.9, "persistent-workers": 1.3, PREFETCH: 0.9, FUSED: 0.9, "compile": 0.9}
    found = run(auto=True)
    assert [name for name, _, _ in machine.compared][:5] == ["worker-threads", "persistent-workers", PREFETCH, FUSED, "compile"]
    assert verdicts(found) == {"persistent-workers": "faster"}
    assert not any("a line of your own" in note for note in found.data.notes), "what treats it was found"
    machine.compared.clear()
    counted = SimpleNamespace(columns={"child_threads": 1})
    monkeypatch.setattr(fix_search, "record_program", lambda _: Recorded((own,), telemetry=counted))
    assert "worker-threads" not in [one.fix for one in run(auto=True, output="counted").data.experiments], "a finding would name it"
    named(own)
    settings = msgspec.structs.replace(settings, loader=None, optimizers=(msgspec.structs.replace(optimizer, implementation="fused"),))
    machine.compared.clear()
    assert "a.py:7" in next(note for note in run(auto=True, output="other").data.notes if "a line of your own" in note)
    assert [name for name, _, _ in machine.compared][:2] == [PREFETCH, "compile"]


def test_a_script_too_short_for_trials_is_recorded_and_its_first_finding_said(machine: Machine, named: Callable[..., None]) -> None:
    machine.probe_error = EndedError("the baseline", Over(20, None), None, Design(), "")
    named(Finding("X-08", "Work in Python", "critical", "", "", where=(Where("log", "a.py", 7),)))
    found = run(auto=True)
    assert (machine.compared, found.data.experiments, exit_code(found.data)) == ([], (), 5)
    assert found.data.notes[0].startswith("the first finding is a line of your own, a.py:7: Work in Python")
    assert "it must train for longer" in found.data.notes[1]

"""What is said of an experiment: nothing is faster without proof, and figures are shown as they are."""

from __future__ import annotations

import re

import outcomes as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.experiment import Comparison, Outcome, Parity, Verdict, make_outcome
from gpudiag.report.blocks import TERMINAL
from gpudiag.report.experiment import verdicts
from gpudiag.report.experiment.summary import build_outcomes_table
from gpudiag.report.experiment.verdicts import choose_tone

CLAIM = re.compile(r"(?<!looks )\b(faster|slower|proved)\b")


def format_line(outcome: Outcome) -> str:
    figures = ", ".join(text for text in (verdicts.format_throughput(outcome), verdicts.format_basis(outcome)) if text)
    return "; ".join(text for text in (figures, *format_effects(outcome)) if text)


def format_effects(outcome: Outcome) -> list[str]:
    """Return what a terminal tells below a change: parity, memory, when it pays back."""
    table = build_outcomes_table([outcome], TERMINAL)
    cells = zip(table.columns[6:], table.rows[0].cells[6:], strict=True)
    return [f"{column.below}{cell.text}" for column, cell in cells if cell.text]


def test_the_line_of_the_design() -> None:
    assert format_line(made.outcome()) == (
        "x1.83 [1.79, 1.87] samples/s, p<1e-5, 6 process pairs; parity same: losses and gradients within "
        "1.6 x bf16 rounding noise over 12 steps; peak memory -12 %; break-even after 240 steps (cold)"
    )


@pytest.mark.parametrize("found", [found for found in made.every_verdict() if not verdicts.is_proof(found)], ids=verdicts.name_outcome)
def test_what_is_no_proof_claims_nothing(found: Outcome) -> None:
    texts = (verdicts.format_outcome_verdict(found), format_line(found), verdicts.format_outcome_sentence(found))
    said = "; ".join(texts).replace("not proved", "")
    assert not CLAIM.search(said), said
    assert "not proof" in format_line(found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "bf16: 1.83x faster (95 % CI 1.79 to 1.87), trains the same; proved on 6 process pairs."),
        (
            {"verdict": "slower", "ratio": 0.9, "interval": (0.88, 0.92)},
            "bf16: slower, 0.900x the speed (95 % CI 0.880 to 0.920); proved on",
        ),
        (
            {"verdict": "no_difference", "ratio": 1.0, "interval": (0.996, 1.005)},
            "bf16 makes no difference: between x0.996 and x1.005 after",
        ),
        ({"verdict": "inconclusive", "ratio": 1.2, "interval": (0.9, 1.6)}, "bf16 is inconclusive: between x0.90 and x1.60"),
        ({"verdict": "too_noisy", "ratio": 1.2, "interval": (0.9, 1.6)}, "This machine is too noisy to judge bf16: between"),
        ({"verdict": "unstable"}, "bf16 cannot be judged: its steps were not steady"),
        ({"verdict": "not_applied", "ratio": None}, "bf16: not applied: no evidence that it took effect."),
        ({"verdict": "not_applied", "ratio": None, "notes": ("bf16: no float32 weights",)}, "bf16: not applied: no float32 weights."),
        ({"verdict": "not_applied", "reason": "no CUDA"}, "bf16: not applied: no CUDA."),
        ({"verdict": "failed", "reason": "oom"}, "bf16: failed: out of memory."),
        ({"verdict": "failed", "reason": "", "notes": ()}, "bf16: failed: the reason was not recorded."),
        (
            {"over": "blocks", "pairs": 1},
            "bf16 looks 1.83 times as fast [1.79, 1.87], but that is no proof: the interval is over blocks of one",
        ),
        ({"screening": True, "pairs": 1}, "in screening over 1 process pair: that ranks variants, and is no proof."),
        (
            {"over": "blocks", "pairs": 2, "verdict": "inconclusive"},
            "after 2 process pairs (the interval is over blocks of 2 process pairs).",
        ),
    ],
)
def test_a_verdict_as_a_sentence(changes: dict[str, object], expected: str) -> None:
    assert expected in verdicts.format_outcome_sentence(made.outcome("bf16", **changes))


@given(st.floats(0.05, 20), st.floats(1e-6, 0.5), st.floats(1e-6, 0.5))
def test_an_interval_that_leaves_1_out_is_shown_without_it(middle: float, below: float, above: float) -> None:
    low, high = middle * (1 - below), middle * (1 + above)
    shown = verdicts.format_ratio(middle, (low, high))
    ends = [float(text.replace(",", "")) for text in re.findall(r"[\d.,]+\d", shown.partition("[")[2])]
    assert len(ends) == 2
    if low > 1.00001:
        assert ends[0] > 1
    if high < 0.99999:
        assert ends[1] < 1
    if low <= 1 <= high:
        assert ends[0] <= 1 <= ends[1]


@pytest.mark.parametrize(
    ("ratio", "interval", "expected"),
    [
        (1.83, (1.79, 1.87), "x1.83 [1.79, 1.87]"),
        (1.017, (0.998, 1.036), "x1.017 [0.998, 1.036]"),
        (1.012, (1.0003, 1.024), "x1.0120 [1.0003, 1.0240]"),
        (12.34, (11.0, 13.0), "x12.3 [11.0, 13.0]"),
        (1.5, None, "x1.50"),
        (1.5, (0.2, float("inf")), "x1.50 [0.20, ?]"),
        (None, None, ""),
    ],
)
def test_ratios(ratio: float | None, interval: tuple[float, float] | None, expected: str) -> None:
    assert verdicts.format_ratio(ratio, interval) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [(None, ""), (0.5, "p=0.5"), (0.0031, "p=0.0031"), (2.4e-4, "p=2e-4"), (1e-5, "p=1e-5"), (3e-7, "p<1e-5"), (0, "p<1e-5")],
)
def test_p_values(p: float | None, expected: str) -> None:
    assert verdicts.format_p_value(p) == expected


@pytest.mark.parametrize(
    ("parity", "expected"),
    [
        (None, verdicts.NOT_CHECKED),
        (Parity(kind="exact", verdict="same", worst_yardsticks=0.0, steps=12), "same: losses and gradients equal over 12 steps"),
        (Parity(kind="exact", verdict="same", worst_yardsticks=0.7), "same: losses and gradients as close as two baseline runs"),
        (
            Parity(kind="rounding", verdict="same", worst_yardsticks=6.04),
            "same: losses and gradients within 6.0 x float32 rounding noise",
        ),
        (Parity(kind="rounding", verdict="same"), "same"),
        (
            Parity(kind="rounding", verdict="differs", reason="x", settings_changed=("lr 1 -> 2", "x")),
            "DIFFERS: x; lr 1 -> 2",
        ),
        (Parity(kind="rounding", verdict="differs", worst_yardsticks=24_000.0), "DIFFERS: off by 24,000 x the rounding noise"),
        (
            Parity(kind="semantics", verdict="not_comparable", alike=False, reason="loss of step 1 differs by 0.2 of its size"),
            "not comparable: it changes the batches (their order, size or random numbers): loss of step 1 differs by 0.2 of its size",
        ),
        (
            Parity(kind="semantics", verdict="not_comparable", alike=True, steps=12),
            "not comparable: it may change what is trained on, but losses and gradients over 12 steps are as close as two baseline runs",
        ),
        (
            Parity(kind="semantics", verdict="not_comparable", reason="loss of step 1 of the unchanged program differs by 0.3 of its size"),
            "not comparable: it may change what is trained on, which losses and gradients do not tell here: loss of step 1 of the "
            "unchanged program differs by 0.3 of its size",
        ),
        (Parity(kind="exact", verdict="not_checked", reason="no loss was seen"), f"{verdicts.NOT_CHECKED}: no loss was seen"),
    ],
)
def test_parity_in_words(parity: Parity | None, expected: str) -> None:
    assert verdicts.format_parity(made.outcome(parity=parity)) == expected


def test_a_harmless_variant_is_told_which_class_to_name() -> None:
    alike, other = (Parity(kind="semantics", verdict="not_comparable", alike=known, reason="other losses") for known in (True, False))
    assert "name its class, as in NAME:rounding=" in verdicts.format_parity(made.outcome("", variant="wide", parity=alike))
    shown = verdicts.format_parity(made.outcome("", variant="wide", parity=other))
    assert shown == "not comparable: it changes what is trained on: other losses", "as other labels would; a fix of ours only moves batches"
    assert "changes what is trained on" in verdicts.format_parity(made.outcome("no-bias", parity=other)), "one that a user has registered"


def test_a_change_that_trains_otherwise_is_never_only_faster() -> None:
    wrong = made.outcome("fp16", parity=Parity(kind="low_precision", verdict="differs", reason="weight decay 0.01 -> 0"))
    assert not verdicts.is_proved(wrong)
    assert verdicts.format_outcome_verdict(wrong) == "faster, parity differs"
    assert "but parity differs: weight decay 0.01 -> 0." in verdicts.format_outcome_sentence(wrong)


def test_unknown_is_left_out_and_not_zero() -> None:
    bare = made.plain("bf16", verdict="slower", ratio=0.5, interval=(0.4, 0.6), p=None, pairs=4)
    assert format_line(bare) == "x0.50 [0.40, 0.60] samples/s, 4 process pairs"
    assert verdicts.format_promise(bare) == ""


def test_an_arm_that_was_not_steady_shows_no_p() -> None:
    assert verdicts.format_basis(made.outcome(verdict="unstable")) == "6 process pairs"


def test_costs() -> None:
    found = made.outcome(memory_ratio=1.002, energy_ratio=0.8, break_even_steps=1234.2, break_even_warm_steps=10.0, unit="steps")
    assert "peak memory unchanged" in format_effects(found)
    assert verdicts.format_energy(found) == "energy per step -20 %"
    assert verdicts.format_payback(found) == "break-even after 1,235 steps (cold), 10 steps (warm)"
    assert verdicts.format_payback(made.outcome(break_even_steps=-3.0)) == ""  # it starts faster: nothing to pay back
    assert verdicts.format_payback(made.outcome(verdict="slower")) == ""
    assert verdicts.format_percent(4.2) == "+320 %"


def test_what_was_promised_stands_beside_what_was_measured() -> None:
    # 1 - 1 / 1.83 = 45.4 %; [1 - 1 / 1.79, 1 - 1 / 1.87] = [44.1, 46.5]
    assert verdicts.format_promise(made.outcome()) == "Upper bound: 50 % less time a sample; measured: 45 % [44, 47]."
    beyond = verdicts.format_promise(made.outcome(ceiling_share=0.4))
    assert beyond.endswith("That is more than the upper bound: the bound is too low.")
    assert "more than the upper bound" not in verdicts.format_promise(made.outcome(ceiling_share=0.45))  # within the interval
    worse = made.plain("x", verdict="slower", ratio=0.8, interval=(0.7, 0.9), pairs=4, ceiling_share=0.08)
    assert verdicts.format_promise(worse) == "Upper bound: 8.0 % less time a sample; measured: -25 % [-43, -11]."
    assert (
        verdicts.format_promise(made.plain("x", verdict="failed", ceiling_share=0.3))
        == "Upper bound: 30 % less time a sample; not measured."
    )
    assert "measured, not proved: 45 %" in verdicts.format_promise(made.outcome(screening=True, ceiling_share=0.1))


def test_of_what_a_program_printed_the_last_line_is_told() -> None:
    assert verdicts.shorten_note(made.TRACE) == "its last output: ValueError: sizes do not fit: 32 and 64"
    assert verdicts.shorten_note(made.STACK) == 'it hung at File "net.py", line 12 in forward'
    assert verdicts.shorten_note("one line") == "one line"
    hung = made.plain("x", verdict="failed", reason="hang", notes=("it gave no sign of life for 60 s", made.STACK))
    assert verdicts.explain_no_result(hung) == "it gave no sign of life for 60 s"
    failed = made.plain("x", verdict="failed", reason="crash", notes=("x ended with exit code 1", made.TRACE))
    assert verdicts.explain_no_result(failed) == "it crashed: x ended with exit code 1"
    assert verdicts.list_outcome_notes(failed) == ["its last output: ValueError: sizes do not fit: 32 and 64"]


def test_proved_changes_stand_first_and_those_without_a_result_last() -> None:
    measured, screened, missing = verdicts.group_outcomes(made.every_verdict())
    assert verdicts.name_outcome(measured[0]) == "bf16+channels-last"
    assert [verdicts.name_outcome(found) for found in screened] == ["malloc"]
    assert {found.verdict for found in missing} == {"not_applied", "failed"}
    assert len(measured) + len(screened) + len(missing) == len(made.every_verdict())
    proofs = [verdicts.is_proved(found) for found in measured]
    assert proofs == sorted(proofs, reverse=True)


def test_a_comparison_that_goes_on_is_shown_like_an_outcome() -> None:
    found = Comparison(verdict="inconclusive", ratio=1.1, interval=(0.9, 1.3), p=0.2, pairs=4, notes=("a",))
    shown = make_outcome("bf16", found)
    assert verdicts.format_throughput(shown) == "x1.10 [0.90, 1.30] samples/s"
    assert (shown.pairs, shown.notes, shown.screening) == (4, ("a",), False)


def test_names() -> None:
    assert verdicts.name_outcome(made.plain("", variant="lr2", verdict="failed")) == "variant lr2"
    assert verdicts.name_outcome(made.plain("bf16", variant="lr2", verdict="failed")) == "bf16, variant lr2"
    assert verdicts.name_outcome(made.plain("", verdict="failed")) == "unchanged"


@pytest.mark.parametrize("verdict", ["faster", "slower", "no_difference", "inconclusive", "too_noisy", "unstable"])
def test_one_pair_of_a_search_has_no_verdict_in_words(verdict: Verdict) -> None:
    screened = made.outcome(verdict=verdict, screening=True, pairs=1)
    assert verdicts.format_outcome_verdict(screened) == "screened"
    assert screened.verdict == verdict, "the contract's own verdict stays in the JSON"
    assert verdicts.format_outcome_verdict(made.outcome(verdict="failed", screening=True)) == "failed"


def test_nothing_pays_back_that_is_not_proved() -> None:
    assert verdicts.format_payback(made.outcome())
    assert not verdicts.format_payback(made.outcome(over="blocks", pairs=1))
    assert not verdicts.format_payback(made.outcome(screening=True))


def test_what_there_was_no_time_for_has_not_failed() -> None:
    late = made.outcome("bf16", verdict="failed", reason="timeout", ratio=None, notes=("the budget was spent (bf16)",))
    assert verdicts.format_outcome_sentence(late) == "bf16: not measured: the budget was spent (bf16)."
    assert choose_tone(late) == "weak"
    assert choose_tone(made.outcome("bf16", verdict="failed", reason="crash", ratio=None)) == "bad"
    assert (
        verdicts.explain_no_result(made.outcome("bf16", verdict="failed", reason="timeout", ratio=None, notes=())) == "it ran out of time"
    )

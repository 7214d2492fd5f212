"""Outcomes of experiments in words and rows: verdict, throughput, parity, memory. Nothing is called faster without proof."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpudiag.fixes import FIXES
from gpudiag.model.experiment import Outcome, Parity, Verdict
from gpudiag.report.blocks import Tone
from gpudiag.report.labels import pluralize

Interval = tuple[float, float]

_WORDS: dict[Verdict, str] = {
    "faster": "faster",
    "slower": "slower",
    "no_difference": "no difference",
    "inconclusive": "inconclusive",
    "too_noisy": "too noisy",
    "unstable": "unstable",
    "not_applied": "not applied",
    "failed": "failed",
}
_UNPROVED: dict[Verdict, str] = {"faster": "looks faster", "slower": "looks slower", "no_difference": "looks the same"}
_FAILURES = {
    "oom": "out of memory",
    "crash": "it crashed",
    "hang": "it gave no sign of life",
    "timeout": "it ran out of time",
    "ended": "the script ended before its trial",
    "no_steps": "no training step was found",
}
SCREENED = "screened"
"""In place of a verdict: one pair ranks a change, and judges neither it nor the machine."""
_NOISE = {"rounding": "float32 rounding noise", "low_precision": "bf16 rounding noise"}
NOT_CHECKED = "not checked"


def name_outcome(outcome: Outcome) -> str:
    """Return what was changed: the fixes joined by '+', the variant, or both."""
    variant = f"variant {outcome.variant}" if outcome.variant else ""
    return ", ".join(text for text in (outcome.fix, variant) if text) or "unchanged"


def is_proof(outcome: Outcome) -> bool:
    """Return whether the verdict may be claimed: it is over pairs of processes, and not from screening."""
    return outcome.over == "pairs" and not outcome.screening


def trains_differently(outcome: Outcome) -> bool:
    """Return whether the change was seen to train otherwise than it may."""
    return outcome.parity is not None and outcome.parity.verdict == "differs"


def is_proved(outcome: Outcome) -> bool:
    """Return whether the change is proved to be faster and was not seen to train otherwise."""
    return outcome.verdict == "faster" and is_proof(outcome) and not trains_differently(outcome)


def has_no_result(outcome: Outcome) -> bool:
    """Return whether there is no result at all."""
    return outcome.verdict in ("not_applied", "failed")


def ran_out_of_time(outcome: Outcome) -> bool:
    """Return whether there is no result for want of time: that says nothing against the change."""
    return outcome.verdict == "failed" and outcome.reason == "timeout"


def format_outcome_verdict(outcome: Outcome) -> str:
    """Return the verdict in a few words; what is no proof 'looks' so, and what was only screened has none."""
    if outcome.screening and not has_no_result(outcome):
        return SCREENED
    if ran_out_of_time(outcome):
        return "not measured"
    word = _WORDS[outcome.verdict]
    if not is_proof(outcome):
        word = _UNPROVED.get(outcome.verdict, word)
    return f"{word}, parity differs" if trains_differently(outcome) else word


def group_outcomes(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """Return the measured changes (proved first, then by ratio), those of screening, and those without a result."""
    measured = [found for found in outcomes if not found.screening and not has_no_result(found)]
    measured.sort(key=lambda found: (not is_proved(found), -(found.ratio or 0.0)))
    screened = sorted(
        (found for found in outcomes if found.screening and not has_no_result(found)), key=lambda found: -(found.ratio or 0.0)
    )
    return measured, screened, [found for found in outcomes if has_no_result(found)]


def choose_digits(values: Sequence[float]) -> int:
    """Return the decimals of a ratio and the ends of its interval: three within 10 % of 1, else two, one from 10 on.

    More where an end that is not 1 would be shown as 1: whether an interval holds 1 is what it is read for.
    """
    count = 3 if abs(values[0] - 1) <= 0.1 else 1 if values[0] >= 10 else 2
    while count < 5 and any(value != 1 and round(value, count) == 1 for value in values[1:]):
        count += 1
    return count


def format_ratio(ratio: float | None, interval: Interval | None, form: str = "x{}{}", span: str = " [{}, {}]") -> str:
    """Return 'x1.83 [1.79, 1.87]', '' where there is no ratio; an end that is not finite reads '?'.

    `form` holds ratio and interval, `span` the ends of the interval.
    """
    if ratio is None:
        return ""
    values = [ratio, *(interval or ())]
    count = choose_digits([value for value in values if math.isfinite(value)] or [1.0])
    texts = [f"{value:,.{count}f}" if math.isfinite(value) else "?" for value in values]
    return form.format(texts[0], span.format(*texts[1:]) if interval else "")


def format_times_as_fast(ratio: float, interval: Interval | None) -> str:
    """Return '1.83 times as fast [1.79, 1.87]'."""
    return format_ratio(ratio, interval, "{} times as fast{}")


def format_faster(ratio: float, interval: Interval | None) -> str:
    """Return what is proved: '1.83x faster (95 % CI 1.79 to 1.87)', below 1 '0.900x the speed (95 % CI 0.880 to 0.920)'."""
    return format_ratio(ratio, interval, f"{{}}x {'faster' if ratio >= 1 else 'the speed'}{{}}", " (95 % CI {} to {})")


def format_throughput(outcome: Outcome) -> str:
    """Return 'x1.83 [1.79, 1.87] samples/s', '' where there is no result."""
    found = "" if has_no_result(outcome) else format_ratio(outcome.ratio, outcome.interval)
    return f"{found} {outcome.unit}/s" if found else ""


def format_p_value(p: float | None) -> str:
    """Return 'p=0.003', 'p=2e-4' or 'p<1e-5', '' where it is not known."""
    if p is None:
        return ""
    if p < 1e-5:  # below it a p value says no more: no t statistic of a dozen pairs is known to be normal that far out
        return "p<1e-5"
    if p < 0.001:
        mantissa, exponent = f"{p:.0e}".split("e")
        return f"p={mantissa}e{int(exponent)}"
    return f"p={p:.2g}"


def format_pair_count(count: int) -> str:
    """Return '6 process pairs'."""
    return f"{count} {pluralize(count, 'process pair')}"


def format_basis(outcome: Outcome) -> str:
    """Return what the figure rests on: p and the number of pairs, or why it proves nothing."""
    if has_no_result(outcome) or outcome.ratio is None:
        return ""
    if outcome.over == "blocks":
        return f"{_format_block_count(outcome)}: not proof"
    p = "" if outcome.verdict == "unstable" else format_p_value(outcome.p)  # it would look like proof
    told = ", ".join(text for text in (p, format_pair_count(outcome.pairs)) if text)
    return f"{told} (screening: not proof)" if outcome.screening else told


def _format_block_count(outcome: Outcome) -> str:
    return f"blocks of {'one process pair' if outcome.pairs == 1 else format_pair_count(outcome.pairs)}"


def format_percent(ratio: float) -> str:
    """Return '-12 %' for 0.88, 'unchanged' where it rounds to nothing."""
    # A ratio this close to 1 rounds to no change in percent
    return "unchanged" if abs(ratio - 1) < 0.005 else f"{(ratio - 1) * 100:+,.0f} %"


def format_energy(outcome: Outcome) -> str:
    """Return 'energy per sample -20 %', '' where the device does not tell."""
    return "" if outcome.energy_ratio is None else f"energy per {outcome.unit.removesuffix('s')} {format_percent(outcome.energy_ratio)}"


def format_payback(outcome: Outcome) -> str:
    """Return after how many steps the longer start has paid back, '' where it is not known, not proved, or there is nothing to pay back."""
    if outcome.verdict != "faster" or not is_proof(outcome):
        return ""
    ways = ((outcome.break_even_steps, "cold"), (outcome.break_even_warm_steps, "warm"))
    known = [f"{math.ceil(steps):,} steps ({way})" for steps, way in ways if steps is not None and steps > 0 and math.isfinite(steps)]
    return f"break-even after {', '.join(known)}" if known else ""


def format_parity(outcome: Outcome) -> str:
    """Return whether the change trains the same; '' where that was not asked and nothing is claimed."""
    found = outcome.parity
    if found is None:
        return NOT_CHECKED if outcome.verdict == "faster" and is_proof(outcome) else ""
    if found.verdict == "same":
        over = f" over {found.steps} steps" if found.steps else ""
        if found.kind == "exact":
            return f"same: losses and gradients {'as close as two baseline runs' if found.worst_yardsticks else 'equal'}{over}"
        noise = _NOISE.get(found.kind)
        if noise is None or found.worst_yardsticks is None:
            return f"same{over}"
        return f"same: losses and gradients within {found.worst_yardsticks:.1f} x {noise}{over}"
    if found.verdict == "differs":
        return f"DIFFERS: {explain_parity(found)}"
    if found.verdict == "not_comparable":
        name = "; to have that proved name its class, as in NAME:rounding=..." if outcome.variant and found.alike else ""
        return f"not comparable: {explain_semantics(outcome, found)}{name}"
    return f"{NOT_CHECKED}: {found.reason}" if found.reason else NOT_CHECKED


def format_training(outcome: Outcome) -> str:
    """Return in three words whether the change trains the same, as far as that was looked at."""
    verdict = outcome.parity.verdict if outcome.parity is not None else ""
    words = {"same": "trains the same", "differs": "parity differs", "not_comparable": "parity not comparable"}
    return words.get(verdict, f"parity {NOT_CHECKED}")


def explain_semantics(outcome: Outcome, found: Parity) -> str:
    """Return what a change does that may change what is trained on: whether losses and gradients of its first steps tell that it does.

    Of our own fixes it is known what they change; a variant may train on other data or labels.
    """
    if found.alike:
        return f"it may change what is trained on, but losses and gradients over {found.steps} steps are as close as two baseline runs"
    if found.alike is None and found.reason:
        return f"it may change what is trained on, which losses and gradients do not tell here: {found.reason}"
    ours = not outcome.variant and {call.partition("=")[0] for call in outcome.fix.split("+")} <= {fix.id for fix in FIXES}
    what = "it changes the batches (their order, size or random numbers)" if ours else "it changes what is trained on"
    return f"{what}{f': {found.reason}' if found.reason else ''}"


def explain_parity(found: Parity) -> str:
    """Return why a change does not train the same."""
    told = [found.reason, *(text for text in found.settings_changed if text not in found.reason)]
    if not any(told) and found.worst_yardsticks is not None:
        told = [f"off by {found.worst_yardsticks:,.0f} x the rounding noise"]
    return "; ".join(text for text in told if text) or "the reason was not recorded"


def explain_no_result(outcome: Outcome) -> str:
    """Return why there is no result, '' where there is one."""
    if outcome.verdict == "unstable":
        return outcome.reason or "its steps were not steady"
    if outcome.verdict == "not_applied":
        note = shorten_note(outcome.notes[0]) if outcome.notes else "no evidence that it took effect"
        return outcome.reason or note.removeprefix(f"{outcome.fix}: ")
    if outcome.verdict != "failed":
        return ""
    known = _FAILURES.get(outcome.reason, outcome.reason)
    note = shorten_note(outcome.notes[0]) if outcome.notes else ""
    told = [text for text in ("" if known in note or (note and outcome.reason == "timeout") else known, note) if text]  # it says which time
    return ": ".join(told) or "the reason was not recorded"


def list_outcome_notes(outcome: Outcome) -> list[str]:
    """Return the notes of a change in short, but for the one that `explain_no_result` tells."""
    said = explain_no_result(outcome)
    return [text for note in outcome.notes if (text := shorten_note(note)) and text.removeprefix(f"{outcome.fix}: ") not in said]


def shorten_note(note: str) -> str:
    """Return a note in one line: of what a program printed its last line, of the stack of one that hung the place where it stood."""
    lines = [text.strip() for text in note.splitlines() if text.strip()]
    if len(lines) <= 1:
        return "".join(lines)
    if lines[0].startswith("Current thread"):  # faulthandler: the innermost frame comes first
        return f"it hung at {next((text for text in lines if text.startswith('File ')), lines[1])}"
    return f"its last output: {lines[-1]}"


def format_ceiling_ratio(outcome: Outcome) -> str:
    """Return what the finding promised at most as a ratio of throughputs, 'x2.00'; '' where nothing was."""
    most = outcome.ceiling_share
    return "" if most is None or not 0 <= most < 1 else format_ratio(1 / (1 - most), None)


def format_promise(outcome: Outcome) -> str:
    """Return what the finding promised at most beside what was measured, as shares of the time of a sample; '' where nothing was."""
    most = outcome.ceiling_share
    if most is None:
        return ""
    ratios = () if has_no_result(outcome) or outcome.ratio is None else (outcome.ratio, *(outcome.interval or ()))
    # A throughput ratio saves 1 - 1 / ratio of the time of a sample; it is negative where it costs time
    shares = [most, *(1 - 1 / ratio if ratio > 0 else -math.inf for ratio in ratios)]
    bound, *texts = (f"{share * 100:,.0f}" if abs(share) >= 0.1 or share == 0 else f"{share * 100:.1f}" for share in shares)
    said = f"Upper bound: {bound} % less time a {outcome.unit.removesuffix('s')}"
    if not texts:
        return f"{said}; not measured."
    interval = f" [{', '.join(texts[1:])}]" if texts[1:] else ""
    how = "measured" if is_proof(outcome) else "measured, not proved"
    beyond = texts[1:] and is_proof(outcome) and shares[2] > most
    verdict = " That is more than the upper bound: the bound is too low." if beyond else ""
    return f"{said}; {how}: {texts[0]} %{interval}.{verdict}"


def format_outcome_sentence(outcome: Outcome) -> str:
    """Return the verdict on one change as a sentence."""
    what, ratio = name_outcome(outcome), outcome.ratio
    if has_no_result(outcome) or ratio is None:
        return f"{what}: {format_outcome_verdict(outcome)}: {explain_no_result(outcome) or 'no figure'}."
    if outcome.screening:  # whatever its verdict: one pair judges neither the change nor the machine
        over = format_pair_count(outcome.pairs)
        return f"{what} ran {format_times_as_fast(ratio, outcome.interval)} in screening over {over}: that ranks variants, and is no proof."
    no_proof = f"the interval is over {_format_block_count(outcome)}"
    if outcome.verdict in _UNPROVED and not is_proof(outcome):
        return f"{what} looks {format_times_as_fast(ratio, outcome.interval)}, but that is no proof: {no_proof}."
    trains = f"{what}: {format_faster(ratio, outcome.interval)}"
    # 'between x0.98 and x1.06 after 12 process pairs'
    low, high = outcome.interval or (ratio, ratio)
    count = choose_digits([ratio, low, high])
    weak = "" if is_proof(outcome) else f" ({no_proof})"
    between = f"between x{low:,.{count}f} and x{high:,.{count}f} after {format_pair_count(outcome.pairs)}{weak}"
    if outcome.verdict == "faster" and outcome.parity is not None and trains_differently(outcome):
        return f"{trains}, but parity differs: {explain_parity(outcome.parity)}."
    told: dict[Verdict, str] = {
        "faster": f"{trains}, {format_training(outcome)}; proved on {format_pair_count(outcome.pairs)}.",
        "slower": f"{what}: slower, {format_faster(ratio, outcome.interval)}; proved on {format_pair_count(outcome.pairs)}.",
        "no_difference": f"{what} makes no difference: {between}.",
        "inconclusive": f"{what} is inconclusive: {between}.",
        "too_noisy": f"This machine is too noisy to judge {what}: {between}.",
        "unstable": f"{what} cannot be judged: {explain_no_result(outcome)}.",
    }
    return told[outcome.verdict]


def format_so_far(outcome: Outcome) -> str:
    """Return what the pairs of a change say while it is measured: 'bf16 x1.31 [1.29, 1.33] samples/s, 5 process pairs', no verdict."""
    told = (format_throughput(outcome), format_pair_count(outcome.pairs))
    return f"{name_outcome(outcome)} {', '.join(text for text in told if text)}"


def choose_tone(found: Outcome) -> Tone:
    """Return good, bad, slower or weak."""
    if trains_differently(found) or (found.verdict == "failed" and not ran_out_of_time(found)):
        return "bad"
    if is_proved(found):
        return "good"
    return "slower" if found.verdict == "slower" and is_proof(found) else "weak"

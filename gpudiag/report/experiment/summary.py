"""What all experiments of one command come to: the headline, the results, the baseline, the recipe, what figures mean."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import msgspec

from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.experiment import NO_INSTRUCTIONS, Baseline, ExperimentData, Outcome, Recipe
from gpudiag.report.blocks import (
    PAGES,
    Amount,
    Block,
    Cell,
    Chart,
    Code,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Paragraph,
    Row,
    Section,
    Table,
    Tone,
    Topics,
    build_row,
    build_section,
    say_all,
)
from gpudiag.report.console import clean
from gpudiag.report.experiment import verdicts
from gpudiag.report.experiment.intervals import Axis, compute_pair_ratios, draw_intervals
from gpudiag.report.findings import SCRIPT_PLACEHOLDER
from gpudiag.report.labels import capitalize, pluralize
from gpudiag.units import format_bytes, format_ns, format_share

AS_IS = "the baseline"
BUNDLE = "BUNDLE"
_PYTHON = re.compile(r"(.*/)?python[\d.]*$")
_MINUTE, _HOUR = 60, 3_600
_FEW = 3


class RecipeChange(msgspec.Struct, frozen=True):
    """One fix of a recipe: as it is asked for, its title ('': not known), and the change of the code."""

    fix: str
    title: str
    code: str


def format_experiments_headline(data: ExperimentData) -> str:
    """Return what came out, in a sentence or two: what is proved first, and that nothing is where nothing is."""
    if data.recipe.fixes or data.recipe.proved:
        return _format_recipe_headline(data)
    if not data.experiments:
        if data.baseline is None:
            return "Nothing was measured."
        return f"No variant was tried. {AS_IS.capitalize()} takes {_format_step(data.baseline)}."
    if len(data.experiments) == 1:
        return verdicts.format_outcome_sentence(data.experiments[0])
    measured, screened, missing = verdicts.group_outcomes(data.experiments)
    if not measured and not screened:
        return f"None of the {len(missing)} variants could be measured; the reasons are below."
    return _format_variants_headline(measured, screened)


def _format_recipe_headline(data: ExperimentData) -> str:
    recipe, fixes = data.recipe, "+".join(map(str, data.recipe.fixes))
    proofs = (found for found in data.experiments if verdicts.is_proved(found) and (found.fix, found.ratio) == (fixes, recipe.ratio))
    proof = next(proofs, None)
    what = verdicts.name_outcome(proof) if proof else fixes or "the change below"
    if recipe.ratio is None:
        return f"{what} is in the recipe, but its speed is unknown."
    if not recipe.proved:
        return f"{what} looks {verdicts.format_times_as_fast(recipe.ratio, recipe.interval)}, but that is not proved."
    p = verdicts.format_p_value(recipe.p)
    parity, training = proof.parity if proof else None, f" Parity was {verdicts.NOT_CHECKED}."
    same = parity is not None and parity.verdict == "same"
    if same:
        training = ""
    elif proof is not None and parity is not None and parity.verdict == "not_comparable":
        told = verdicts.explain_semantics(proof, parity)
        learns = ", and whether it learns as well is unknown" if not parity.alike else ""
        training = f" {capitalize(told)}{learns}."
    # The yardstick of a stack is that of its loosest part: with other data than the baseline's, a change that is too large alone may pass
    parts = [one for one in data.experiments if one is not proof and one.fix in map(str, recipe.fixes) and verdicts.trains_differently(one)]
    if parts:
        training += f" By {'itself' if len(parts) == 1 else 'themselves'}, {_join_names(parts)} did not train the same."
    said = [verdicts.format_faster(recipe.ratio, recipe.interval), "trains the same" if same else "", p]
    return f"{what}: {', '.join(text for text in said if text)}; proved.{training}"


def _format_variants_headline(measured: Sequence[Outcome], screened: Sequence[Outcome]) -> str:
    winners = [found for found in measured if verdicts.is_proved(found)]
    variants = [found for found in winners if not found.fix]
    if variants:
        said = verdicts.format_outcome_sentence(variants[0])
    elif winners:
        verb, alone = ("was", "itself") if len(winners) == 1 else ("were", "themselves")
        said = f"{_join_names(winners)} {verb} faster by {alone}, but the recipe is empty."
    elif not measured:
        ranked = "1 variant was" if len(screened) == 1 else f"{len(screened)} variants were"
        said = f"Nothing is proved: {ranked} only screened."
    elif len(measured) == 1:
        return f"{verdicts.format_outcome_sentence(measured[0])} The recipe is {AS_IS}."
    else:
        said = f"None of the {len(measured)} variants that were measured is proved faster: the recipe is {AS_IS}."
    different = [
        found for found in measured if found.verdict == "faster" and verdicts.is_proof(found) and verdicts.trains_differently(found)
    ]
    if not different:
        return said
    return f"{said} {_join_names(different)} {'is' if len(different) == 1 else 'are'} faster, but not the same training."


def _join_names(found: Sequence[Outcome]) -> str:
    names = [verdicts.name_outcome(item) for item in found]
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def list_leads(data: ExperimentData, bundle: str = "") -> list[str]:
    """Return what has to be known beside the headline: that something is missing, how long it took, notes.

    `bundle`: the folder that the experiments lie in, '' where that is not known.
    """
    resume = f"The plan is not complete: gpudiag ab --resume {_quote_path(bundle or BUNDLE)} goes on."
    seconds = [found.seconds for found in data.experiments if found.seconds is not None]
    took = f"{len(seconds)} {pluralize(len(seconds), 'experiment')} in {format_duration(data.seconds or sum(seconds))}." if seconds else ""
    slower = [_explain_slower(found, data.baseline) for found in data.experiments if found.verdict == "slower" and verdicts.is_proof(found)]
    return [text for text in (*([] if data.complete else [resume]), took, *slower, *map(verdicts.shorten_note, data.notes)) if text]


def _explain_slower(found: Outcome, baseline: Baseline | None) -> str:
    what = verdicts.name_outcome(found)
    if found.slow_dtype:
        return f"One reason why {what} is slower: {NO_INSTRUCTIONS} {found.slow_dtype}."
    calls = found.fix.split("+")
    if found.variant or not all((fix := FIX_BY_ID.get(call.partition("=")[0])) and fix.injected for call in calls):
        return f"Why {what} is slower is unknown."
    fixes, program = " ".join(f"--fix {_quote_path(call)}" for call in calls), _format_program(baseline)
    # Characters of a program and its arguments in a sentence; SCRIPT stands for a longer one
    program = program if len(program) <= 150 else SCRIPT_PLACEHOLDER
    return (
        f"Why {what} is slower is unknown; two recordings show which ops changed: gpudiag run -o runs/before {program}; "
        f"gpudiag run -o runs/after {fixes} {program}; gpudiag compare runs/before runs/after"
    )


def format_duration(seconds: float) -> str:
    """Return '85 s', '3 min 20 s' or '1 h 05 min'."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s" if seconds >= 1 else f"{seconds:.1f} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"


def build_baseline_rows(found: Baseline | None) -> list[tuple[str, str]]:
    """Return (topic, what was found) of the baseline; only what is known."""
    if found is None:
        return []
    marked = f"; steps are marked by {found.steps_marked_by}" if found.steps_marked_by else ""
    warm = f", {found.warm_steps} steps of it until steady" if found.warm_steps else ""
    noise = found.noise_share
    rows = [
        ("command", shlex.join(found.command)),
        ("device", found.device),
        ("step", f"{_format_step(found)}{marked}"),
        ("warm-up", f"{format_duration(found.start_s)} from the start of the process{warm}" if found.start_s else ""),
        ("memory", f"{format_bytes(found.peak_bytes)} at the peak" if found.peak_bytes else ""),
        ("writes", "; ".join(text.removeprefix("writes ") for text in found.side_effects)),
        ("noise", "" if noise is None else f"pairs of unchanged processes differ by {format_share(noise, 1)} (standard deviation)"),
    ]
    return [(topic, said) for topic, said in (*rows, *(("note", verdicts.shorten_note(note)) for note in found.notes)) if said]


def _format_step(found: Baseline) -> str:
    step = f"{format_ns(found.step_ns)} a step"
    if not found.samples_per_step or found.step_ns <= 0:
        return step
    rate = found.samples_per_step / found.step_ns * 1e9
    return f"{step}, {rate:,.{0 if rate >= 100 else 1}f} samples/s ({found.samples_per_step:,.4g} a step)"


def list_recipe_changes(recipe: Recipe) -> list[RecipeChange]:
    """Return the fixes of a recipe with the change of the code that a person would make."""
    made = []
    for index, call in enumerate(recipe.fixes):
        known = FIX_BY_ID.get(call.id)
        own = recipe.changes[index] if index < len(recipe.changes) else ""
        made.append(RecipeChange(str(call), known.title if known else "", own or (known.change if known else "")))
    return made


def list_variant_changes(recipe: Recipe) -> list[str]:
    """Return the changes of a recipe beyond those of its fixes: those of a variant."""
    return list(recipe.changes[len(recipe.fixes) :])


def build_recipe_command(data: ExperimentData, bundle: str = "") -> str:
    """Return how the program is run with the recipe in `bundle` and without a change of its code, '' where that cannot be done."""
    recipe = data.recipe
    if not recipe.proved or not recipe.fixes or list_variant_changes(recipe):
        return ""
    path = _quote_path(f"{bundle or BUNDLE}/recipe.toml")
    return f"Without a change of the code: gpudiag run --recipe {path} {_format_program(data.baseline)}"


def _format_program(baseline: Baseline | None) -> str:
    command = baseline.command if baseline else ()
    return " ".join(map(_quote_path, command[1:] if command and _PYTHON.match(command[0]) else command)) or SCRIPT_PLACEHOLDER


def _quote_path(path: str) -> str:
    return shlex.quote(clean(path))


def format_experiments_legend(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the figures of `outcomes` mean, only of those that occur."""
    with_ratio = [found for found in outcomes if verdicts.format_throughput(found)]
    lines = []
    shown = next((found for found in with_ratio if found.interval and verdicts.is_proof(found)), None)
    if shown is not None:
        lines.append(
            f"{verdicts.format_ratio(shown.ratio, shown.interval)}: throughput over that of {AS_IS}, with its 95 % interval. "
            "Two processes run at once and take turns; the pair is the unit, never the step."
        )
    if any(not verdicts.is_proof(found) for found in with_ratio):
        lines.append(
            "Not proof: blocks of a few processes, or screening, rank the variants; they do not measure how much processes differ."
        )
    tested = sum(verdicts.is_proof(found) and found.p is not None for found in with_ratio)
    if tested > 1:  # of one command as of all those of a bundle: whatever stands side by side is corrected together
        lines.append(f"Claims are corrected for the interim looks and for their number: these {tested} comparisons together (Holm).")
    if any("rounding noise" in verdicts.format_parity(found) for found in outcomes):
        lines.append(
            f"Rounding noise: how far losses and gradients of {AS_IS} move when its weights get noise as large as the rounding of float32 "
            "or bfloat16."
        )
    return lines


OUTCOME_TITLE = f"Experiments: variants against {AS_IS}"
SCREENED_TITLE = "Screening (ranks variants, proves nothing)"
MISSING_TITLE = "Without a result"
CHART_LABEL = f"Throughput of each variant over that of {AS_IS}, with its interval; the same figures stand in the table"
_PAIR_COLUMNS = ("step", "start to warm", "peak memory")


def build_experiments_document(data: ExperimentData, amount: Amount, bundle: str = "") -> Document:
    """Return all experiments of a command, its recipe and baseline; `bundle`: where they lie, if known."""
    device = data.baseline.device if data.baseline else ""
    recipe, rows = data.recipe, build_baseline_rows(data.baseline)
    shown: list[Block] = []
    for change in list_recipe_changes(recipe):
        shown += [Heading(change.fix, change.title), *([Code(change.code)] if change.code else [])]
    shown += [Code(text) for text in list_variant_changes(recipe)]
    shown += say_all([build_recipe_command(data, bundle)], "quiet")
    sections = (
        build_outcomes_section(data.experiments, amount),
        build_section("Recipe" if recipe.proved else "Recipe (not proved)", shown, "recipe"),
        Section("Baseline", (Topics(tuple(rows), code=("command",)),), "baseline") if rows else None,
    )
    return Document(
        "gpudiag ab",
        format_experiments_headline(data),
        (f"gpudiag ab on {device}",) if device else (),
        tuple(say_all(list_leads(data, bundle))),
        tuple(section for section in sections if section is not None),
        title="Experiments - gpudiag",
    )


MOST_VERDICTS = 8
"""Changes whose verdict stands above all figures; the table has those of all."""

_PROSE_TONES: dict[Tone, Tone] = {"good": "good", "bad": "bad", "slower": "strong"}
"""How a verdict of a tone stands in prose; others are plain: nothing proved is a normal result."""


def build_verdicts(outcomes: Sequence[Outcome]) -> list[Block]:
    """Return the verdict on each change that was measured in a plain sentence, what is proved first."""
    measured = verdicts.group_outcomes(outcomes)[0][:MOST_VERDICTS]
    told: list[Block] = []
    for found in measured:
        tone = _PROSE_TONES.get(verdicts.choose_tone(found), "")
        same = found.parity is not None and found.parity.verdict == "same"
        said = clean(verdicts.format_outcome_sentence(found), 1_000)
        told.append(Paragraph(said, "strong" if tone == "good" and not same else tone))
    return told


def build_outcomes_section(outcomes: Sequence[Outcome], amount: Amount) -> Section | None:
    """Return what came out of each change: the measured, those of screening, those without a result; None where there is none."""
    shown: list[Block] = []
    figure = draw_intervals(outcomes) if amount.page else None
    if figure is not None:
        shown.append(Chart("intervals", figure, CHART_LABEL))
    axis = Axis(outcomes, min(amount.width // 3, 48))
    for title, group in zip(("", SCREENED_TITLE, MISSING_TITLE), verdicts.group_outcomes(outcomes), strict=True):
        if group:
            shown += [*([Heading(title)] if title else []), build_outcomes_table(group, amount, axis)]
    if shown:
        shown += say_all(format_experiments_legend(outcomes), "quiet")
    details = [block for found in outcomes for block in _build_outcome_details(found)] if amount.page else []
    if details:
        shown.append(Fold("Evidence, notes and every pair", tuple(details)))
    return build_section(OUTCOME_TITLE, shown, "experiments", nav="Experiments")


def build_outcomes_table(outcomes: Sequence[Outcome], amount: Amount, axis: Axis | None = None, verdict: str = "") -> Table:
    """Return changes with their figures; `axis`: of the intervals that a terminal draws; `verdict`: said of those that still run."""
    columns = (
        Column("change", "name"),
        Column("verdict"),
        Column("upper bound", "number", "what its finding promised at most", least=PAGES),
        Column("throughput", least=61, below=""),
        Column("", least=62, page=False),
        Column("based on, or reason", least=PAGES, below=""),
        Column("parity", least=PAGES, below="parity "),
        Column("peak memory", "number", least=PAGES, below="peak memory "),
        Column("break-even", least=PAGES, below="break-even "),
    )
    rows: list[Row] = []
    for found in outcomes:
        lost, promise, energy = verdicts.has_no_result(found), verdicts.format_promise(found), verdicts.format_energy(found)
        told = "; ".join(text for text in (verdicts.explain_no_result(found), verdicts.format_basis(found)) if text)
        missing, unknown = ("no result", "?") if amount.document else ("", "")  # columns answer for each change, lines tell what is known
        memory = "" if lost else unknown if found.memory_ratio is None else verdicts.format_percent(found.memory_ratio)
        more = (*(f"In effect: {said}" for said in found.evidence), "" if lost else energy, *verdicts.list_outcome_notes(found))
        rows.append(
            build_row(
                verdicts.name_outcome(found),
                Cell(verdict or verdicts.format_outcome_verdict(found), tone=verdicts.choose_tone(found)),
                verdicts.format_ceiling_ratio(found),
                Cell(verdicts.format_throughput(found) or missing, found.ratio, (promise,) if amount.page else ()),
                axis.bar(found) if axis else "",
                told,
                "" if lost else verdicts.format_parity(found),
                memory,
                verdicts.format_payback(found).removeprefix("break-even "),
                notes=() if amount.page or found.screening else (*say_all([promise]), *say_all(more, "quiet")),
            )
        )
    return Table(columns, tuple(rows), OUTCOME_TITLE)


def _build_outcome_details(found: Outcome) -> list[Block]:
    energy = verdicts.format_energy(found)
    lines = [f"In effect: {said}" for said in found.evidence] + ([energy] if energy else [])
    printed: list[Block] = []
    for note in found.notes:
        if "\n" not in note.strip():
            lines.append(note)
        else:  # what a program printed; of much its end
            printed.append(Code("\n".join(note[-4_000:].splitlines()[-60:]), output=True))
    pairs = []
    for number, pair in enumerate(found.measured, 1):
        ratio = compute_pair_ratios([pair])
        steps = (format_ns(pair.first_step_ns), format_ns(pair.second_step_ns)) if pair.first_step_ns and pair.second_step_ns else None
        starts = (f"{pair.first_start_s:.1f} s", f"{pair.second_start_s:.1f} s") if pair.first_start_s and pair.second_start_s else None
        known = pair.first_peak_bytes is not None and pair.second_peak_bytes is not None
        peaks = (format_bytes(pair.first_peak_bytes), format_bytes(pair.second_peak_bytes)) if known else None
        sides = (" \u2192 ".join(side) if side else "?" for side in (steps, starts, peaks))
        pairs.append(build_row(str(number), verdicts.format_ratio(ratio[0], None) if ratio else "?", *sides))
    if not lines and not printed and not pairs:
        return []
    name = verdicts.name_outcome(found)
    columns = (Column("pair"), *(Column(title, "number") for title in (f"{found.unit}/s", *_PAIR_COLUMNS)))
    table = [Table(columns, tuple(pairs), f"Process pairs of {name}")] if pairs else []
    return [Heading(name), *([Listing(tuple(lines))] if lines else []), *printed, *table]

"""Why B takes another time than A: the causes of a comparison in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from gpudiag.model.comparison import Cause, CausePart, Explanation, SettingChange, StepComparison
from gpudiag.model.event_labels import format_kernel_name
from gpudiag.report.blocks import Block, Cell, Column, Paragraph, Row, Section, Table, Tone, Topics, build_row, say_all
from gpudiag.report.console import shorten_middle
from gpudiag.report.labels import format_bucket_name, pluralize
from gpudiag.units import format_count, format_ns, format_share

_KINDS = {
    "slower": "the same work taking longer",
    "faster": "the same work taking less time",
    "more_work": "more work in a call of the same ops",
    "less_work": "less work in a call of the same ops",
    "more_calls": "ops that are called more often",
    "fewer_calls": "ops that are called less often",
    "other_shapes": "the same ops on other shapes",
    "unknown_work": "ops whose amount of work is not known",
    "other_type": "the same ops on another element type",
    "other_kernels": "the same ops by other kernels",
    "recompute": "forward work repeated in the backward pass",
    "data_work": "ops that make batches in the training process",
    "replaced": "other ops in place of those of A",
    "new": "ops that A does not have",
    "gone": "ops that B does not have",
    "idle_data": "waiting for the next batch",
    "idle_gc": "garbage collection",
    "other_work": "work that was not launched in these steps",
    "small": "changes within noise, or next to nothing",
    "rest": "what the profiled steps do not show",
}
_LESS = {"recompute": "forward work no longer repeated in the backward pass"}
"""Of causes that take less time in B."""

_LAST = ("small", "other_work", "rest")
"""What is no cause, but what is left."""
MOST_SETTINGS = 3
_TOLD = 3
_MOST_TOLD = 8
"""Causes whose evidence is told."""
_WORTH_TELLING = 0.02
"""Share of the difference from which the evidence of a cause is told."""
_LONGEST_NAME = 60
_EQUAL = 0.02
"""Work and calls that differ by no more are called the same."""


def name_cause(cause: Cause, found: StepComparison) -> str:
    """Return a cause as a noun: 'waiting for the next batch'."""
    words = (_LESS if cause.delta_ns < 0 else {}).get(cause.kind) or _KINDS.get(cause.kind)
    if words is None:
        kinds = {side.device_kind for side in (found.a, found.b)}
        device = (kinds.pop() or "device").upper() if len(kinds) == 1 else "device"
        words = format_bucket_name(cause.kind, work="ops" if device == "CPU" else "kernels", device=device).removeprefix("idle: ")
        words = f"{words} while the device is idle" if cause.kind.startswith("idle_") else words
    lines = {(part.file, part.line) for part in cause.parts}
    if cause.kind == "new" and len(lines) == 1 and (line := lines.pop())[1] is not None:
        return f"{words}, at {line[0]}:{line[1]}"
    return f"{words} ({cause.phase})" if cause.phase else words


def format_setting(change: SettingChange) -> str:
    """Return what was set otherwise: 'loader workers went from 4 to 0'."""
    return f"{change.label} went from {change.a} to {change.b}"


def format_main_cause(found: StepComparison) -> str:
    """Return the largest cause and what was set otherwise that it is consistent with, '' where nothing can be said."""
    why = found.explanation
    if why is None or not why.difference_ns:
        return ""
    if why.same_program is False:
        return ""
    main, rest = find_main_cause(why), next((abs(cause.share or 0.0) for cause in why.causes if cause.kind == "rest"), 0.0)
    if why.profiled_ns * why.difference_ns <= 0 or abs(why.profiled_ns) < abs(why.difference_ns) / 2:
        return "the profiled steps do not show most of it"
    if main is None:
        return "no single part of the step changed by more than its noise"
    same = [one for one in why.causes if one.settings[:1] == main.settings[:1] != () and one.delta_ns * main.delta_ns > 0]
    moved, less = sum(abs(one.delta_ns) for one in same or [main]), why.difference_ns < 0
    amount = format_ns(moved)
    named = name_cause(main, found) + (f" and {len(same) - 1} more {pluralize(len(same) - 1, 'part')} below" if len(same) > 1 else "")
    whole = "it" if rest < _ANOTHER else f"the {format_ns(abs(why.profiled_ns))} by which the profiled steps differ"
    if moved <= _NEARLY_ALL * abs(why.difference_ns if rest < _ANOTHER else why.profiled_ns):
        said = f"{amount} of {whole} is {named}"
    else:
        word, back = ("less", "take") if less else ("more", "give")
        said = f"{amount} {word} by {named}, some of which other parts {back} back"
    if main.kind == "unknown_work" and why.work_ratio is not None and abs(why.work_ratio - 1) > _EQUAL:
        said += f"; ops beside them have {_format_ratio(why.work_ratio)} x the work"
    settings = [setting for name in main.settings[:1] for setting in why.settings if setting.name == name]
    return "; ".join([said, *map(format_setting, settings)])


_NEARLY_ALL = 1.05
"""Share of a difference up to which a cause is a part of it: intervals are wider than that."""

_ANOTHER = 0.2
"""Share of the difference that the profiled steps lack, or have beyond it, from which their own difference is told."""


def format_unlike(found: StepComparison) -> str:
    """Return that the two are not the same program, '' where they may be."""
    if found.explanation is None or found.explanation.same_program is not False:
        return ""
    return (
        "These do not look like recordings of the same program: most ops have no like on the other side, with the same shapes or as many "
        "calls. What follows tells the two apart; it is no cause of a slower step."
    )


_OTHER_CODE = ("new", "gone", "replaced", "more_calls", "fewer_calls", "more_work", "less_work")
"""Kinds of causes that a load of the machine does not bring about."""


def format_nothing_set(found: StepComparison) -> str:
    """Return that a certain difference has no setting behind it, '' where one was changed or they are not known."""
    why = found.explanation
    if found.same_recording or found.verdict not in ("faster", "slower") or why is None or not why.settings_known or why.settings:
        return ""
    main = find_main_cause(why)
    if main is not None and main.kind in _OTHER_CODE:
        return "Nothing that was recorded was set otherwise: the code differs, or the data that it works on."
    return (
        "Nothing that was recorded was set otherwise. If the code did not change either, this is how far two recordings of one program "
        "differ here: the interval holds what varies within each."
    )


def find_main_cause(why: Explanation) -> Cause | None:
    """Return the largest cause in the direction of the difference; None where there is none but noise and what is not known."""
    main = next(iter(why.causes), None)
    return main if main is not None and main.kind not in _LAST and (main.share or 0.0) > 0 else None


def build_causes_section(found: StepComparison) -> Section | None:
    """Return the causes, the largest first, with their sum, and what stands behind them; None where steps cannot be compared."""
    why = found.explanation
    if why is None or not why.causes or found.same_recording:
        return None
    certain = found.verdict in ("faster", "slower")
    # Else the parts, which are of profiled steps, are no reasons for it, nor shares of it
    shown = certain and why.profiled_ns * why.difference_ns > 0
    title = f"Why B is {'slower' if why.difference_ns > 0 else 'faster'}" if shown else "What differs"
    if not certain and all(cause.kind in _LAST for cause in why.causes):
        return Section(title, (Paragraph("No part of the step changed by more than it varies from step to step.", "quiet"),), "causes")
    rows, told, common = [], [], _find_common_settings(why)
    for number, cause in enumerate(why.causes, start=1):
        rows.append(_build_row(str(number), cause, found))
        evidence = ". ".join(_list_evidence(cause, why, common))
        if evidence and abs(cause.share or 1.0) >= _WORTH_TELLING:
            told.append((str(number), evidence))
    rows.append(build_row("", _name_difference(found), "", "", format_signed_ns(why.difference_ns), _format_share(1.0), level="total"))
    columns = [
        Column(""), Column("part of the difference", "words"), Column("A", "number", least=70), Column("B", "number", least=70),
        Column("change", "number", "B less A, a step, with its interval"), Column("share", "number", "of the difference", least=50),
    ]  # fmt: skip
    if not shown:
        rows, columns = [msgspec.structs.replace(row, cells=row.cells[:-1]) for row in rows], columns[:-1]
    blocks: list[Block] = [Table(tuple(columns), tuple(rows), "Causes of the difference")]
    if told:
        blocks.append(Topics(tuple(told[:_MOST_TOLD])))
    return Section(title, (*blocks, *say_all(_list_notes(found, why, common), "quiet")), "causes")


def _build_row(number: str, cause: Cause, found: StepComparison) -> Row:
    last = cause.kind in _LAST
    tone: Tone = "" if last else "bad" if cause.delta_ns > 0 else "good"
    times = ["-", "-"] if cause.kind == "rest" else [format_ns(cause.a_ns), format_ns(cause.b_ns)]
    interval = () if cause.low_ns is None or cause.high_ns is None else (cause.low_ns, cause.high_ns)
    between = (" to ".join(map(format_signed_ns, interval)),) if interval else ()
    change = Cell(format_signed_ns(cause.delta_ns), cause.delta_ns, between, tone)
    return build_row(number, name_cause(cause, found), *times, change, _format_share(cause.share))


def _find_common_settings(why: Explanation) -> tuple[SettingChange, ...]:
    """Return the settings that can be behind most causes, as another device: said once, they need not stand at each."""
    causes = [cause for cause in why.causes if cause.kind not in _LAST]
    counts = Counter(name for cause in causes for name in cause.settings)
    return tuple(setting for setting in why.settings if counts[setting.name] > max(1, len(causes) / 2))


def format_signed_ns(delta: float) -> str:
    """Return a difference with its sign."""
    return "0" if abs(delta) < 1e-9 else f"{'+' if delta > 0 else ''}{format_ns(delta)}"


def _format_share(share: float | None) -> str:
    return "" if share is None else "0 %" if abs(share) < 0.005 else format_share(share)


def _name_difference(found: StepComparison) -> str:
    steps = found.ratio.steps if found.ratio else "profiled"
    return f"difference of the median {'unprofiled' if steps == 'unprofiled' else 'profiled'} step"


def _list_evidence(cause: Cause, why: Explanation, common: Sequence[SettingChange]) -> Iterator[str]:
    named = {setting.name: setting for setting in why.settings if setting not in common}
    settings = [named[name] for name in cause.settings if name in named]
    if settings:
        said = "; ".join(map(format_setting, settings[:MOST_SETTINGS]))
        more = f"; and {len(settings) - MOST_SETTINGS} more" if len(settings) > MOST_SETTINGS else ""
        yield f"Consistent with: {said}{more}"
    elif cause.kind in ("slower", "faster") and why.settings_known and not cause.settings:
        yield "Nothing that was recorded explains it: another load or clock of the machine, or code that the ops do not show"
    if cause.kind == "unknown_work" and why.work_ratio is not None and abs(why.work_ratio - 1) > _EQUAL:
        yield f"Ops beside them have {_format_ratio(why.work_ratio)} x the work"
    moved = [part for part in cause.parts if part.delta_ns]
    if cause.kind == "replaced":
        gone, new = ([part for part in moved if (part.b_ns == 0.0) == told] for told in (True, False))
        for word, parts in (("gone", gone), ("new", new)):
            if parts:
                yield f"{word}: {', '.join(f'{_shorten_kernel(part.name)} {format_signed_ns(part.delta_ns)}' for part in parts[:_TOLD])}"
    elif moved:
        yield "; ".join(_format_part(part, cause) for part in moved[:_TOLD])


def _format_part(part: CausePart, cause: Cause) -> str:
    place = "" if part.file is None else f" ({part.file}{'' if part.line is None else f':{part.line}'})"
    said = [f"{_shorten_kernel(part.name) or 'no event near it'}{place} {format_signed_ns(part.delta_ns)}"]
    if part.phase and not cause.phase:
        said.append(part.phase)
    if part.signature_a and part.signature_b and part.signature_a != part.signature_b:
        said.append(f"{part.signature_a} -> {part.signature_b}")
    if part.a_calls and part.b_calls and abs(part.b_calls / part.a_calls - 1) > _EQUAL:
        said.append(f"{format_count(part.a_calls)} -> {format_count(part.b_calls)} calls")
    if part.a_flops and part.b_flops:
        ratio = part.b_flops / part.a_flops
        said.append("as many FLOP" if abs(ratio - 1) <= _EQUAL else f"{_format_ratio(ratio)} x the FLOP")
    if part.kernel_a and part.kernel_b:
        said.append(f"{_shorten_kernel(part.kernel_a)} -> {_shorten_kernel(part.kernel_b)}")
    return ", ".join(said)


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _shorten_kernel(name: str) -> str:
    """Return the name of a kernel without its template arguments, as far as a line has room for it."""
    short = format_kernel_name(name)
    short = short if " (" in short else short.partition("<")[0].partition("(")[0]  # 'Memcpy HtoD (Pageable -> Device)' is no C++
    return shorten_middle(short or name, _LONGEST_NAME)


def _list_notes(found: StepComparison, why: Explanation, common: Sequence[SettingChange]) -> Iterator[str]:
    if common:
        yield f"Consistent with most of these: {'; '.join(map(format_setting, common[:MOST_SETTINGS]))}."
    if any(cause.kind == "rest" and abs(cause.share or 0.0) >= _WORTH_TELLING for cause in why.causes):
        yield (
            f"The parts are means of the profiled steps, which differ by {format_signed_ns(why.profiled_ns)}; "
            "what the profiled steps do not show is the difference of the medians beyond that: the profiler's own cost, "
            "and steps that are unlike the others."
        )
    if any(cause.settings for cause in why.causes):
        yield (
            "Consistent with: it was not the same and can have that effect. That it is the reason only a run with it alone changed can "
            "show (gpudiag ab)."
        )
    if not any(part.a_flops for cause in why.causes for part in cause.parts):
        shapes = any(op.signature_a or op.signature_b for op in found.ops)
        if not shapes and found.ops:
            yield "No shapes were recorded, so that more work cannot be told from slower work: record with record_shapes=True."
    if any(cause.kind == "small" and cause.low_ns is not None for cause in why.causes):
        yield "Changes within noise: no more than the part varies from step to step (interval of 95 %), or less than 0.5 % of the step."

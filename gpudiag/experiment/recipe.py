"""From comparisons to outcomes and the recipe: what was proved to help, and recipe.toml for `gpudiag run --recipe`."""

from __future__ import annotations

import math
import platform
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from gpudiag.cache import find_version
from gpudiag.capture.run_script.plan import Plan, build_environment
from gpudiag.diagnosis.config import parse_toml
from gpudiag.errors import InputError
from gpudiag.experiment.factory import PROGRAM, turn_knobs
from gpudiag.experiment.trial.record import RECORD_WATCHER, RecordPlan
from gpudiag.experiment.variant import PARITY_CLASSES, Variant, describe_variant
from gpudiag.files import read_file
from gpudiag.fixes import REGISTERED, find_fix, make_applier
from gpudiag.fixes.code_location import locate_code
from gpudiag.fixes.fix import Fix
from gpudiag.fixes.knobs import KnobFix
from gpudiag.fixes.registry import RegisteredFix, list_registered, restore_fix
from gpudiag.model.experiment import Comparison, ExperimentData, FixCall, Outcome, Pair, Recipe, make_outcome
from gpudiag.model.patch import PatchRun
from gpudiag.report.experiment.results import find_proof
from gpudiag.report.experiment.verdicts import is_proved
from gpudiag.script_runner import Inject


def decide_outcome(variant: Variant, found: Comparison, *, seconds: float | None = None, screening: bool = False) -> Outcome:
    """Decide a comparison as an experiment of a report; a parity check is added later."""
    cold, warm = find_break_even(found)
    return msgspec.structs.replace(
        make_outcome("+".join(map(str, variant.fixes)), found, screening=screening),
        variant=variant.label or None,
        memory_ratio=_find_median_ratio(found.measured, "peak_bytes"),
        energy_ratio=_find_median_ratio(found.measured, "energy_j"),
        break_even_steps=cold,
        break_even_warm_steps=warm,
        ceiling_share=variant.ceiling_share,
        measured=found.measured,
        seconds=seconds,
    )


def _find_median_ratio(pairs: Sequence[Pair], figure: str) -> float | None:
    both = [(getattr(pair, f"first_{figure}"), getattr(pair, f"second_{figure}")) for pair in pairs]
    ratios = [second / first for first, second in both if first and second is not None]
    return statistics.median(ratios) if ratios else None


def find_break_even(found: Comparison) -> tuple[float | None, float | None]:
    """Return after how many steps (of the program as it is) the longer start of a change has paid back: with cold caches, with warm ones.

    (start of B - start of A) / (t_A - t_B), where t_A is a step of A and t_B the time in which B trains on as much: t_A / ratio. The first
    pair starts with cold caches of the compiler, later ones share them. None: it is not proved to be faster, or there is no such pair.
    """
    if found.verdict != "faster" or found.ratio is None or not found.measured:
        return None, None
    saved, steps = 1 - 1 / found.ratio, []
    for pairs in (found.measured[:1], found.measured[1:]):
        known = [
            max(0.0, pair.second_start_s - pair.first_start_s) / (pair.first_step_ns * 1e-9 * saved)
            for pair in pairs
            if pair.first_step_ns > 0 and pair.first_start_s > 0 and pair.second_start_s > 0
        ]
        steps.append(statistics.median(known) if known else None)
    return steps[0], steps[1]


def is_accepted(one: Outcome, *, checked: bool) -> bool:
    """Return whether a change may be recommended: it is proved to be faster, and, with `checked`, was not left unchecked for parity."""
    known = one.parity is not None and one.parity.verdict != "not_checked"
    return is_proved(one) and (known or not checked)


def list_unchecked(tried: Sequence[tuple[Variant, Outcome]]) -> tuple[str, ...]:
    """List a line on each change that is proved to be faster, and left out of the recipe as its parity is not known."""
    return tuple(
        f"{variant.name} is faster, but no part of the recipe: whether it trains the same was not checked (--no-parity takes it unchecked)"
        for variant, one in tried
        if is_proved(one) and not is_accepted(one, checked=True)
    )


def choose_recipe(tried: Sequence[tuple[Variant, Outcome]], command: Sequence[str], *, checked: bool = True) -> Recipe:
    """Choose the change with the largest proved ratio; where nothing was proved the program stays as it is. `checked`: see is_accepted().

    Changes that were proved one by one are not put together: together they may well be slower.
    """
    best = max(
        ((variant, one) for variant, one in tried if is_accepted(one, checked=checked) and one.ratio is not None),
        key=lambda item: item[1].ratio or -math.inf,
        default=None,
    )
    if best is None:
        return Recipe()
    variant, one = best
    changes = [find_code_change(call) for call in variant.fixes]
    if variant.label:
        changes.append(describe_variant(variant, command))
    return Recipe(fixes=variant.fixes, ratio=one.ratio, interval=one.interval, p=one.p, changes=tuple(changes), proved=True)


def find_code_change(call: FixCall) -> str:
    """Find the code change of a fix, as a person would write it, with the value that was tested."""
    change = find_fix(call.id).change
    return change if call.value is None else f"{change}  # {call}"


RECIPE_SCHEMA = 1

RECIPE_NAME = "recipe.toml"

MAX_RECIPE_BYTES = 1_000_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f\"\\]")
_CONTROL_ONLY = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class _FixRow(msgspec.Struct, omit_defaults=True):
    id: str
    value: str | None = None
    knob: str = ""
    """The knob of a `build` that it turns: a script has none."""
    place: str = ""
    """FILE.py:CLASS or MODULE:CLASS of a fix that is not built in, and the folder in which MODULE is found."""
    folder: str = ""
    title: str = ""
    parity: str = ""
    change: str = ""


class RecipeFile(msgspec.Struct):
    """What a recipe.toml holds."""

    schema: int
    command: list[str] = []
    fix: list[_FixRow] = []
    proved: bool = False
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    parity: str = ""
    measured_with: dict[str, str] = {}
    patch: PatchRun | None = None
    """The run of the patched copy that `gpudiag ab --patch` has offered."""

    @property
    def recipe(self) -> Recipe:
        """The recipe as an experiment gives it."""
        calls = tuple(FixCall(row.id, row.value) for row in self.fix)
        return Recipe(fixes=calls, ratio=self.ratio, interval=self.interval, p=self.p, proved=self.proved)


def format_patch_run(run: PatchRun) -> str:
    """Return the table of recipe.toml that keeps what running a patched copy has shown: `gpudiag apply` need not run it again."""
    rows = msgspec.to_builtins(msgspec.structs.replace(run, parity=msgspec.structs.replace(run.parity, reason="", settings_changed=())))
    lines = [f"{name} = {_format_value(value)}" for name, value in rows.items() if value is not None]
    return "\n".join(["", "[patch]", *lines]) + "\n"


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_format_value(one)}" for name, one in value.items() if one is not None) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _format_string(value) if isinstance(value, str) else repr(value)


def format_recipe(data: ExperimentData, command: Iterable[str] = ()) -> str:
    """Return recipe.toml: its fixes with their values and code changes, what was measured, and with which versions on which device."""
    recipe, one = data.recipe, find_proof(data)
    shown = " ".join(shlex.join(command).split())  # one line: it stands in a comment
    shown = _CONTROL_ONLY.sub("?", shown)
    measured_with = {"gpudiag": find_version("gpudiag"), "torch": find_version("torch"), "python": platform.python_version()}
    measured_with["device"] = data.baseline.device if data.baseline else ""
    lines = [
        "# What `gpudiag ab` proved to make this program faster, all together.",
        f"# gpudiag run --recipe {RECIPE_NAME} {shown or 'train.py ARGS'}",
        "",
        f"schema = {RECIPE_SCHEMA}",
        f"command = [{', '.join(map(_format_string, command))}]",
        f"proved = {'true' if recipe.proved else 'false'}",
        *([] if recipe.ratio is None else [f"ratio = {float(recipe.ratio)!r}"]),
        *([f"interval = [{recipe.interval[0]!r}, {recipe.interval[1]!r}]"] if recipe.interval else []),
        *([] if recipe.p is None else [f"p = {float(recipe.p)!r}"]),
        *([f"pairs = {one.pairs}", f"unit = {_format_string(one.unit)}"] if one else []),
        *([f"parity = {_format_string(one.parity.verdict)}"] if one and one.parity else []),
        "",
        "[measured_with]",
        *(f"{name} = {_format_string(value)}" for name, value in measured_with.items() if value),
    ]
    for call in recipe.fixes:
        descriptor, own = find_fix(call.id), REGISTERED.get(call.id)
        row = _FixRow(call.id, call.value, parity=descriptor.parity, change=find_code_change(call))
        if own is not None and issubclass(own, KnobFix):
            row.knob = own.knob
        elif own is not None:
            place = list_registered([call.id])[0].place
            row.place, row.folder, row.title, row.change = place.target, place.folder, descriptor.title, descriptor.change
        lines += ["", "[[fix]]", *(f"{name} = {_format_string(value)}" for name, value in msgspec.to_builtins(row).items())]
    for change in recipe.changes[len(recipe.fixes) :]:
        lines += ["", "[[change]]", f"text = {_format_string(change)}"]
    return "\n".join(lines) + "\n"


def _format_string(text: str) -> str:
    return '"' + _CONTROL.sub(lambda found: _ESCAPES.get(found[0], f"\\u{ord(found[0]):04x}"), text) + '"'


def read_recipe(path: str, command: Sequence[str] = ()) -> tuple[FixCall, ...]:
    """Read the fixes of a recipe for `command`; () where nothing was proved. A fix that is not built in is registered from its place.

    Raises InputError for no recipe, or a fix that cannot be applied.
    """
    found = read_recipe_file(path)
    for row in (row for row in found.fix if row.place):  # first: what turns knobs is taken back, with whatever was registered meanwhile
        if row.parity not in PARITY_CLASSES:
            raise InputError(f"{path}: fix {row.id}: parity {row.parity!r} is none", f"one of {', '.join(PARITY_CLASSES)}")
        try:
            location = locate_code(row.place, "its place", row.folder)
            restore_fix(RegisteredFix(Fix(row.id, row.title, row.parity, row.change), location))
        except InputError as error:
            hint = error.hint or "correct `place` there, or take this fix out"
            raise InputError(f"{path}: fix {row.id}: {error.message}", hint) from None
    calls = []
    with turn_knobs(command):
        for row in found.fix:
            call = FixCall(row.id, row.value)
            if row.knob and PROGRAM not in command:
                again = shlex.join(["gpudiag", "run", "--recipe", path, *found.command])
                raise InputError(f"{path}: {call} turns the knob cfg.{row.knob} of a build function, which a script does not have", again)
            make_applier(call)
            calls.append(call)
    return tuple(calls)


def read_recipe_file(path: str) -> RecipeFile:
    """Read a recipe.toml. Raises InputError for what is none."""
    target = Path(path)
    try:
        if target.stat().st_size > MAX_RECIPE_BYTES:
            raise InputError(f"{path}: larger than {MAX_RECIPE_BYTES // 1_000_000} MB, this is no recipe")
        found = msgspec.convert(parse_toml(path, read_file(target, MAX_RECIPE_BYTES).decode("utf-8")), type=RecipeFile)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give the recipe.toml that `gpudiag ab` wrote") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: no text in UTF-8, so it is no recipe") from None
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: no recipe ({error})", "give the recipe.toml that `gpudiag ab` wrote") from None
    if found.schema > RECIPE_SCHEMA:
        raise InputError(f"{path}: recipe schema {found.schema}, this gpudiag reads up to {RECIPE_SCHEMA}", "pip install --upgrade gpudiag")
    return found


def inject_fixes(fixes: Sequence[FixCall], command: Sequence[str]) -> Inject:
    """Return what injects `fixes` into each process of `command` that imports torch, beside the recording."""

    def build(plan: Plan, base: Mapping[str, str]) -> dict[str, str]:
        with turn_knobs(command):
            environ = {name: value for call in fixes for name, value in make_applier(call).environ.items()}
            own = list_registered(call.id for call in fixes)
        return build_environment(RecordPlan(plan, tuple(fixes), registered=own).text(), {**base, **environ}, RECORD_WATCHER)

    return build

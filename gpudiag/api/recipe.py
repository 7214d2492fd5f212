"""recipe.toml: what was proved to help, for people to read and for `gpudiag run --recipe` to apply."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.api.candidates import CLASSES, descriptor
from gpudiag.api.claims import proof
from gpudiag.api.installed import version
from gpudiag.api.outcomes import change_of
from gpudiag.errors import InputError
from gpudiag.experiment.factory import PROGRAM, turning
from gpudiag.experiment.fixes import applier
from gpudiag.experiment.fixes.registered import REGISTERED, Registered, register_again, registered
from gpudiag.experiment.importable import place
from gpudiag.experiment.knobs import KnobFix
from gpudiag.files import read_file
from gpudiag.model.experiment import ExperimentData, FixCall, Recipe
from gpudiag.model.fixes import Fix
from gpudiag.report.files import write

SCHEMA = 1

NAME = "recipe.toml"

MAX_BYTES = 1_000_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f\"\\]")
_CONTROL_ONLY = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_PLACE = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")


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


class _File(msgspec.Struct):
    schema: int
    command: list[str] = []
    fix: list[_FixRow] = []


# -- writing ------------------------------------------------------------------------------------------------------------


def recipe_text(data: ExperimentData, command: Iterable[str] = ()) -> str:
    """Return recipe.toml: its fixes with their values and code changes, what was measured, and with which versions on which device."""
    recipe, one = data.recipe, proof(data)
    shown = " ".join(shlex.join(command).split())  # one line: it stands in a comment
    shown = _CONTROL_ONLY.sub("?", shown)
    lines = [
        "# What `gpudiag ab` proved to make this program faster, all together.",
        f"# gpudiag run --recipe {NAME} {shown or 'train.py ARGS'}",
        "",
        f"schema = {SCHEMA}",
        f"command = {_array(command)}",
        f"proved = {'true' if recipe.proved else 'false'}",
        *_number("ratio", recipe.ratio),
        *([f"interval = [{recipe.interval[0]!r}, {recipe.interval[1]!r}]"] if recipe.interval else []),
        *_number("p", recipe.p),
        *([f"pairs = {one.pairs}", f"unit = {_string(one.unit)}"] if one else []),
        *([f"parity = {_string(one.parity.verdict)}"] if one and one.parity else []),
        "",
        *_versions(data),
        *(line for call in recipe.fixes for line in _fix(call)),
        *(line for change in _further(recipe) for line in ("", "[[change]]", f"text = {_string(change)}")),
    ]
    return "\n".join(lines) + "\n"


def write_recipe(path: Path, data: ExperimentData, command: Iterable[str] = ()) -> None:
    """Write recipe.toml. Raises InputError where that fails."""
    write(path, recipe_text(data, command).encode())


def _further(recipe: Recipe) -> tuple[str, ...]:
    """Return the changes that are no fix: those of a variant."""
    return recipe.changes[len(recipe.fixes) :]


def _fix(call: FixCall) -> list[str]:
    found = descriptor(call)
    row = _FixRow(call.id, call.value, parity=found.parity, change=change_of(call))
    own = REGISTERED.get(call.id)
    if own is not None and issubclass(own, KnobFix):
        row.knob = own.knob
    elif own is not None:
        (told,) = registered([call.id])
        row.place, row.folder, row.title, row.change = told.place.target, told.place.folder, found.title, found.change
    return ["", "[[fix]]", *(f"{name} = {_string(value)}" for name, value in msgspec.to_builtins(row).items())]


def _versions(data: ExperimentData) -> list[str]:
    device = data.baseline.device if data.baseline else ""
    known = {"gpudiag": version("gpudiag"), "torch": version("torch"), "python": platform.python_version(), "device": device}
    return ["[measured_with]", *(f"{name} = {_string(value)}" for name, value in known.items() if value)]


def _number(name: str, value: float | None) -> list[str]:
    return [] if value is None else [f"{name} = {float(value)!r}"]


def _array(words: Iterable[str]) -> str:
    return f"[{', '.join(map(_string, words))}]"


def _string(text: str) -> str:
    """Return a basic string of TOML 1.0: quotes, backslashes and control characters are escaped."""
    return '"' + _CONTROL.sub(lambda found: _ESCAPES.get(found[0], f"\\u{ord(found[0]):04x}"), text) + '"'


# -- reading ------------------------------------------------------------------------------------------------------------


def read_recipe(path: str, command: Sequence[str] = ()) -> tuple[FixCall, ...]:
    """Return the fixes of a recipe for `command`; () where nothing was proved. A fix that is not built in is registered from its place.

    Raises InputError for no recipe, or a fix that cannot be applied.
    """
    target = Path(path)
    try:
        if target.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES // 1_000_000} MB, this is no recipe")
        found = msgspec.convert(_parsed(path, read_file(target, MAX_BYTES).decode("utf-8")), type=_File)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give the recipe.toml that `gpudiag ab` wrote") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: no text in UTF-8, so it is no recipe") from None
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: no recipe ({error})", "give the recipe.toml that `gpudiag ab` wrote") from None
    if found.schema > SCHEMA:
        raise InputError(f"{path}: recipe schema {found.schema}, this gpudiag reads up to {SCHEMA}", "pip install --upgrade gpudiag")
    for row in found.fix:
        if row.place:  # before: what turns knobs is taken back in the end, and with it whatever was registered meanwhile
            _register(path, row)
    with turning(command):
        return tuple(_call(path, found, row, command) for row in found.fix)


def _call(path: str, found: _File, row: _FixRow, command: Sequence[str]) -> FixCall:
    """Return a fix that can be applied to `command`. Raises InputError."""
    call = FixCall(row.id, row.value)
    if row.knob and PROGRAM not in command:
        again = shlex.join(["gpudiag", "run", "--recipe", path, *found.command])
        raise InputError(f"{path}: {call} turns the knob cfg.{row.knob} of a build function, which a script does not have", again)
    applier(call)
    return call


def _register(path: str, row: _FixRow) -> None:
    if row.parity not in CLASSES:
        raise InputError(f"{path}: fix {row.id}: parity {row.parity!r} is none", f"one of {', '.join(CLASSES)}")
    fix = Fix(row.id, row.title, row.parity, row.change)
    try:
        register_again(Registered(fix, place(row.place, "its place", row.folder)))
    except InputError as error:
        hint = error.hint or "correct `place` there, or take this fix out"
        raise InputError(f"{path}: fix {row.id}: {error.message}", hint) from None


def _parsed(path: str, text: str) -> dict[str, Any]:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:  # no TOML, or a number of thousands of digits; nested too deeply
        place = _PLACE.search(str(error))
        where = f"line {place[1]}: " if place and place[1] else ""
        raise InputError(f"{path}: {where}not TOML ({_PLACE.sub('', str(error))})") from None

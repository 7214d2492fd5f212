"""Variants: what is compared with the program as it is; fixes that are put into it, or a changed copy of it for what no fix can do."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

import msgspec

from gpudiag.errors import InputError
from gpudiag.experiment.design import Arm
from gpudiag.fixes import are_conflicting, find_fix, make_applier
from gpudiag.model.experiment import FixCall, ParityKind

PARITY_CLASSES: tuple[ParityKind, ...] = get_args(ParityKind)
"""From the strictest to the weakest."""

ChangeKind = Literal["args", "env", "script", "git"]

VARIANT_HINT = "write NAME=args:'--flag 1', NAME=env:KEY=VALUE, NAME=script:FILE.py or NAME=git:REVISION"

_PYTHON_SUFFIXES = (".py", ".pyw")
_PYTHONS = ("python", "pypy")
MAX_DIFF_LINES = 400
"""A longer difference of two scripts is cut: it is there to be read."""


class Change(msgspec.Struct, frozen=True):
    """One thing that a copy of the program has otherwise."""

    kind: ChangeKind
    value: str


class Variant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way of training beside the program as it is: with fixes that are applied together, or started otherwise, or both."""

    fixes: tuple[FixCall, ...] = ()
    label: str = msgspec.field(name="name", default="")
    """What the user calls the changes; '' where there are none."""
    changes: tuple[Change, ...] = ()
    parity: ParityKind = "semantics"
    """How far results may differ by the changes, as told by the user."""
    ceiling_share: float | None = None
    """The most that it can save, as a share of the step, by the findings that name it; None: not known."""

    @property
    def name(self) -> str:
        """How it is called in results."""
        return "+".join([*map(str, self.fixes), *([self.label] if self.label else [])])

    @property
    def kind(self) -> ParityKind:
        """Its parity class: the weakest of its parts."""
        classes: list[ParityKind] = [find_fix(call.id).parity for call in self.fixes]
        return max([*classes, *([self.parity] if self.label else [])], key=PARITY_CLASSES.index, default="exact")


# -- as the user writes them ----------------------------------------------------------------------------------------------


def parse_fix_call(text: str) -> FixCall:
    """Parse the fix of `ID` or `ID=VALUE`. Raises InputError as check_call() does."""
    name, equals, value = text.partition("=")
    call = FixCall(name.strip(), value.strip() if equals else None)
    check_call(call)
    return call


def check_call(call: FixCall) -> None:
    """Raise InputError for a fix that is not known, cannot be applied, or takes no such value. A batch size without one is searched for."""
    if call != FixCall("batch-size"):
        make_applier(call)


def check_combination(fixes: Sequence[FixCall]) -> None:
    """Raise InputError where two of `fixes` cannot be combined."""
    for place, one in enumerate(fixes):
        for other in fixes[place + 1 :]:
            if are_conflicting(one, other):
                raise InputError(f"{one} and {other} cannot be combined", "leave one of them out, or test each by itself (no --combine)")


def parse_variants(texts: Sequence[str]) -> tuple[Variant, ...]:
    """Parse the variants of `--variant` options; those of one name are one variant with all their changes. Raises InputError."""
    found: dict[str, Variant] = {}
    for text in texts:
        one = parse_variant(text)
        before = found.get(one.label, one)
        if before is not one:
            parity = one.parity if one.parity != "semantics" else before.parity
            one = Variant(label=one.label, changes=before.changes + one.changes, parity=parity)
        found[one.label] = one
    return tuple(found.values())


def parse_variant(text: str) -> Variant:
    """Parse the variant of `NAME=KIND:VALUE`, or `NAME:CLASS=KIND:VALUE` with its parity class. Raises InputError."""
    name, equals, rest = text.partition("=")
    name, _, parity = name.partition(":")
    kind, colon, value = rest.partition(":")
    if not (name.strip() and equals and colon and kind in get_args(ChangeKind)) or (kind != "args" and not value.strip()):
        raise InputError(f"--variant {text}: no variant", VARIANT_HINT)
    if parity and parity not in PARITY_CLASSES:
        raise InputError(f"--variant {text}: no parity class {parity!r}", f"one of {', '.join(PARITY_CLASSES)}")
    if kind == "env" and not value.partition("=")[0].strip():
        raise InputError(f"--variant {text}: no variable is named", VARIANT_HINT)
    if kind == "args":
        _split_words(value, text)
    changes = (Change(kind, value),)  # type: ignore[arg-type]  # checked above, as the class is
    return Variant(label=name.strip(), changes=changes, parity=parity or "semantics")


def _split_words(value: str, text: str = "") -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise InputError(f"--variant {text or value}: its arguments cannot be read: {error}", "quote them as for a shell") from None


def find_script(command: Sequence[str]) -> int | None:
    """Find the place of the Python script in a command: of `python train.py`, or of a launcher such as torchrun; None: there is none."""
    python = os.path.basename(command[0]).lower().startswith(_PYTHONS) if command else False
    if len(command) > 1 and python and os.path.exists(command[1]):
        return 1
    for place, word in enumerate(command[1:], 1):
        if word == "-m" and python:
            return None
        if word.endswith(_PYTHON_SUFFIXES) and os.path.isfile(word):
            return place
    return None


# -- as it is started -------------------------------------------------------------------------------------------------------


def apply_variant(variant: Variant, base: Arm, scratch: Path) -> Arm:
    """Return the arm that starts `base` as `variant` says; a revision is laid out in `scratch`, which exists and is removed by the caller.

    Raises InputError for a script or revision that does not exist.
    """
    arm = base
    for change in variant.changes:
        if change.kind == "args":  # after the program's own: argparse and its like take the last one given
            arm = msgspec.structs.replace(arm, command=(*arm.command, *_split_words(change.value)))
        elif change.kind == "env":
            name, _, text = change.value.partition("=")
            arm = msgspec.structs.replace(arm, environ={**arm.environ, name.strip(): text})
        elif change.kind == "script":
            path = os.path.abspath(os.path.expanduser(change.value))
            if not os.path.isfile(path):
                raise InputError(f"--variant script:{change.value}: no such file", "name a copy of the script with the change in it")
            place = find_script(arm.command)
            if place is None:
                raise InputError(f"--variant script:{change.value}: the command has no script that it could replace", "use args: or git:")
            arm = msgspec.structs.replace(arm, command=(*arm.command[:place], path, *arm.command[place + 1 :]))
        else:
            arm = _replace_revision(arm, change.value, scratch)
    return msgspec.structs.replace(arm, name=variant.name, fixes=(*base.fixes, *variant.fixes))


def _replace_revision(arm: Arm, value: str, scratch: Path) -> Arm:
    """Lay the revision out in `scratch` and start there; the repository is only read (its own index is left alone)."""
    place = find_script(arm.command)
    here = Path(arm.cwd or os.getcwd()).resolve()
    script = None if place is None else Path(here, arm.command[place]).resolve()
    folder = script.parent if script else here
    found = _run_git(folder, "rev-parse", "--show-toplevel")
    if found is None:
        raise InputError(f"--variant git:{value}: {folder} is in no git repository", "use script: with a copy of the script")
    top = Path(found).resolve()
    target = scratch / f"revision-{len(list(scratch.iterdir()))}"
    # Write the files of a revision below `target`, as `git read-tree` and `git checkout-index --prefix` export a tree (their manual)
    commit = _run_git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{value}^{{commit}}")
    if not commit:
        raise InputError(f"--variant git:{value}: no such revision in {top}", "name a commit, branch or tag")
    target.mkdir()
    index = {"GIT_INDEX_FILE": f"{target}.index"}
    read = _run_git(top, "read-tree", commit, environ=index)
    if read is None or _run_git(top, "checkout-index", "--all", f"--prefix={target}/", environ=index) is None:
        raise InputError(f"--variant git:{value}: git could not write it out to {target}", "is there space in the temporary folder?")
    command = list(arm.command)
    if place is not None and script is not None:
        command[place] = str(_map_path(script, top, target))
        if not os.path.isfile(command[place]):
            raise InputError(f"--variant git:{value}: {script.relative_to(top)} is not in that revision", "name one that has the script")
    return msgspec.structs.replace(arm, command=tuple(command), cwd=_map_path(here, top, target))


def _map_path(path: Path, top: Path, target: Path) -> Path:
    """Return `path` as it lies in `target`, a copy of `top`; itself where it lies elsewhere, or its folder is not in the copy."""
    if path != top and top not in path.parents:
        return path
    moved = target / path.relative_to(top)
    return path if path.is_dir() and not moved.is_dir() else moved


def _run_git(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *words],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# -- for people ------------------------------------------------------------------------------------------------------------


def describe_variant(variant: Variant, command: Sequence[str]) -> str:
    """Return what to do to train as the variant does: lines for a person, a unified diff where it is another script."""
    words, lines = {"args": "arguments: ", "env": "export ", "git": "git checkout ", "script": "script: "}, []
    for change in variant.changes:
        if change.kind == "script" and (place := find_script(command)) is not None:
            with suppress(OSError, UnicodeDecodeError):
                before = Path(command[place]).read_text(encoding="utf-8").splitlines()
                after = Path(os.path.expanduser(change.value)).read_text(encoding="utf-8").splitlines()
                diff = list(difflib.unified_diff(before, after, command[place], change.value, lineterm=""))
                more = len(diff) - MAX_DIFF_LINES
                if diff:
                    lines += [*diff[:MAX_DIFF_LINES], *([f"... {more} more lines"] if more > 0 else [])]
                    continue
        lines.append(f"{words[change.kind]}{change.value}")
    return "\n".join(lines)

"""A proved fix as a patch of the user's own script: made on its syntax tree, and run before it is offered. The script is not touched."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import msgspec

from gpudiag.cache import find_version
from gpudiag.errors import InputError
from gpudiag.experiment import compare, parity
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.imported_files import read_imported_files
from gpudiag.experiment.isolation import lock_machine, open_experiment
from gpudiag.experiment.plan import Options
from gpudiag.experiment.stats import MIN_OVER_PAIRS
from gpudiag.experiment.trial import patched_script
from gpudiag.experiment.variant import PARITY_CLASSES, find_script
from gpudiag.files import read_file
from gpudiag.fixes import find_fix, make_applier
from gpudiag.fixes.dataloader import LoaderWorkers
from gpudiag.fixes.fix import Applier, NoPlaceError
from gpudiag.model.experiment import Comparison, FixCall, ParityKind, Recipe
from gpudiag.model.patch import Patch, PatchedFix, PatchRun
from gpudiag.report.experiment.summary import AS_IS
from gpudiag.report.experiment.verdicts import format_pair_count, format_ratio
from gpudiag.units import Progress, prefix_progress

MAX_SCRIPT_BYTES = 4_000_000
"""A larger file is no script that somebody wrote."""


def build_patch(path: str, calls: Sequence[FixCall]) -> Patch:
    """Build the patch that makes `calls` in the script at `path`; what cannot be placed for certain says why, and changes nothing.

    Raises InputError for a file that cannot be read, or is no Python.
    """
    before = _read_script(path)
    text, fixes = before, []
    for call in sorted(calls, key=lambda one: one.id != LoaderWorkers.id):  # what belongs to workers needs them
        one = _patch_text(path, text, call)
        text = one.text or text
        fixes.append(one)
    return Patch(path=path, before=before, fixes=tuple(fixes))


def _read_script(path: str) -> str:
    try:
        return read_file(path, MAX_SCRIPT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "no text in UTF-8"
        raise InputError(f"{path}: {why}", "give the Python file whose training was measured") from None


def _patch_text(path: str, text: str, call: FixCall) -> PatchedFix:
    fix, applier = find_fix(call.id), make_applier(call)
    made = PatchedFix(call=call, title=fix.title, change=fix.change)
    try:
        return msgspec.structs.replace(made, text=_apply(applier, text))
    except NoPlaceError as error:
        elsewhere, why = ("", "") if error.line else find_imported_place(path, text, call)
        return msgspec.structs.replace(made, why=why if elsewhere else str(error), line=error.line, elsewhere=elsewhere)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from None


def _apply(applier: Applier, text: str) -> str:
    from gpudiag.fixes.training_code import TrainingCode

    code = TrainingCode(text)
    if applier.environ:
        raise NoPlaceError("it is a variable of the environment, set before Python starts")
    for name, argument in applier.frameworks.items():
        for call in code.find_calls(name):
            kind = name.rpartition(".")[2]
            raise NoPlaceError(f"the framework does it: {kind}(..., {argument})", code.line(call))
    applier.patch(code)
    return code.render_patched()


def find_imported_place(path: str, text: str, call: FixCall) -> tuple[str, str]:
    """Return 'file:line' of a change in the one file that a script imports and that has a place for it, and why that is not certain.

    The reason is '' where it is certain. Returns ('', '') where no such file has a place, or several have one.
    """
    found = []
    for file, source in read_imported_files(Path(path), text):
        name = os.path.relpath(file)
        try:
            changed = _apply(make_applier(call), source)
            edits = [edit for edit in SequenceMatcher(None, source.splitlines(), changed.splitlines()).get_opcodes() if edit[0] != "equal"]
            found.append((f"{name}:{edits[-1][1] + 1}", ""))  # what is imported for it stands above
        except NoPlaceError as error:
            found += [(f"{name}:{error.line}", str(error))] if error.line else []
        except InputError:  # no Python of this version
            continue
    return found[0] if len(found) == 1 else ("", "")


def run_patch(
    patch: Patch, command: Sequence[str], recipe: Recipe, options: Options, *, device: str = "", progress: Progress | None = None
) -> Patch:
    """Return the patch with what its run has shown: the same first losses as the injected fixes, and their gain.

    The patched copy is run in the place of the script, under its name and in its folder. Raises InputError where another experiment runs,
    or the command cannot be started.
    """
    tell = progress or (lambda _: None)
    with lock_machine(shared_ok=options.shared_ok, wait=options.wait, tell=tell), open_experiment() as (scratch, _):
        base = Arm(name=AS_IS, command=tuple(command))
        copy = place_copy(patch, base, scratch)
        run = _check(patch, base, copy, recipe, options.build_design(), scratch, lambda text: tell(prefix_progress("patched copy: ", text)))
    return msgspec.structs.replace(patch, run=msgspec.structs.replace(run, device=device))


def place_copy(patch: Patch, base: Arm, scratch: Path) -> Arm:
    """Return the arm that runs the patched text in the place of the script. Raises InputError where the command runs another file."""
    place = find_script(base.command)
    if place is None or not os.path.samefile(base.command[place], patch.path):
        runs = base.command[place] if place is not None else " ".join(base.command[1:3])
        raise InputError(f"the command runs {runs}, and not {patch.path} itself: a patched copy cannot stand in its place")
    text = scratch / "patched.txt"
    text.write_text(patch.after, encoding="utf-8", newline="")
    return msgspec.structs.replace(
        base, name="patched copy", command=(*base.command[:place], patched_script.__file__, str(text), *base.command[place:])
    )


def _check(patch: Patch, base: Arm, copy: Arm, recipe: Recipe, design: Design, scratch: Path, progress: Progress) -> PatchRun:
    calls = tuple(one.call for one in patch.made)
    environ = {name: value for call in calls for name, value in make_applier(call).environ.items()}
    injected = msgspec.structs.replace(base, name="injected", fixes=calls, environ={**base.environ, **environ})
    folder = scratch / "parity"
    folder.mkdir()
    same = parity.check_parity(injected, copy, choose_class(calls), design, folder, progress=progress)
    run = PatchRun(parity=same, torch=find_version("torch") or "", python=platform.python_version(), digest=patch.digest)
    if same.verdict != "same":
        what = "its first losses are not those of the injected fix" if same.verdict == "differs" else "its losses could not be compared"
        return msgspec.structs.replace(run, refused=f"{what} ({same.reason})")
    found = compare.compare_arms(base, copy, design, progress=progress)
    whole = not patch.left and recipe.interval is not None
    refused = explain_lost_gain(found, recipe.interval if whole else None)
    return msgspec.structs.replace(run, ratio=found.ratio, interval=found.interval, pairs=found.pairs, refused=refused)


def choose_class(calls: Sequence[FixCall]) -> ParityKind:
    """Choose how far a patched copy may be from the injected fixes: by rounding where both change what is trained on."""
    classes: list[ParityKind] = [find_fix(call.id).parity for call in calls]
    weakest: ParityKind = max(classes, key=PARITY_CLASSES.index, default="exact")
    return "rounding" if weakest == "semantics" else weakest


def explain_lost_gain(found: Comparison, injected: tuple[float, float] | None) -> str:
    """Explain why a patched copy does not keep the gain; '' where it does: proved faster, and not less than the injected fix was."""
    if found.verdict != "faster" or found.interval is None or found.over != "pairs":
        seen = format_ratio(found.ratio, found.interval) or (found.notes[0] if found.notes else "it has no result")
        if found.ratio is not None and found.over == "blocks":
            seen += f" over the blocks of {format_pair_count(found.pairs)}, where {MIN_OVER_PAIRS} are needed: give it more time"
        return f"the patched copy is not proved faster ({seen})"
    if injected is not None and found.interval[1] < injected[0]:
        return f"the patched copy keeps a part of the gain only ({format_ratio(found.ratio, found.interval)})"
    return ""


# -- branches -------------------------------------------------------------------------------------------------------------


def commit_patch(patch: Patch, messages: Sequence[str]) -> str:
    """Make a branch with one commit for each fix of the patch, and return its name. Neither the files nor the branch that is checked out
    change, and nothing is pushed.

    Raises InputError where the file is in no repository, or differs from what is committed, or git refuses.
    """
    path = Path(patch.path).resolve()
    top = Path(_run_git(path.parent, ["rev-parse", "--show-toplevel"], "is the script in a git repository?"))
    name = path.relative_to(top.resolve()).as_posix()
    if _run_git(top, ["status", "--porcelain", "--untracked-files=no"]):
        raise InputError(f"the tree of {top} has changes that are not committed", "commit or stash them first")
    listed = _run_git(top, ["ls-files", "--stage", "--", name])
    if not listed:
        raise InputError(f"{patch.path} is not committed", f"git add {name}; git commit")
    branch = f"gpudiag/{'+'.join(one.call.id for one in patch.made)[:80]}"
    if _run_git(top, ["branch", "--list", branch]):
        raise InputError(f"there is a branch {branch} already", f"git branch -D {branch} removes it")
    commit = _run_git(top, ["rev-parse", "HEAD"])
    with open_experiment() as (scratch, _):
        index = {"GIT_INDEX_FILE": str(scratch / "index")}
        _run_git(top, ["read-tree", commit], environ=index)
        for one, message in zip(patch.made, messages, strict=True):
            blob = _run_git(top, ["hash-object", "-w", "--stdin", f"--path={name}"], given=one.text)
            _run_git(top, ["update-index", "--cacheinfo", f"{listed.split()[0]},{blob},{name}"], environ=index)
            tree = _run_git(top, ["write-tree"], environ=index)
            commit = _run_git(top, ["commit-tree", tree, "-p", commit, "-F", "-"], given=message)
    _run_git(top, ["branch", branch, commit])
    return branch


def _run_git(folder: Path, words: Sequence[str], hint: str = "", *, given: str = "", environ: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *words],  # noqa: S607 - the user's git
            input=given.encode(), capture_output=True, check=False, env={**os.environ, **(environ or {})},
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"git cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise InputError(f"git {words[0]}: {said[-1] if said else f'exit code {done.returncode}'}", hint or None)
    return done.stdout.decode(errors="replace").strip()

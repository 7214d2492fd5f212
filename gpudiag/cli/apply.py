"""`gpudiag apply`: the fixes of a recipe as a diff of the script, as its new text, or as commits on a branch. Never pushed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import options, terminal
from gpudiag.cli.command import end_with_starter, interrupt_on_signals
from gpudiag.errors import InputError, UsageError

if TYPE_CHECKING:
    from gpudiag.experiment.plan import Options
    from gpudiag.experiment.recipe import RecipeFile
    from gpudiag.experiment.result import ExperimentResult
    from gpudiag.model.patch import Patch


def apply(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe.toml that `gpudiag ab` wrote.", show_default=False)],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file that was measured.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Write the change into SCRIPT.")] = False,
    commit: Annotated[
        bool, typer.Option("--commit", help="Make a branch with one commit for each fix; nothing is checked out or pushed.")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run the patched copy first, unless `gpudiag ab --patch` has: same losses, same gain.")
    ] = True,
    shared_ok: Annotated[bool, options.SHARED_OK] = False,
) -> None:
    """Print a proved change as a diff of the script; with --write make it, with --commit as a branch."""
    if (write or commit) and not run:
        raise UsageError("--no-run only prints the diff", "leave --write and --commit out")
    from gpudiag.experiment.patch import build_patch, commit_patch
    from gpudiag.experiment.recipe import read_recipe, read_recipe_file
    from gpudiag.report.experiment import patch as words
    from gpudiag.report.files import write_file

    found = read_recipe_file(str(recipe))
    if not found.proved:
        raise InputError(f"{recipe}: nothing was proved, so that there is nothing to apply", "gpudiag ab measures what helps")
    patch = build_patch(str(script), read_recipe(str(recipe), found.command))
    if patch.made and run:
        patch = _run_or_recall(patch, found, shared_ok)
    for one in patch.left:
        terminal.write_note(f"gpudiag: {words.describe_left(one, patch.path)}")
    refused = patch.run.refused if patch.run is not None else ""
    if refused or not patch.made:
        terminal.write_note(f"gpudiag: no patch is offered: {refused or 'the place of no change is certain'}")
        raise typer.Exit(1)
    terminal.write_result(words.format_patch(patch, found.recipe, found.parity))
    if commit:
        branch = commit_patch(patch, [words.format_commit_message(one, patch, found.recipe, found.parity) for one in patch.made])
        terminal.write_note(f"gpudiag: branch {branch} has {len(patch.made)} commit{'s' * (len(patch.made) > 1)}; git switch {branch}")
    if write:
        write_file(script, patch.after.encode())
        terminal.write_note(f"gpudiag: wrote {script}")


def _run_or_recall(patch: Patch, found: RecipeFile, shared_ok: bool) -> Patch:
    """Run the patched copy, unless the recipe holds what its run has shown."""
    import msgspec

    from gpudiag.experiment.patch import run_patch
    from gpudiag.experiment.plan import Options

    if found.patch is not None and found.patch.digest == patch.digest:
        return msgspec.structs.replace(patch, run=found.patch)
    with interrupt_on_signals(), terminal.show_progress("the patched copy") as progress:
        end_with_starter()
        return run_patch(
            patch, _build_command(found.command), found.recipe, Options(shared_ok=shared_ok, sandbox="auto"), progress=progress
        )


def _build_command(words: Sequence[str]) -> list[str]:
    from gpudiag.script_runner import build_run_command

    module = words[1] if len(words) > 1 and words[0] == "-m" else None
    return build_run_command(words if module is None else words[2:], module)


def offer_patch(result: ExperimentResult, command: Sequence[str], options: Options, target: Path) -> bool:
    """Write what an experiment has proved as a diff of its script to `target`, once the patched copy has run; say so, or why not.

    Returns whether it was written.
    """
    from gpudiag.experiment.patch import build_patch, run_patch
    from gpudiag.experiment.recipe import RECIPE_NAME, format_patch_run
    from gpudiag.experiment.variant import find_script
    from gpudiag.report.experiment.patch import build_patch_document, format_patch
    from gpudiag.report.experiment.results import find_proof
    from gpudiag.report.files import write_file

    recipe = result.recipe
    if not command and result.data.baseline is not None:  # one that goes on
        command = result.data.baseline.command
    place = find_script(command)
    if not recipe.proved or not recipe.fixes or place is None:
        why = "the command names no script" if place is None else "no fix is proved to help"
        terminal.write_note(f"gpudiag: no patch: {why}")
        return False
    one = find_proof(result.data)
    trained = one.parity.verdict if one is not None and one.parity is not None else ""
    patch = build_patch(command[place], recipe.fixes)
    written: list[str] = []
    if patch.made:
        device = result.data.baseline.device if result.data.baseline is not None else ""
        with terminal.show_progress("the patched copy") as progress:
            patch = run_patch(patch, command, recipe, options, device=device, progress=progress)
    if patch.run is not None and not patch.run.refused:
        write_file(target, format_patch(patch, recipe, trained).encode())
        written.append(f"The diff is in {target}; git apply {target} makes the change.")
        if result.bundle is not None:
            path = result.bundle / RECIPE_NAME
            write_file(path, (path.read_text(encoding="utf-8") + format_patch_run(patch.run)).encode())
            written.append(f"gpudiag apply {path} {patch.path} --commit makes a branch of it.")
    terminal.write_document(build_patch_document(patch, recipe, written, trained))
    return bool(written)

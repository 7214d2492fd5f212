"""A patch for a person: its diff with what was measured above it, the message of a commit, and what is left to be written by hand."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence

from gpudiag.model.experiment import Recipe
from gpudiag.model.patch import Patch, PatchedFix, PatchRun
from gpudiag.report.blocks import Document, Listing, Paragraph, Section, build_section
from gpudiag.report.console import clean
from gpudiag.report.experiment.verdicts import format_faster, format_pair_count

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
NO_NEWLINE = "\\ No newline at end of file\n"


def build_diff(path: str, before: str, after: str) -> str:
    """Build the unified diff of a file, as `git apply` and `patch -p1` take it; '' where nothing differs."""
    name = os.path.relpath(path).replace(os.sep, "/")
    old, new = (_LINES.findall(text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines)


def list_proof(patch: Patch, recipe: Recipe, parity: str = "") -> list[str]:
    """List what was measured, a line for each: the fixes as they were injected, and the patched copy."""
    names = "+".join(str(one.call) for one in patch.fixes)
    unproved = "; whether it trains the same is not proved: it may change what is trained on"
    trained = {"same": "; trains the same", "not_comparable": unproved}.get(parity, "")
    lines = []
    if recipe.ratio is not None:
        lines.append(f"{names}, injected: {format_faster(recipe.ratio, recipe.interval)}{trained}")
    run = patch.run
    if run is None:
        return [*lines, "this patched copy was not run: whether it does what was measured is not known"]
    steps = f"the first {run.parity.steps} losses and gradients are those of the injected fix"
    gain = format_faster(run.ratio, run.interval) if run.ratio is not None else "its gain is not known"
    lines.append(f"this patched copy: {gain}, over {format_pair_count(run.pairs)}; {steps}")
    return [*lines, _describe_machine(run)]


def _describe_machine(run: PatchRun) -> str:
    versions = [f"torch {run.torch}" if run.torch else "", f"Python {run.python}" if run.python else ""]
    return f"measured on {', '.join(filter(None, [run.device or 'this machine', *versions]))}"


def format_patch(patch: Patch, recipe: Recipe, parity: str = "") -> str:
    """Return the diff of a patch, below comments that `git apply` and `patch` pass over."""
    titles = "; ".join(f"{one.title} ({one.call})" for one in patch.made)
    comments = [f"gpudiag: {titles}", *list_proof(patch, recipe, parity)]
    return "".join(f"# {clean(line, 500)}\n" for line in comments) + build_diff(patch.path, patch.before, patch.after)


def format_commit_message(fix: PatchedFix, patch: Patch, recipe: Recipe, parity: str = "") -> str:
    """Return the message of the commit that makes one fix."""
    proof = "\n".join(f"* {clean(line, 500)}" for line in list_proof(patch, recipe, parity))
    return f"{fix.title}\n\n{fix.change}\n\nMeasured by gpudiag ({fix.call}):\n\n{proof}\n"


def describe_left(one: PatchedFix, path: str) -> str:
    """Describe what a person has to change, and where: 'train.py:60: it takes arguments from **kwargs; by hand: DataLoader(...)'."""
    return f"{one.call}: {describe_place(one, path)}; by hand: {one.change}"


def describe_place(one: PatchedFix, path: str) -> str:
    """Describe where to look for the place of a change that is not certain, and why it is not: 'data.py:41, which train.py imports'."""
    if one.elsewhere:
        return f"{one.elsewhere}, which {path} imports{f': {one.why}' if one.why else ''}"
    return f"{path}{f':{one.line}' if one.line else ''}: {one.why}"


def build_patch_document(patch: Patch, recipe: Recipe, written: Sequence[str], parity: str = "") -> Document:
    """Build what is said of a patch: whether it is offered, what was measured, what was written, and what is left."""
    run = patch.run
    if not patch.made:
        verdict = "No patch: the place of no change is certain."
    elif run is not None and run.refused:
        verdict = f"No patch is offered: {run.refused}."
    else:
        verdict = f"The patch makes {', '.join(str(one.call) for one in patch.made)} in {patch.path}."
    offered = bool(patch.made) and not (run is not None and run.refused)
    sections: list[Section | None] = [
        build_section("Measured", [Listing(tuple(list_proof(patch, recipe, parity)))] if offered else []),
        build_section(
            "To be changed by hand", [Listing(tuple(describe_left(one, patch.path) for one in patch.left))] if patch.left else []
        ),
    ]
    leads = tuple(Paragraph(text) for text in written)
    return Document("Patch", verdict, leads=leads, sections=tuple(one for one in sections if one is not None))

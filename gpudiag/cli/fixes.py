"""`gpudiag fixes`: what `gpudiag ab --fix` can try."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpudiag.cli import terminal

if TYPE_CHECKING:
    from gpudiag.model.fixes import Fix
    from gpudiag.report.fixes import FixPage


def fixes(
    identifier: Annotated[str | None, typer.Argument(metavar="ID", help="A fix, such as bf16.", show_default=False)] = None,
) -> None:
    """List the fixes that an experiment can try; with ID: its code change, conflicts, how it is applied, what has to show it."""
    from gpudiag.errors import UsageError, nearest
    from gpudiag.model.fixes import FIX_BY_ID, FIXES
    from gpudiag.report import fixes as pages

    if identifier is None:
        found = [_page(fix) for fix in FIXES]
        terminal.out(pages.listing(found, width=terminal.columns(), color=terminal.coloured()))
        return
    fix = FIX_BY_ID.get(identifier)
    if fix is None:
        raise UsageError(f"no fix is named {identifier!r}{nearest(identifier, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    terminal.out(pages.full(_page(fix), width=terminal.columns(), color=terminal.coloured()))


def _page(fix: Fix) -> FixPage:
    """Return the descriptor of a fix with what its applier says of itself."""
    from gpudiag.experiment.fixes import APPLIERS
    from gpudiag.report.fixes import FixPage

    applier = next((found for found in APPLIERS if found.id == fix.id), None)
    if applier is None:
        return FixPage(fix, applies=False)
    return FixPage(fix, True, applier.needs_gpu, _applied(applier), _evidence(applier))


def _applied(applier: type[Any]) -> str:
    """Return how a fix is applied: the first sentence of its file, then what its class says, then what its process is started with."""
    module = _first_sentence(getattr(sys.modules.get(applier.__module__), "__doc__", "") or "")
    own = _paragraph(applier.__doc__ or "")
    environ = f"Started with {' '.join(f'{name}={value}' for name, value in applier.environ.items())}." if applier.environ else ""
    return " ".join(dict.fromkeys(text for text in (module, own, environ) if text))


def _evidence(applier: type[Any]) -> str:
    """Return what has to show that a fix took effect: what its method returns, '' where no class of its own says it."""
    from gpudiag.experiment.fixes.fix import Applier

    said = _first_sentence(inspect.getdoc(getattr(applier, "shown", applier.evidence)) or "")
    if said == _first_sentence(inspect.getdoc(Applier.evidence) or ""):
        return ""
    said = said.removeprefix("Return ").strip()
    return said[:1].upper() + said[1:]


def _first_sentence(text: str) -> str:
    first, stop, _ = _paragraph(text).partition(". ")
    return f"{first}{stop.strip()}"


def _paragraph(text: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())

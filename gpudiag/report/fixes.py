"""The fixes that experiments can try, as text: the list, and what there is to know of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpudiag.model.fixes import Fix, Parity
from gpudiag.report.console import QUIET, cells, finished, line, new_console, new_table, print_table, unbroken
from gpudiag.report.escape import clean

if TYPE_CHECKING:
    from rich.text import Text

NOT_ON_GPU = "not verified on a GPU"
ONLY_VARIANT = "not put into a running program: compare a changed copy, --variant NAME=script:COPY.py"
_ROOMY = 92
"""Columns from which class and devices have columns of their own."""
_CLASSES: dict[Parity, str] = {
    "exact": "the same losses and gradients",
    "rounding": "losses and gradients differ as by rounding in float32",
    "low_precision": "they differ as by rounding to 16 bit (or TF32)",
    "semantics": "it trains otherwise: other batches, order or random numbers",
}


class FixPage(msgspec.Struct, frozen=True):
    """One fix with what is known of how it is tried."""

    fix: Fix
    applies: bool
    """Whether it can be put into a running program."""
    needs_gpu: bool = False
    applied: str = ""
    """How it is put into a running program."""
    evidence: str = ""
    """What has to show that it took effect."""


def parity_text(parity: Parity) -> str:
    """Return a parity class as people write it."""
    return parity.replace("_", " ")


def verified_text(page: FixPage) -> str:
    """Return the kinds of devices on which an experiment has shown the fix to work; that no GPU has is always said."""
    kinds = [kind.upper() for kind in page.fix.verified if kind != "gpu"]
    if "gpu" in page.fix.verified:
        return ", ".join([*kinds, "GPU"])
    if page.needs_gpu or not page.applies:  # a CPU has nothing to show of it
        return NOT_ON_GPU
    return "; ".join([*kinds, NOT_ON_GPU])


def listing(pages: Sequence[FixPage], *, width: int = 100, color: bool = False) -> str:
    """Return the fixes as a table of at most `width` columns: id, title and values, class, where each was verified."""
    console, sink = new_console(width, color)
    roomy = console.width >= _ROOMY
    more = (("class", "left"), ("verified", "left")) if roomy else ()
    table = new_table((("--fix", "left"), ("what it does", "wrapped"), *more))
    for page in pages:
        others = (parity_text(page.fix.parity), verified_text(page)) if roomy else ()
        table.add_row(*cells(clean(page.fix.id, 60)), _what(page, roomy), *cells(*others))
    print_table(console, table)
    console.print()
    for parity, meaning in _CLASSES.items():
        line(console, f"{parity_text(parity)}: {meaning}", QUIET)
    line(console, f"{len(pages)} fixes. Code change, conflicts and evidence of one: gpudiag fixes ID", QUIET)
    return finished(sink)


def _what(page: FixPage, roomy: bool) -> Text:
    """Return the cell that says what a fix does: title, then in quieter lines what does not stand in columns."""
    from rich.text import Text

    details = [] if roomy else [f"{parity_text(page.fix.parity)}; {verified_text(page)}"]
    if page.fix.values and page.applies:
        details.append(f"{page.fix.id}=VALUE: {page.fix.values}")
    if not page.applies:
        details.append(ONLY_VARIANT)
    told = Text(unbroken(page.fix.title))
    for said in details:
        told.append(f"\n{unbroken(said)}", style=QUIET)
    return told


def full(page: FixPage, *, width: int = 100, color: bool = False) -> str:
    """Return what there is to know of one fix, as text of at most `width` columns."""
    console, sink = new_console(width, color)
    line(console, f"{page.fix.id}: {page.fix.title}", "bold")
    console.print()
    table = new_table((("", "left"), ("", "wrapped")))
    for topic, said in _topics(page):
        if said:
            table.add_row(*cells(topic, unbroken(said)))
    print_table(console, table)
    return finished(sink)


def _topics(page: FixPage) -> list[tuple[str, str]]:
    fix = page.fix
    value = f", or --fix {fix.id}=VALUE: {fix.values}" if fix.values else ""
    return [
        ("change", fix.change),
        ("try it", f"gpudiag ab --fix {fix.id}{value}" if page.applies else ONLY_VARIANT),
        ("class", f"{parity_text(fix.parity)}: {_CLASSES[fix.parity]}"),
        ("conflicts", ", ".join(fix.conflicts)),
        ("applied", page.applied),
        ("evidence", page.evidence),
        ("needs", "a GPU" if page.needs_gpu else ""),
        ("verified", verified_text(page)),
    ]

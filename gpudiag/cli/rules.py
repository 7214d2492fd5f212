"""`gpudiag rules`: look at the rules and the facts, check and test rule files of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from gpudiag.diagnosis.rule import Rule

app = typer.Typer(name="rules", help="List, show, check and test diagnosis rules.", no_args_is_help=True)

_Dirs = Annotated[list[str] | None, typer.Option("--rules", metavar="DIR", help="Folder of further rules; may be given several times.")]
_Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder of rule files (*.yaml).")]


@app.command("list")
def list_rules(rules: _Dirs = None) -> None:
    """List every rule: id, kinds of device, maturity, title."""
    from gpudiag.diagnosis.loader import load_rules

    table = _table("id", "device", "maturity", "title")
    for rule in load_rules(rules or ()):
        _add(table, rule.id, ", ".join(rule.file.device_kinds), rule.file.maturity, rule.file.title)
    _print(table)


@app.command()
def show(identifier: Annotated[str, typer.Argument(metavar="ID", help="Rule id, such as OVH-01.")], rules: _Dirs = None) -> None:
    """Show one rule: when it fires, why it matters, what it is not, the fixes, where its numbers come from."""
    from gpudiag.diagnosis.expression import nearest
    from gpudiag.diagnosis.loader import load_rules
    from gpudiag.errors import UsageError

    known = {rule.id: rule for rule in load_rules(rules or ())}
    rule = known.get(identifier.upper())
    if rule is None:
        raise UsageError(f"no rule {identifier!r}{nearest(identifier.upper(), known)}", "`gpudiag rules list` lists them")
    _show(rule)


@app.command()
def check(folder: _Folder) -> None:
    """Check the rule files of DIR: every key, name, fix id and number. Fails at the first mistake with file, line and key."""
    from gpudiag.diagnosis.loader import load_folder

    found = load_folder(folder)
    typer.echo(f"{len(found)} rule file{'' if len(found) == 1 else 's'} in {folder}: well formed")


@app.command()
def test(folder: _Folder) -> None:
    """Run the tests inside the rule files of DIR (exit code 1 where one fails)."""
    from gpudiag.diagnosis.loader import load_folder
    from gpudiag.diagnosis.selftest import self_test

    found = load_folder(folder)
    failures = self_test(found)
    for failure in failures:
        typer.echo(failure, err=True)
    count = sum(len(rule.file.tests) for rule in found)
    typer.echo(f"{count - len({failure.rsplit(': ', 1)[0] for failure in failures})} of {count} test{'' if count == 1 else 's'} hold")
    if failures:
        raise typer.Exit(1)


@app.command()
def facts() -> None:
    """List the facts that rules may compare, with their units."""
    from gpudiag.facts import CATALOGUE

    table = _table("fact", "unit", "what it is")
    for fact in CATALOGUE.values():
        _add(table, fact.name, fact.unit, fact.doc)
    _print(table)


def _show(rule: Rule) -> None:
    file = rule.file
    typer.echo(f"{file.id}  {file.title}\n")
    table = _table("", "", header=False)
    rows = [
        ("fires when", file.when),
        *((f"  {name}", f"{param.value:g}  ({param.origin})") for name, param in file.params.items()),
        ("severity", "; ".join(level if when is True else f"{level} when {when}" for level, when in file.severity.items())),
        ("says", file.message),
        ("why", " ".join(file.why.split())),
        ("at most", f"{file.ceiling.time_ns}  (if {file.ceiling.what_if})" if file.ceiling else "no gain of its own"),
        ("explains", ", ".join(file.explains)),
        ("fixes", ", ".join(file.fixes)),
        ("device", ", ".join(file.device_kinds)),
        ("maturity", file.maturity),
        ("references", "\n".join(file.references)),
        ("file", rule.source),
    ]
    for label, text in rows:
        if text:
            _add(table, label, text)
    _print(table)


def _table(*columns: str, header: bool = True) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=header, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain texts: what stands in a rule file is no markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))


def _print(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)

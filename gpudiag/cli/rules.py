"""`gpudiag rules`: look at the rules and the facts, check and test rule files of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import completion, config, options, terminal
from gpudiag.cli.command import PlainCommand, PlainGroup

if TYPE_CHECKING:
    from gpudiag.diagnosis.rule import RuleBase

rules_app = typer.Typer(cls=PlainGroup, name="rules", help="List, show, check and test the rules.", no_args_is_help=True)
_command = partial(rules_app.command, cls=PlainCommand)

_Dirs = Annotated[list[str] | None, options.RULES]
_NoConfig = Annotated[bool, options.NO_CONFIG]
_Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder of rule files (*.yaml).")]


@_command("list")
def list_rules(rules: _Dirs = None, no_config: _NoConfig = False) -> None:
    """List every rule: id, kinds of device, maturity, title."""
    from gpudiag.diagnosis.config import list_config_changes
    from gpudiag.report.rule_pages import name_rule_state

    base = _load_rules(rules, no_config)
    rows = [(rule.id, ", ".join(rule.file.device_kinds), name_rule_state(rule), rule.file.title) for rule in base.all]
    off = sum(1 for rule in base.judged if rule.disabled)
    counts = [f"{len(base.judged) - off} judged", f"{len(base.advisories)} advisory"] + ([f"{off} switched off"] if off else [])
    changed = [f"changed: {note}" for note in list_config_changes(rule for rule in base.judged if rule.changed)]
    _print_rows(("id", "device", "maturity", "title"), rows, (f"{len(base.all)} rules: {', '.join(counts)}", *changed))


@_command()
def show(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="Rule id, such as OVH-01.", autocompletion=completion.complete_rule)],
    rules: _Dirs = None,
    no_config: _NoConfig = False,
) -> None:
    """Show one rule: when it fires, why it matters, its fixes, the origin of its numbers."""
    from gpudiag.errors import UsageError, suggest_nearest
    from gpudiag.report.blocks import Document
    from gpudiag.report.rule_pages import build_rule_topics, name_rule_category, name_rule_state

    known = {rule.id: rule for rule in _load_rules(rules, no_config).all}
    rule = known.get(identifier.upper())
    if rule is None:
        raise UsageError(f"no rule {identifier!r}{suggest_nearest(identifier.upper(), known)}", "`gpudiag rules list` lists them")
    title = f"{rule.id}: {rule.file.title} ({name_rule_category(rule)}, {name_rule_state(rule)})"
    terminal.write_document(Document("gpudiag rules", title, foot=(build_rule_topics(rule),)))


@_command()
def docs(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("rules.html"),
    rules: _Dirs = None,
    no_config: _NoConfig = False,
) -> None:
    """Write all rules as one self-contained HTML page: an index by category, each rule at #ID."""
    from importlib.metadata import version

    from gpudiag.report.files import write_file
    from gpudiag.report.render_html import render_page
    from gpudiag.report.rule_pages import build_rules_document

    options.check_targets([output], "", (".html",))
    base = _load_rules(rules, no_config)
    write_file(output, render_page(build_rules_document(base, f"gpudiag {version('gpudiag')}")).encode())
    typer.echo(f"wrote {output}: {len(base.all)} rules")


@_command()
def check(folder: _Folder) -> None:
    """Check the rule files of DIR: every key, name, fix id, number and query. Fails at the first mistake with file, line and key."""
    from gpudiag.diagnosis.loader import read_folder
    from gpudiag.facts.old_names import OLD_NAMES

    found = read_folder(folder)
    typer.echo(f"{len(found.all)} rule file{'' if len(found.all) == 1 else 's'} in {folder}: well formed")
    for name in found.old_names:
        typer.echo(f"{name} is an old name, which holds through version 0.2: {OLD_NAMES[name].doc}", err=True)


@_command()
def test(folder: _Folder) -> None:
    """Run the tests inside the rule files of DIR (exit code 1 where one fails)."""
    from gpudiag.diagnosis.loader import read_folder
    from gpudiag.diagnosis.rule_check import self_test

    found = read_folder(folder)
    failures = self_test(found.judged)
    for failure in failures:
        typer.echo(_clean_lines(failure), err=True)
    count = sum(len(rule.file.tests) for rule in found.judged)
    typer.echo(f"{count - len({failure.rsplit(': ', 1)[0] for failure in failures})} of {count} test{'' if count == 1 else 's'} hold")
    if failures:
        raise typer.Exit(1)


@_command()
def facts(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Only facts whose name, unit or text has each WORD; or the path of a field.")
    ] = None,
) -> None:
    """List the facts that rules can use, with their units."""
    from gpudiag.facts import CATALOGUE
    from gpudiag.facts.fields import find_field

    wanted = [word.lower() for word in words or ()]
    found = [fact for fact in CATALOGUE.values() if all(word in f"{fact.name} {fact.unit} {fact.doc}".lower() for word in wanted)]
    found += [field for word in words or () if (field := find_field(word)) is not None]
    rows = [(fact.name, fact.unit, fact.doc) for fact in found]
    _print_rows(("fact", "unit", "what it is"), rows, (f"{len(found)} of {len(CATALOGUE)} facts",))


def _load_rules(rules: list[str] | None, no_config: bool) -> RuleBase:
    from gpudiag.diagnosis.loader import load_active_rules

    options.check_named("--rules", rules or [], "give a folder of rule files")
    return load_active_rules(rules or (), None if no_config else config.find_config())


def _print_rows(titles: Sequence[str], rows: Sequence[tuple[str, ...]], notes: Sequence[str]) -> None:
    from gpudiag.report.blocks import Column, Document, Table, build_row, say_all

    columns = (*map(Column, titles[:-1]), Column(titles[-1], "words"))
    tables = (Table(columns, tuple(build_row(*row) for row in rows)),) if rows else ()
    terminal.write_document(Document("gpudiag rules", "", leads=tables, foot=tuple(say_all(notes))))


def _clean_lines(text: str) -> str:
    from gpudiag.report.console import clean

    # Characters of a line: no text in a rule file is longer (diagnosis.rule_yaml)
    return "\n".join(clean(line, 65_536) for line in text.split("\n"))

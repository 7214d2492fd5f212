"""Arguments that need no conversion are taken as they are; numbers and choices are still checked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

from gpudiag.cli.command import PlainCommand, PlainGroup
from gpudiag.errors import UsageError

_SEEN: dict[str, Any] = {}


def _probe(
    words: Annotated[list[str], typer.Argument()],
    name: Annotated[str, typer.Option()] = "none",
    target: Annotated[Path | None, typer.Option("--target", "-t")] = None,
    outputs: Annotated[list[Path] | None, typer.Option("--output", "-o")] = None,
    top: Annotated[int | None, typer.Option(min=0)] = None,
    price: Annotated[float, typer.Option()] = 2.5,
    kind: Annotated[Literal["csv", "parquet"], typer.Option()] = "csv",
    folder: Annotated[Path, typer.Option()] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet")] = False,
    checked: Annotated[str, typer.Option(callback=lambda value: value.upper())] = "x",
) -> None:
    _SEEN.update(locals())


def _app(plain: bool) -> typer.Typer:
    app = typer.Typer(cls=PlainGroup if plain else None, add_completion=False, rich_markup_mode=None)
    partial(app.command, cls=PlainCommand if plain else None)("probe")(_probe)
    app.callback()(lambda: None)
    return app


def _ran(plain: bool, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, dict[str, Any]]:
    """Return exit code, and what the function was given with the types."""
    _SEEN.clear()
    code: Any = 0
    try:
        _app(plain)(["probe", *arguments], prog_name="gpudiag")
    except SystemExit as stop:
        code = stop.code
    except UsageError as error:  # `main` says it in one line
        code = error.exit_code
    capsys.readouterr()
    return code, {name: (type(value), value) for name, value in _SEEN.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.json"],
        ["a", "b", "-o", "x.html", "-o", "y.md", "-t", "z", "--quiet"],
        ["a", "--name", "", "--folder", "", "--checked", "word"],
        ["a", "--top", "3", "--price", "7", "--kind", "parquet"],
        ["a", "--top", "-1"],
        ["a", "--top", "x"],
        ["a", "--price", "dear"],
        ["a", "--kind", "xml"],
        ["a", "--name"],
        ["a", "--unknown"],
        [],
        ["--", "-a"],
        ["\udcff.json", "-t", "\u00e9"],
    ],
    ids=str,
)
def test_arguments_are_what_the_library_makes_of_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _ran(True, arguments, capsys) == _ran(False, arguments, capsys)

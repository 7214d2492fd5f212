"""Commands that take arguments as they are where these need no conversion: text, paths and defaults.

typer converts every value by pydantic (from 0.29 on), which takes as long to load as all else that a command needs to start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from gpudiag.cli import hints

_TEXT: dict[Any, tuple[type, bool]] = {str: (str, False), Path: (Path, False), list[str]: (str, True), list[Path]: (Path, True)}
"""Annotation -> what a word becomes, and whether there may be several."""


_SENTENCE = 200
"""Characters of the first sentence of a command in the list of commands: it is shown whole, on lines of its own where it is long."""


class PlainCommand(TyperCommand):
    """A command that has numbers and choices converted alone."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help."""
        return super().get_short_help_str(max(limit, _SENTENCE))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also --help."""
        return _spared(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the parsed arguments. Raises UsageError for an option that other tools have, and what does the same here."""
        hints.check_format(self.name, args)
        return super().parse_args(ctx, args)


class PlainGroup(TyperGroup):
    """A group of commands, as PlainCommand."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help."""
        return super().get_short_help_str(max(limit, _SENTENCE))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of `args`. Raises UsageError for a script, a recording or a rule there, with the call that was meant."""
        hints.check_command(None if ctx.parent is None else self.name, args, self.commands)
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also --help."""
        return _spared(super().get_params(ctx))


def _spared(parameters: list[Any]) -> list[Any]:
    """Return `parameters`, each of which converts nothing that is already what it should be; those of an older typer as they are."""
    for parameter in parameters:
        if "process_value" not in vars(parameter) and hasattr(parameter, "type_descriptor"):
            parameter.process_value = _process(parameter)
    return parameters


def _process(parameter: Any) -> Any:
    """Return what takes the place of `parameter.process_value`."""
    convert = parameter.process_value
    make, several = _TEXT.get(getattr(parameter.type_descriptor, "annotation", None), (None, False))

    def process(ctx: Any, value: Any) -> Any:
        if not parameter.required and _is_default(ctx, parameter):
            taken = () if value is None and (parameter.multiple or parameter.nargs == -1) else value
        elif make is None or not value or isinstance(value, str) == several:
            return convert(ctx, value)
        else:
            taken = [make(word) for word in value] if several else make(value)
        return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)

    return process


def _is_default(ctx: Any, parameter: Any) -> bool:
    return getattr(ctx.get_parameter_source(parameter.name), "name", "") == "DEFAULT"

"""What help texts, messages and hints tell people to type exists: commands, and their options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gpudiag.cli import app

ROOT = Path(__file__).resolve().parents[2]
TYPED = re.compile(r"\bgpudiag ([a-z][a-z-]*)((?: +(?!gpudiag)[^\s`'\"();,:|]+)*)")
"""A command as a text names it, with the words behind it."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
GROUP = typer.main.get_command(app)
assert hasattr(GROUP, "commands")


def options(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    own = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    return own.union(*(options(below) for below in getattr(command, "commands", {}).values()))


COMMANDS: dict[str, Any] = GROUP.commands  # type: ignore[attr-defined]
KNOWN = {name: options(command) for name, command in COMMANDS.items()}


def helps(command: Any) -> Iterator[str]:
    yield from (command.help or "", command.epilog or "", *(getattr(one, "help", None) or "" for one in command.params))
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_a_help_text_names_exist(name: str) -> None:
    everywhere = set().union(*KNOWN.values())
    for text in helps(COMMANDS[name]):
        for option in OPTION.findall(TYPED.sub("", re.sub(r"'--[^']*'", "", text))):
            assert option in KNOWN[name] or option in everywhere, f"gpudiag {name} --help: {option}"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module with their lines; what is filled in stands as '{}'. Docstrings too: rules and help are made of them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_commands_that_messages_and_hints_name_exist() -> None:
    seen, wrong = 0, []
    for path in sorted((*(ROOT / "gpudiag").rglob("*.py"), *(ROOT / "dashboard").rglob("*.py"))):
        for line, text in texts(path):
            for command, words in TYPED.findall(text):
                if command not in KNOWN and not OPTION.search(words) and f"`gpudiag {command}" not in text:
                    continue  # a sentence about gpudiag
                seen += 1
                script = re.split(r" -- | (?:torchrun|\S+\.py)\b", words)[0] if command in ("run", "ab") else words  # its own options
                missing = [command] if command not in KNOWN else [one for one in OPTION.findall(script) if one not in KNOWN[command]]
                wrong += [f"{path.relative_to(ROOT)}:{line}: gpudiag {command}{words}: {missing}"] * bool(missing)
    assert seen > 100
    assert wrong == []

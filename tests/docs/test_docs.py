"""The documents are true: commands exist, code compiles, links lead somewhere, the changelog knows this version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sitepages import fill_markers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OTHERS = re.compile(r"^(\..*|build|dist|runs|node_modules)$")
"""Folders that are no part of the project: caches, environments, what builds and runs leave."""
DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not any(map(OTHERS.match, path.relative_to(ROOT).parts)))
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORDS = r"gpudiag ((?:[a-z]+ ?)+)"
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _blocks(name: str, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(_text(name)) if found == language]


def _named(name: str) -> list[str]:
    """Return what follows `gpudiag` in the shell blocks and the inline code of a document."""
    shell = "\n".join((*_blocks(name, "bash"), *_blocks(name, "console")))
    return re.findall(rf"^(?:\$ |\S*/)?{WORDS}", shell, re.MULTILINE) + re.findall(rf"`{WORDS}", FENCE.sub("", _text(name)))


@cache
def _help(*command: str) -> str:
    """Return the help of a command as plain text; fails where there is no such command."""
    done = subprocess.run(
        [sys.executable, "-m", "gpudiag", *command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": "200", "TERM": "dumb"},
    )
    assert done.returncode == 0, f"gpudiag {' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def _panels(*group: str) -> dict[str, set[str]]:
    """Return the names that the help of `group` lists, by the title they stand under."""
    parts = re.split(r"^(\S.*):$", _help(*group), flags=re.MULTILINE)[1:]
    found = {title: set(re.findall(r"^ {2}([a-z][a-z-]*)(?=  |$)", listed, re.MULTILINE)) for title, listed in _pair(parts)}
    return {title: names for title, names in found.items() if names}


def _pair(parts: list[str]) -> Iterator[tuple[str, str]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _commands(*group: str) -> set[str]:
    """Return the names that the help of `group` lists."""
    return set().union(*_panels(*group).values())


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_documents_exist(name: str) -> None:
    for found in _named(name):
        words = found.split()
        if words[0] in _commands():
            group = _commands(words[0])
            assert not group or len(words) == 1 or words[1] in group, f"gpudiag {found}"
        else:
            pytest.fail(f"{name} names `gpudiag {found}`; there are {sorted(_commands())}")


def test_every_command_stands_in_the_tables_of_the_command_line() -> None:
    commands = _commands()
    assert {"report", "rules"} <= commands
    page = _text("docs/commands.md")
    sections = _pair(re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:])
    tables = {title: set(re.findall(r"^\| `gpudiag ([a-z]+)", text, re.MULTILINE)) for title, text in sections}
    assert {title: names for title, names in tables.items() if names} == _panels()
    assert all(f"`{sub}" in page for group in ("rules", "export") for sub in _commands(group))


def test_every_command_has_help() -> None:
    for command in _commands():
        lines = [line.strip(" │|") for line in _help(command).splitlines()]
        assert [line for line in lines if len(line) > 20 and not line.startswith(("Usage", "--"))], command


@pytest.mark.parametrize("name", NAMES)
def test_options_in_documents_exist(name: str) -> None:
    for block in (*_blocks(name, "bash"), *_blocks(name, "console")):
        for command, rest in re.findall(r"gpudiag ([a-z]+)(.*)$", block.replace("\\\n", " "), re.MULTILINE):
            own = rest.partition("#")[0].partition(" torchrun ")[0]  # what follows a launcher is the launcher's and the script's
            own = re.split(r" \S+\.py\b", own)[0] if command in ("run", "ab") else own
            sub = own.split()[0] if own.split() and own.split()[0] in _commands(command) else None
            help_text = _help(command) if sub is None else _help(command, sub)
            for option in re.findall(r"(?<= )(--?[a-z][a-z-]*)", own):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), f"{name}: gpudiag {command} {option}"


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.MULTILINE))
    named: set[str] = set()
    for name in NAMES:
        shell = "\n".join(_blocks(name, "bash"))
        named |= {*re.findall(r"^make ([a-z-]+)", shell, re.MULTILINE), *re.findall(r"`make ([a-z-]+)", FENCE.sub("", _text(name)))}
    assert {"demo", "test", "docs"} <= named <= targets


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile_and_name_what_exists(name: str) -> None:
    import gpudiag

    for code in _blocks(name, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpudiag":
                assert hasattr(gpudiag, node.attr), f"{name}: gpudiag.{node.attr}"


@cache
def _anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a document, as GitHub and mkdocs make them, those of its generated parts too."""
    text = FENCE.sub("", fill_markers(path.read_text(encoding="utf-8")))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    text = FENCE.sub("", _text(name))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            found = (ROOT / name).parent.joinpath(path) if path else ROOT / name
            assert found.exists(), f"{name} links to {target}"
            assert not heading or heading in _anchors(found), f"{name} links to {target}"


def test_the_changelog_knows_this_version() -> None:
    assert re.search(rf"^## \[{re.escape(VERSION)}\]", _text("CHANGELOG.md"), re.MULTILINE)


def test_the_readme_says_first_what_it_is_and_how_to_run_it() -> None:
    first_screen = _text("README.md").splitlines()[:80]
    assert first_screen[0] == "# gpudiag"
    assert {"make demo", "make test"} <= {line[:9] for line in first_screen}


def test_the_readme_is_read_in_two_minutes() -> None:
    lines = _text("README.md").splitlines()
    assert 120 <= len(lines) <= 150
    report = next(code for code in _blocks("README.md", "text"))
    assert len(report.splitlines()) <= 25
    picture = re.search(r"!\[.+\]\((\S+\.png)\)", _text("README.md"))
    assert picture
    assert (ROOT / picture[1]).stat().st_size < 300_000

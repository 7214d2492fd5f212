"""`gpudiag skill`, and `gpudiag mcp` where it cannot serve."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpudiag.agents.jobs import COMMANDS
from gpudiag.agents.questions import QUESTIONS, name_tool
from gpudiag.agents.skill import read_instructions, read_skill
from gpudiag.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `gpudiag ARGUMENTS` in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpudiag", *map(str, arguments)])
        code = main()
        return (code, *capsys.readouterr())

    return call


def test_the_skill_is_a_skill(run: Run) -> None:
    code, out, _ = run("skill")
    assert code == 0
    assert out == read_skill()
    _, head, text = out.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    assert found["name"] == "gpudiag"
    assert 50 < len(found["description"]) <= 1_024
    assert "## How to read" in text
    assert "## What not to conclude" in text
    assert "<!--" not in text


def test_the_instructions_of_the_server_are_its_essence_and_name_the_tools() -> None:
    told = read_instructions()
    assert told in read_skill()
    assert len(told.encode()) <= 2_000
    assert {name_tool(kind) for kind in QUESTIONS} - {name for name in map(name_tool, QUESTIONS) if f"`{name}`" in told} <= {"experiments"}


def test_every_tool_has_a_line_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    assert [name for name in map(name_tool, (*QUESTIONS, *COMMANDS)) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(("version", "words"), [(None, "which is not installed"), ("1.27.0", "this is 1.27.0")])
def test_without_the_library_one_line_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    monkeypatch.setattr("gpudiag.cache.find_version", lambda package: version)
    code, out, err = run("mcp", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert "pip install 'gpudiag[mcp]'" in err


def test_the_server_gets_what_was_asked_for_and_a_person_is_told_who_starts_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("gpudiag.cache.find_version", lambda package: "2.3.0")
    monkeypatch.setattr("gpudiag.agents.server.serve", lambda *given, **more: served.append((*given, more)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpudiag.toml").write_text('disable = ["OVH-01"]')
    assert run("mcp", "--allow-run", "--time-limit", 9) == (0, "", "")
    assert (served[0][0], served[0][1].disable, served[0][2]) == (tmp_path.resolve(), ("OVH-01",), {"allow_run": True, "limit_s": 9})
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())
    code, out, err = run("mcp", tmp_path, "--no-config")
    assert (code, out) == (0, "")
    assert "starts this" in err
    assert served[1][1].disable == ()
    assert served[1][2]["allow_run"] is False


def test_a_root_that_is_no_folder_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "is a file"), (tmp_path / "none", "does not exist")):
        code, _, err = run("mcp", path)
        assert code == 2
        assert words in err

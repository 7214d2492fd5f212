"""The documentation as mkdocs builds it: every page is in the menu, generated parts are whole, no link leads nowhere, nothing is loaded."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from sitepages import build_pages, fill_markers

import gpudiag
from gpudiag.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}


def in_menu(entry: Any) -> list[str]:
    """Return the pages of an entry of the menu, those below it too."""
    if isinstance(entry, str):
        return [entry]
    return [page for below in (entry.values() if isinstance(entry, dict) else entry) for page in in_menu(below)]


def test_the_menu_has_every_page_once() -> None:
    menu = in_menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(menu) == sorted((*PAGES, *build_pages.BESIDE.values()))


def test_every_command_and_option_stands_in_the_generated_part() -> None:
    made = build_pages.describe_commands()

    def check(name: str, command: Any) -> None:
        part = re.split(r"^##+ ", made.partition(f" {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        for one in command.params:
            assert one.param_type_name == "argument" or max(one.opts, key=len) in part, f"{name} {one.name}"
        for sub, below in getattr(command, "commands", {}).items():
            check(f"{name} {sub}", below)

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        check(f"gpudiag {name}", command)


def test_every_public_name_stands_in_the_generated_part_with_its_docstring() -> None:
    made = build_pages.describe_python()
    assert f"## gpudiag.__version__\n\n`{gpudiag.__version__}`" in made
    for name in (one for one in gpudiag.__all__ if one != "__version__"):
        _, _, part = made.partition(f"## gpudiag.{name}\n")
        first = (getattr(gpudiag, name).__doc__ or "").strip().splitlines()[0]
        assert first.partition("`")[0].partition("<")[0] in part, name


def test_every_rule_stands_in_the_generated_part() -> None:
    titles = re.findall(r"^### ([A-Z]+-\d+) ", build_pages.describe_rules(), re.MULTILINE)
    assert sorted(titles) == sorted(path.stem for path in (ROOT / "rules").glob("*/*.yaml"))


def test_each_generated_part_stands_in_one_page() -> None:
    named = [part for path in PAGES.values() for part in build_pages.MARKER.findall(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(build_pages.PARTS)


def test_a_link_out_of_the_pages_leads_to_a_page_or_names_the_file() -> None:
    text = "[rule](../../rules/README.md#the-keys), [ours](../../samples/ci), [gain](../../gpudiag/diagnosis/gains.yaml), [up](../terms.md)"
    assert build_pages.lead_links_to_pages(text, "docs/start/ci.md") == (
        "[rule](../writing-rules.md#the-keys), ours (`samples/ci`), gain (`gpudiag/diagnosis/gains.yaml`), [up](../terms.md)"
    )
    code = "```python\nx = f[1](../README.md)\n```"
    assert build_pages.lead_links_to_pages(code, "docs/terms.md") == code


@pytest.mark.slow
def test_the_pages_are_built_without_a_warning_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'gpudiag[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) >= len(PAGES) + len(build_pages.BESIDE)
    for page in built:
        text = page.read_text(encoding="utf-8")
        assert "<!-- generated:" not in text, page
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//[^>]+>|<link [^>]*href=\"(?:https?:)?//[^>]+>", text)
        assert not loaded, f"{page}: {loaded}"


def test_filling_needs_a_part_that_something_makes() -> None:
    with pytest.raises(KeyError):
        fill_markers("<!-- generated: nothing -->")

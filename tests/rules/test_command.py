"""`gpudiag rules ...`: what the commands say of the built-in rules and of files with mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpudiag.cli.rules import rules_app
from gpudiag.diagnosis.loader import read_rules
from gpudiag.errors import InputError, UsageError

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = str(ROOT / "rules")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(rules_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_names_every_rule() -> None:
    listed = run("list")
    for path in (ROOT / "rules").rglob("*.yaml"):
        assert path.stem in listed


def test_show_gives_condition_numbers_and_their_origin() -> None:
    shown = run("show", "inp-01")
    for words in ("loader_wait_share >= min_share", "TraceML", "loader-workers", "the next batch was always ready"):
        assert words in " ".join(shown.split())


def test_show_of_an_unknown_rule_suggests_one() -> None:
    with pytest.raises(UsageError, match="no rule 'OVH-1'; did you mean 'OVH-01'"):
        run("show", "OVH-1")


def test_check_and_test_work_on_the_built_in_folder() -> None:
    assert f"{len(list((ROOT / 'rules').rglob('*.yaml')))} rule files" in run("check", BUILT_IN)
    held, _, total = run("test", BUILT_IN).split()[:3]
    assert held == total


def test_a_failing_inline_test_is_exit_code_1(tmp_path: Path) -> None:
    text = (ROOT / "rules" / "dst" / "DST-01.yaml").read_text().replace("DST-01", "LAB-01").replace("category: dst", "category: lab")
    (tmp_path / "LAB-01.yaml").write_text(text.replace("expect: critical", "expect: info"))
    result = CliRunner().invoke(rules_app, ["test", str(tmp_path)])
    assert result.exit_code == 1
    assert "LAB-01.yaml: test 1 (a slow link): expected info, got critical" in result.output
    held = re.search(r"(\d+) of (\d+) tests hold", result.output)
    assert held is not None
    assert int(held[1]) < int(held[2])


def test_check_names_the_mistake(tmp_path: Path) -> None:
    (tmp_path / "LAB-01.yaml").write_text("schema: 1\nid: LAB-01\ntitel: x\n")
    with pytest.raises(InputError, match=r"LAB-01\.yaml:3: titel: unknown key; did you mean 'title'"):
        run("check", str(tmp_path))


def test_facts_lists_units_and_can_be_searched() -> None:
    assert "loader_wait_ns" in run("facts")
    found = run("facts", "loader", "SHARE")
    assert "loader_wait_share" in found
    assert "optimizer_share" not in found
    assert run("facts", "no such word").startswith("0 of ")


def test_list_counts_what_is_judged() -> None:
    total = len(list((ROOT / "rules").rglob("*.yaml")))
    base = read_rules()
    assert f"{total} rules: {len(base.judged)} judged, {len(base.advisories)} advisory" in run("list")


def test_show_of_advice_says_what_would_be_needed(tmp_path: Path) -> None:
    text = "schema: 1\nid: LAB-09\ntitle: x\ncategory: lab\nmaturity: advisory\ndevice_kinds: [gpu]\nbound: compute\n"
    (tmp_path / "LAB-09.yaml").write_text(text + "why: y\nneeds: a <b>counter</b>\nreferences: [none]\n")
    shown = " ".join(run("show", "LAB-09", "--rules", str(tmp_path)).split())
    assert "needs a <b>counter</b>" in shown
    assert "never: no recording" in shown
    page = tmp_path / "rules.html"
    run("docs", "-o", str(page), "--rules", str(tmp_path))
    written = page.read_text()
    for rule in read_rules().all:
        assert f'id="{rule.id}"' in written
    assert "a &lt;b&gt;counter&lt;/b&gt;" in written
    assert written.count("<script") == 1  # the page's own, by its hash: a rule file brings none
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in written


def test_the_commands_load_nothing_heavy_before_they_run() -> None:
    code = (
        "import sys; import gpudiag.cli.rules; "
        "print([n for n in ('polars', 'numpy', 'yaml', 'jinja2', 'rich.table', 'tomllib') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

"""gpudiag.toml and [tool.gpudiag]: the nearest one counts, and a mistake in it is named with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpudiag.cli import config
from gpudiag.cli.rules import rules_app
from gpudiag.errors import InputError

TOML = 'rules = ["ours"]\ndisable = ["OVH-02"]\n\n[thresholds."OVH-01"]\nmin_share = 0.2\n'


def test_the_nearest_file_upwards_counts_and_folders_are_seen_from_it(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "gpudiag.toml").write_text(TOML)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    found = config.find_config(below)
    assert found.path == (tmp_path / "gpudiag.toml").as_posix()
    assert found.rules == ((tmp_path / "ours").as_posix(),)
    assert found.disable == ("OVH-02",)
    assert found.thresholds == {"OVH-01": {"min_share": 0.2}}
    (tmp_path / "a" / "pyproject.toml").write_text(
        '[tool.gpudiag]\ndisable = ["OVH-03"]\n[tool.gpudiag.thresholds."OVH-01"]\nmin_share = 1\n'
    )
    nearer = config.find_config(below)
    assert (nearer.disable, nearer.thresholds) == (("OVH-03",), {"OVH-01": {"min_share": 1.0}})
    (tmp_path / "a" / "gpudiag.toml").write_text("")
    assert config.find_config(below).disable == ()


@pytest.mark.parametrize(
    "text",
    [
        '[tool]\ngpudiag = {disable = ["OVH-03"]}\n',
        'tool.gpudiag.disable = ["OVH-03"]\n',
        'tool = {gpudiag = {disable = ["OVH-03"]}}\n',
        '[tool]\n"gpudiag".disable = ["OVH-03"]\n',
    ],
)
def test_a_pyproject_may_write_our_table_as_toml_allows(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert config.find_config(tmp_path).disable == ("OVH-03",)


def test_a_pyproject_of_somebody_else_is_no_matter_of_ours(tmp_path: Path) -> None:
    (tmp_path / "gpudiag.toml").write_text("")
    inner = tmp_path / "inner"
    inner.mkdir()
    others = (
        b'tool = 3\nx = "gpudiag"\n',
        b'[project]\nname = "gpudiag"\n',
        b'name = "gpudiag"\nbroken = [',
        b'tool = 3\nx = """\n[tool.gpudiag]\n"""\n',
    )
    for content in (b"broken = [", b"\xff\xfe", b"x" * 2_000_000, *others):
        (inner / "pyproject.toml").write_bytes(content)
        assert config.find_config(inner).path == (tmp_path / "gpudiag.toml").as_posix()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("disabel = []\n", ":1: disabel: unknown key; did you mean 'disable'?"),
        ("\ndisable = 'OVH-01'\n", ":2: disable: a list of texts is needed"),
        ("rules = [1]\n", ":1: rules: a list of texts is needed"),
        ("thresholds = 3\n", ":1: thresholds: a table is needed"),
        ("[thresholds]\nOVH-01 = 3\n", ":2: thresholds.OVH-01: a table is needed"),
        ('[thresholds."OVH-01"]\nmin_share = "much"\n', ":2: thresholds.OVH-01.min_share: a number is needed"),
        ('[thresholds."OVH-01"]\nmin_share = true\n', ":2: thresholds.OVH-01.min_share: a number is needed"),
        (f'[thresholds."OVH-01"]\nmin_share = 1{"0" * 400}\n', ":2: thresholds.OVH-01.min_share: a number below 1e308 is needed"),
        ("a = 1\nb == 2\n", ":2: no TOML that can be read: Invalid value"),
        ("a = [\n", ":2: no TOML that can be read"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "gpudiag.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        config.find_config(tmp_path)
    assert caught.value.message.startswith(f"{path.as_posix()}{says}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * 2_000_000])
def test_a_file_of_ours_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gpudiag.toml").write_bytes(content)
    with pytest.raises(InputError, match=r"gpudiag\.toml: "):
        config.find_config(tmp_path)


def test_the_list_shows_what_is_changed_and_no_config_ignores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpudiag.toml").write_text(TOML.replace('rules = ["ours"]\n', ""))
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(rules_app, ["list"], catch_exceptions=False).output
    assert "1 switched off" in shown
    assert "changed: OVH-01: min_share 0.2 (default 0.15)" in shown
    detail = " ".join(CliRunner().invoke(rules_app, ["show", "OVH-02"], catch_exceptions=False).output.split())
    assert "switched off (gpudiag.toml)" in detail
    plain = CliRunner().invoke(rules_app, ["list", "--no-config"], catch_exceptions=False).output
    assert "switched off" not in plain


def test_a_title_moves_no_cursor(tmp_path: Path) -> None:
    text = 'id: INP-01\noverride: true\ntitle: "\\e[2J\\e]0;gone\\aThe device waits"\n'
    (tmp_path / "INP-01.yaml").write_text(text)
    for command in (["list"], ["show", "INP-01"]):
        found = CliRunner().invoke(rules_app, [*command, "--no-config", "--rules", str(tmp_path)])
        assert found.exit_code == 0, found.output
        assert "\x1b" not in found.output
        assert "The device waits" in found.output

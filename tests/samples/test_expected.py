"""Every sample is complete, and what it expects exists."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from suite.expected import CONTROL, Sample, find_samples, read_expected

from gpudiag.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted(path.stem for path in (ROOT / "rules").glob("*/*.yaml"))
FOLDERS = sorted(path.parent for path in (ROOT / "samples").glob("*/train.py"))
SAMPLES = find_samples(ROOT / "samples")


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_every_training_script_says_what_is_expected_of_it(folder: Path) -> None:
    assert (folder / "expected.toml").is_file()


def test_there_are_enough() -> None:
    planted = [sample for sample in SAMPLES if not sample.control]
    on_cpu = [sample for sample in planted if not any(name.startswith("cuda") for name in sample.expected.requires)]
    assert len(planted) >= 20
    assert len(on_cpu) >= 14
    assert len(SAMPLES) - len(planted) >= 6


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])
def test_the_expected_findings_are_rules(sample: Sample) -> None:
    expected = sample.expected
    for pattern in (*filter(None, [expected.first]), *expected.must, *expected.may, *expected.never):
        assert any(fnmatchcase(rule, pattern) for rule in RULES), f"{pattern}: there is no such rule"
    allowed = {rule for rule in RULES if any(fnmatchcase(rule, pattern) for pattern in (expected.first, *expected.must))}
    forbidden = {rule for rule in RULES if any(fnmatchcase(rule, pattern) for pattern in expected.never)}
    assert not allowed & forbidden


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])
def test_the_script_stands_alone(sample: Sample) -> None:
    tree = ast.parse(sample.script.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] == "gpudiag"]
    options = {
        node.args[0].value: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert "default" in options["--steps"]
    assert sample.control or "action" in options["--fixed"]


BROKEN = {
    'title = "a"\nfrist = "OVH-01"\n': "no key 'frist'; did you mean 'first'?",
    'title = "a"\nfirst = "OVH-01"\nmay = "EFF-*"\n': "Expected `array`, got `str` - at `$.may`",
    'first = "OVH-01"\n': "missing required field `title`",
    'title = "a"\nfirst = "OVH-01"\nrequires = ["cude"]\n': "requires: no such requirement 'cude'",
    'title = "a"\n': "first: a control",
    "title = \n": "Invalid value",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_expected(path)
    assert str(path) in str(caught.value)
    assert BROKEN[text] in str(caught.value)


def test_a_control_expects_nothing_and_comes_last(tmp_path: Path) -> None:
    planted = 'title = "a"\nfirst = "OVH-01"'
    for name, text in (("control_a", 'title = "healthy"'), ("slow", planted), ("b", planted)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "expected.toml").write_text(text)
    assert [sample.name for sample in find_samples(tmp_path)] == ["b", "slow", "control_a"]
    assert [sample.control for sample in find_samples(tmp_path, ("control_a",))] == [True]
    with pytest.raises(InputError, match=r"no sample 'slwo'; did you mean 'slow'"):
        find_samples(tmp_path, ("slwo",))
    (tmp_path / "control_a" / "expected.toml").write_text(planted)
    with pytest.raises(InputError, match=rf"{CONTROL}.*has none"):
        find_samples(tmp_path)

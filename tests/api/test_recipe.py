"""recipe.toml: what is written is what is read, whatever stands in it, and what is no recipe is one line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpudiag.api.recipe import read_recipe, recipe_text, write_recipe
from gpudiag.errors import InputError
from gpudiag.model.experiment import Baseline, ExperimentData, FixCall, Outcome, Parity, Recipe

CALLS = (FixCall("bf16"), FixCall("batch-size", "x2"))
OUTCOME = Outcome(
    fix="bf16+batch-size=x2", verdict="faster", ratio=1.5, interval=(1.4, 1.6), p=1e-5, pairs=6,
    parity=Parity(kind="semantics", verdict="not_comparable"),
)  # fmt: skip
PROVED = Recipe(fixes=CALLS, ratio=1.5, interval=(1.4, 1.6), p=1e-5, changes=("one", "two", "a\nvariant"), proved=True)
DATA = ExperimentData(baseline=Baseline(command=("x",), step_ns=1, device='a "GPU"\\'), experiments=(OUTCOME,), recipe=PROVED)


def toml(text: str) -> dict[str, Any]:
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)  # type: ignore[no-any-return]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    command = ["train.py", "--name", 'quote " backslash \\ tab \t line \n é 🎉 \x7f \x01']
    write_recipe(tmp_path / "recipe.toml", DATA, command)
    assert read_recipe(str(tmp_path / "recipe.toml")) == CALLS
    found = toml((tmp_path / "recipe.toml").read_text(encoding="utf-8"))
    assert found["command"] == command
    assert (found["ratio"], found["interval"], found["p"], found["pairs"], found["unit"]) == (1.5, [1.4, 1.6], 1e-5, 6, "samples")
    assert found["parity"] == "not_comparable"
    assert found["measured_with"]["device"] == 'a "GPU"\\'
    assert [fix["parity"] for fix in found["fix"]] == ["low_precision", "semantics"]
    assert found["fix"][1]["change"].endswith("# batch-size=x2")
    assert found["change"] == [{"text": "a\nvariant"}]


def test_an_empty_recipe_is_the_program_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "recipe.toml"
    target.write_text(recipe_text(ExperimentData(), ["train.py"]))
    assert toml(target.read_text())["proved"] is False
    assert read_recipe(str(target)) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema = 1\nfix = 3", "no recipe"),
        ("fix = []", "schema"),
        ("schema = 2", "reads up to 1"),
        ("schema = 1\nx = = 2", "line 2: not TOML"),
        ('schema = 1\n[[fix]]\nid = "bf61"', "no fix is named 'bf61'"),
        ('schema = 1\n[[fix]]\nvalue = "x"', "id"),
        ("\ufeff\x00", "not TOML"),
    ],
)
def test_what_is_no_recipe_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    target = tmp_path / "recipe.toml"
    target.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as found:
        read_recipe(str(target))
    assert "\n" not in str(found.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_recipe(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no text in UTF-8"):
        read_recipe(str(tmp_path / "bytes.toml"))

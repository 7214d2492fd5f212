"""recipe.toml: what is written is what is read, whatever stands in it, and what is no recipe is one line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpudiag.errors import InputError
from gpudiag.experiment import factory
from gpudiag.experiment.recipe import format_recipe, read_recipe
from gpudiag.fixes import FIX_BY_ID, knobs, make_applier, registry
from gpudiag.fixes.fix import Fix
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
    (tmp_path / "recipe.toml").write_bytes(format_recipe(DATA, command).encode())
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
    target.write_text(format_recipe(ExperimentData(), ["train.py"]))
    assert toml(target.read_text())["proved"] is False
    assert read_recipe(str(target)) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema = 1\nfix = 3", "no recipe"),
        ("fix = []", "schema"),
        ("schema = 2", "reads up to 1"),
        ("schema = 1\nx = = 2", ":2: no TOML"),
        ('schema = 1\n[[fix]]\nid = "bf61"', "no fix is named 'bf61'"),
        ('schema = 1\n[[fix]]\nvalue = "x"', "id"),
        ("\ufeff\x00", "no TOML"),
        ("a = " + "[" * 5000, "no TOML"),
        ("schema = " + "9" * 5000, "no TOML"),
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


# -- fixes that are not built in --------------------------------------------------------------------------------------------

OWN = """
import gpudiag

class NoBias(gpudiag.Applier):
    def install(self, site): pass
    def evidence(self, site): return f"value {self.value}"

class NoFix: pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A file with a fix of the user; what is registered is forgotten afterwards."""
    file = tmp_path / "own fixes.py"
    file.write_text(OWN)
    yield file
    registry.REGISTERED.pop("no-bias", None)
    registry._LOCATIONS.pop("no-bias", None)
    FIX_BY_ID.pop("no-bias", None)


def proved(call: FixCall) -> ExperimentData:
    recipe = Recipe(fixes=(call,), ratio=1.5, proved=True)
    return ExperimentData(experiments=(Outcome(fix=str(call), verdict="faster", ratio=1.5),), recipe=recipe)


def test_a_fix_of_the_user_is_found_again_by_its_place(tmp_path: Path, own: Path) -> None:
    fix, call = Fix("no-bias", "Drop biases", "semantics", "nn.Linear(..., bias=False)"), FixCall("no-bias", "all")
    registry.restore_fix(registry.RegisteredFix(fix, registry.CodeLocation(f"{own}:NoBias")))
    text = format_recipe(proved(call), ["train.py"])
    registry.REGISTERED.clear()
    FIX_BY_ID.pop("no-bias")
    target = tmp_path / "recipe.toml"
    target.write_text(text)
    assert read_recipe(str(target)) == (call,)
    assert make_applier(call).evidence(None) == "value all"  # type: ignore[arg-type]
    assert FIX_BY_ID["no-bias"] == fix
    (told,) = registry.list_registered(["no-bias"])
    assert told.place.target == f"{own}:NoBias", "a process that trains is told of it"
    assert format_recipe(proved(call), ["train.py"]) == text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('place = "{folder}/gone.py:NoBias"\nparity = "exact"', "fix no-bias: its place: .*gone.py: no such file"),
        ('place = "{folder}/own fixes.py:Gone"\nparity = "exact"', "no function 'Gone'"),
        ('place = "{folder}/own fixes.py:NoFix"\nparity = "exact"', "no subclass of gpudiag.Applier"),
        ('place = "nowhere_at_all:NoBias"\nparity = "exact"', "nowhere_at_all cannot be imported"),
        ('place = "{folder}/own fixes.py:NoBias"', "parity '' is none"),
        ("", "no fix is named 'no-bias'"),
    ],
)
def test_a_fix_of_the_user_that_is_not_there_is_one_line(tmp_path: Path, own: Path, row: str, said: str) -> None:
    target = tmp_path / "recipe.toml"
    target.write_text(f'schema = 1\n[[fix]]\nid = "no-bias"\n{row.format(folder=own.parent)}\n')
    with pytest.raises(InputError, match=said) as found:
        read_recipe(str(target))
    assert "\n" not in str(found.value)
    assert found.value.hint


def test_no_place_can_stand_for_a_built_in_fix(tmp_path: Path, own: Path) -> None:
    target = tmp_path / "recipe.toml"
    target.write_text(f'schema = 1\n[[fix]]\nid = "bf16"\nparity = "exact"\nplace = "{own}:NoBias"\n')
    with pytest.raises(InputError, match="taken by a built-in fix"):
        read_recipe(str(target))


@pytest.mark.parametrize("call", [FixCall("batch-size", "x2"), FixCall("accumulation", "2")])
def test_a_knob_is_turned_where_a_build_is_run_and_refused_for_a_script(tmp_path: Path, call: FixCall) -> None:
    program = [sys.executable, "-m", factory.PROGRAM, "/somewhere/train.py:build", "--seed", "0"]
    target = tmp_path / "recipe.toml"
    with registry.replace_appliers(knobs.KNOB_FIXES):
        target.write_bytes(format_recipe(proved(call), program[1:]).encode())
    assert read_recipe(str(target), program) == (call,)
    with pytest.raises(InputError, match=r"turns the knob cfg\.\w+ of a build function") as found:
        read_recipe(str(target), [sys.executable, "train.py"])
    assert found.value.hint == shlex.join(["gpudiag", "run", "--recipe", str(target), *program[1:]])


def test_a_fix_of_the_user_beside_a_knob_stays_known(tmp_path: Path, own: Path) -> None:
    target = tmp_path / "recipe.toml"
    knob = '[[fix]]\nid = "batch-size"\nknob = "batch_size"\n'
    target.write_text(f'schema = 1\n{knob}[[fix]]\nid = "no-bias"\nparity = "exact"\nplace = "{own}:NoBias"\n')
    assert [str(call) for call in read_recipe(str(target), ["python", "-m", factory.PROGRAM])] == ["batch-size", "no-bias"]
    assert make_applier(FixCall("no-bias")).evidence(None) == "value None"  # type: ignore[arg-type]

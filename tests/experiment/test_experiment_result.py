"""What an experiment returns: which of its outcomes the attributes speak of, and its renderings."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gpudiag.errors import UsageError
from gpudiag.experiment.result import ExperimentResult
from gpudiag.model.experiment import ExperimentData, FixCall, Outcome, Parity, Recipe

SCREENED = Outcome(fix="tf32", verdict="inconclusive", ratio=1.01, screening=True)
PROVED = Outcome(
    fix="bf16+channels-last",
    verdict="faster",
    ratio=1.83,
    interval=(1.79, 1.87),
    p=1e-6,
    pairs=6,
    parity=Parity(kind="low_precision", verdict="same", worst_yardsticks=1.6),
    memory_ratio=0.88,
    energy_ratio=0.6,
    break_even_steps=240.0,
    evidence=("bf16: bfloat16 inside",),
    notes=("of the outcome",),
)
DATA = ExperimentData(experiments=(SCREENED, PROVED), recipe=Recipe(ratio=1.83, proved=True), notes=("of all",))


def test_the_attributes_are_those_of_the_first_that_claims_something() -> None:
    found = ExperimentResult(DATA)
    assert (found.verdict, found.ratio, found.interval, found.p, found.pairs) == ("faster", 1.83, (1.79, 1.87), 1e-6, 6)
    assert (found.memory, found.energy, found.break_even_steps, found.unit) == (0.88, 0.6, 240.0, "samples")
    assert found.parity is not None
    assert found.parity.worst_yardsticks == 1.6
    assert found.evidence == ("bf16: bfloat16 inside",)
    assert found.notes == ("of the outcome", "of all")
    assert found.recipe.proved


def test_where_only_candidates_were_ranked_the_first_of_those() -> None:
    assert ExperimentResult(ExperimentData(experiments=(SCREENED,))).ratio == 1.01


def test_nothing_measured_is_no_verdict() -> None:
    found = ExperimentResult(ExperimentData(notes=("the program does not train",)))
    assert (found.verdict, found.ratio, found.parity, found.pairs) == (None, None, None, 0)
    assert found.notes == ("the program does not train",)


def test_what_is_saved_is_what_was_found(tmp_path: Path) -> None:
    found = ExperimentResult(DATA)
    assert msgspec.json.decode(found.json(), type=ExperimentData) == DATA
    assert json.loads(found.to_json())["experiments"][1]["parity"]["class"] == "low_precision"
    for suffix in (".json", ".md", ".html"):
        found.save(tmp_path / f"result{suffix}")
        assert "channels-last" in (tmp_path / f"result{suffix}").read_text()
    with pytest.raises(UsageError, match="cannot tell the format"):
        found.save(tmp_path / "result.pdf")


def test_every_rendering_names_the_change_and_its_ratio() -> None:
    found = ExperimentResult(DATA)
    for text in (found.text(), str(found), found.markdown(), found.html(), found._repr_html_()):
        assert "bf16+channels-last" in text
        assert "1.83" in text


def test_every_rendering_names_the_bundle_that_the_experiments_lie_in() -> None:
    recipe = Recipe(fixes=(FixCall("bf16"), FixCall("channels-last")), ratio=1.83, proved=True)
    found = ExperimentResult(msgspec.structs.replace(DATA, recipe=recipe, complete=False))
    found.bundle = Path("runs/now")
    applied, resumed = "gpudiag run --recipe runs/now/recipe.toml train.py ARGS", "gpudiag ab --resume runs/now goes on"
    for text in (found.text(), found.markdown(), found.html()):
        assert applied in text
        assert resumed in text
    assert resumed in found._repr_html_()

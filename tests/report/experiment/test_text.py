"""Experiments in a terminal."""

from __future__ import annotations

import re

import outcomes as made
import pytest
import report_sample as sample
from rendered import render_experiments_text, render_markdown, render_text
from rich.cells import cell_len

from gpudiag.model.experiment import ExperimentData, Recipe
from gpudiag.report.console import replace_unencodable
from gpudiag.report.experiment.summary import MISSING_TITLE, SCREENED_TITLE

DATA = {
    "all": made.experiments(),
    "hostile": made.hostile(sample.HOSTILE),
    "one": made.experiments(experiments=(made.outcome(),), complete=True, notes=()),
    "nothing": ExperimentData(),
    "probe": made.experiments(experiments=(), recipe=Recipe()),
}
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", list(DATA))
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert [line for line in render_experiments_text(DATA[name], width).splitlines() if cell_len(line) > width] == []


@pytest.mark.parametrize("name", list(DATA))
def test_plain_text_holds_no_control_characters(name: str) -> None:
    plain = render_experiments_text(DATA[name])
    assert [character for character in plain if not character.isprintable() and character != "\n"] == []
    replace_unencodable(plain, "ascii").encode("ascii")


def test_colours_change_no_word() -> None:
    coloured = render_experiments_text(DATA["all"], color=True)
    assert SGR.search(coloured)
    assert "\n".join(line.rstrip() for line in SGR.sub("", coloured).splitlines()) == render_experiments_text(DATA["all"]).rstrip("\n")


def test_what_is_proved_comes_first_and_what_is_missing_has_its_reason() -> None:
    plain = " ".join(render_experiments_text(DATA["all"]).split())
    order = [
        "bf16+channels-last: 1.83x faster (95 % CI 1.79 to 1.87), trains the same",
        "The plan is not complete",
        "Experiments: variants against",
        "bf16+channels-last faster x1.83 [1.79, 1.87] samples/s",
        "p<1e-5, 6 process pairs; parity same: losses and gradients within 1.6 x bf16 rounding noise "
        "over 12 steps; peak memory -12 %; break-even",
        "Upper bound: 50 % less time a sample; measured: 45 % [44, 47].",
        "In effect: bfloat16 in the forward pass of Net",
        SCREENED_TITLE,
        MISSING_TITLE,
        "compile not applied the root is a Sequential, and nothing was compiled",
        "checkpointing failed out of memory: checkpointing ended with exit code 1",
        "its last output: ValueError: sizes do not fit",
        'it hung at File "net.py", line 12 in forward',
        "Recipe",
        "with torch.autocast(device_type, dtype=torch.bfloat16):",
        "Baseline",
    ]
    places = [plain.index(said) for said in order]
    assert places == sorted(places)


def test_code_of_a_recipe_keeps_its_indentation() -> None:
    lines = render_experiments_text(DATA["all"]).splitlines()
    (first,) = [k for k, line in enumerate(lines) if line.strip().startswith("with torch.autocast")]
    indents = [len(line) - len(line.lstrip()) for line in lines[first : first + 2]]
    assert indents[1] == indents[0] + 4


def test_figures_stand_below_each_other_where_there_is_room() -> None:
    measured = render_experiments_text(DATA["all"], 120).partition(SCREENED_TITLE)[0]
    lines = [line for line in measured.splitlines() if re.search(r"\] samples/s", line)]
    assert len(lines) == 10
    assert len({line.index(" x") for line in lines}) == 1
    assert len({line.rindex("samples/s") for line in lines}) > 1  # intervals are not all as long
    bars = [line.rstrip()[-2:] for line in lines]
    assert all(bar.strip()[-1:] in ")|o>" for bar in bars)


def test_a_report_shows_its_experiments_and_none_where_there_are_none() -> None:
    outcomes = made.every_verdict()
    with_them, without = sample.report(experiments=outcomes), sample.report()
    for render in (render_text, render_markdown):
        plain = " ".join(render(with_them).split())
        assert "Experiments: variants against the baseline" in plain
        assert "x1.83 [1.79, 1.87] samples/s".replace("[", "\\[").replace("]", "\\]") in plain or "x1.83 [1.79, 1.87] samples/s" in plain
        assert "Upper bound: 50 % less time a sample; measured: 45 %" in plain
        assert "Experiments" not in render(without)

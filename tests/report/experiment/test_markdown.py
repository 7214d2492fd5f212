"""Experiments as Markdown."""

from __future__ import annotations

import re

import outcomes as made
import report_sample as sample
from rendered import render_experiments_markdown

from gpudiag.model.experiment import ExperimentData


def test_every_change_has_its_row_and_every_row_its_cells() -> None:
    lines = [line for line in render_experiments_markdown(made.experiments()).splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 3 + len(made.every_verdict())  # measured, screened, without a result
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines[:2]] == [9, 9]


def test_verdicts_figures_and_reasons() -> None:
    plain = render_experiments_markdown(made.experiments()).replace("\\", "").replace("&lt;", "<")
    assert "| `bf16+channels-last` | **faster** | x2.00 | x1.83 [1.79, 1.87] samples/s | p<1e-5, 6 process pairs |" in plain
    assert "| `tf32` | looks faster |  | x1.31 [1.22, 1.41] samples/s | blocks of one process pair: not proof |" in plain
    assert "| `compile` | not applied | x1.67 | no result | the root is a Sequential, and nothing was compiled |" in plain
    assert "| `fp16` | **faster, parity differs** |" in plain
    assert "- `bf16+channels-last`: Upper bound: 50 % less time a sample; measured: 45 % [44, 47]." in plain
    assert "```python\nwith torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = model(x)\n```" in plain


def test_a_diff_is_called_one_and_backticks_end_no_block() -> None:
    changed = made.recipe(changes=("--- a\n+++ b\n@@ -1 +1 @@\n-```\n+x", "y = 1"))
    text = render_experiments_markdown(made.experiments(recipe=changed))
    assert "````diff\n--- a\n+++ b\n@@ -1 +1 @@\n-```\n+x\n````" in text


def test_hostile_names_make_no_markup() -> None:
    text = render_experiments_markdown(made.hostile(sample.HOSTILE))
    prose = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", text)
    prose = re.sub(r"(`+).*?\1", "", prose)
    assert not re.search(r"(?<!\\)<", prose)
    assert "\x1b" not in text
    assert not re.search(r"^# heading", prose, re.MULTILINE)


def test_nothing_measured() -> None:
    assert render_experiments_markdown(ExperimentData()) == "# gpudiag ab\n\n**Nothing was measured.**\n"

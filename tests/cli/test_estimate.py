"""`gpudiag memory --estimate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpudiag.cli import app
from gpudiag.errors import UsageError
from gpudiag.memory_estimate import estimate_transformer

EXAMPLE = "heads=32,batch=100,hidden=4096,feed_forward=16384,layers=32,sequence=1024,vocab=32000,optimizer_bytes=2"


def test_the_example_of_2_15_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    found = CliRunner().invoke(app, ["memory", "--estimate", "--set", EXAMPLE, "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "About 2.15 TiB (2.36 TB) on each device: 2.09 TiB of activations." in found.output
    written = json.loads(out.read_bytes())
    assert written["activations_bytes"] == 2_298_583_449_600
    assert written["model"]["batch"] == 100


def test_settings_are_laid_over_a_preset() -> None:
    plain, halved = estimate_transformer("llama3-8b"), estimate_transformer("llama3-8b", ["batch=16", "recompute=full"])
    assert halved.model.batch * 2 == plain.model.batch
    assert halved.memory.states_bytes == plain.memory.states_bytes
    assert halved.activations_bytes < plain.activations_bytes / 2


@pytest.mark.parametrize(
    ("preset", "setting", "text"),
    [
        ("llama", "batch=1", "no preset 'llama'"),
        ("playbook", "batchs=1", "did you mean 'batch'"),
        ("playbook", "batch", "no value"),
        ("playbook", "batch=many", "batch=many"),
        ("playbook", "recompute=some", "recompute=some"),
        ("playbook", "recompute=ful", "'ful' is none of none, selective, full; did you mean 'full'?"),
        ("playbook", "zero_stage=5", "'5' is none of 0, 1, 2, 3"),
        ("playbook", "batch=0", "at least 1"),
        ("playbook", f"batch={'9' * 400}", "at most 1,000,000,000,000"),
        ("playbook", "batch=1\udcec0", "batch takes no such text"),
    ],
)
def test_what_does_not_exist_is_named(preset: str, setting: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        estimate_transformer(preset, [setting])


@pytest.mark.parametrize("option", ["--rank", "--device"])
def test_an_estimate_has_no_ranks_to_choose_from(option: str) -> None:
    found = CliRunner().invoke(app, ["memory", "--estimate", option, "1"])
    assert isinstance(found.exception, UsageError) or found.exit_code == 2


def test_neither_a_path_nor_an_estimate() -> None:
    found = CliRunner().invoke(app, ["memory"])
    assert found.exit_code != 0

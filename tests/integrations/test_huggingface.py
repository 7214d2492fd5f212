"""The callback on the real Trainer of transformers, with a tiny model made from a configuration."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from noticewords import format_notices

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from gpudiag.capture.bundle import OpenedBundle, open_bundle  # noqa: E402
from gpudiag.capture.session import Session  # noqa: E402
from gpudiag.errors import MissingDependencyError, UsageError  # noqa: E402
from gpudiag.integrations.huggingface import GpudiagCallback  # noqa: E402

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
SHORT = {"skip": 2, "warm": 1, "record": 3, "sites": 1}


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of random tokens; the labels are the tokens."""

    def __init__(self, rows: int, fail_at: int | None = None) -> None:
        self.tokens = torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(3))
        self.fail_at = fail_at

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == self.fail_at:
            raise KeyError("a broken row")
        return {"input_ids": self.tokens[row], "labels": self.tokens[row], "attention_mask": torch.ones(12, dtype=torch.long)}


class Losses(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps every logged loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.values += [value for key, value in logs.items() if key in ("loss", "grad_norm", "eval_loss")]


def trainer(folder: Path, *callbacks: Any, rows: int = 48, dataset: Any = None, kind: Any = None, **arguments: Any) -> Any:
    """Return a Trainer of a causal language model with about 5,000 parameters; 48 rows are 12 steps of 4."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    options = {
        "num_train_epochs": 1, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(), "seed": 5,
    }  # fmt: skip
    return (kind or transformers.Trainer)(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(output_dir=str(folder / "out"), **{**options, **arguments}),
        train_dataset=dataset or Tokens(rows),
        eval_dataset=Tokens(8),
        callbacks=list(callbacks),
    )


def bundle_of(callback: GpudiagCallback) -> OpenedBundle:
    return open_bundle(callback.path)


def test_a_step_is_an_optimizer_step_and_the_windows_are_there(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, num_train_epochs=2)
    made.train()
    bundle = bundle_of(callback)
    assert callback.path == tmp_path / "run"
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps == made.state.global_step == 24
    assert [(window.kind, window.first_step, window.steps) for window in bundle.manifest.windows] == [("timing", 3, 3), ("sites", 8, 1)]
    assert bundle.step_records["samples"].drop_nulls().sum() <= 2 * 48
    assert not format_notices(bundle.notices)


def test_losses_and_gradients_are_bit_identical_with_and_without(tmp_path: Path) -> None:
    plain, recorded = Losses(), Losses()
    trainer(tmp_path, plain, num_train_epochs=2, eval_strategy="steps", eval_steps=7).train()
    trainer(tmp_path, recorded, GpudiagCallback(tmp_path / "run", **SHORT), num_train_epochs=2, eval_strategy="steps", eval_steps=7).train()
    assert len(plain.values) > 48
    assert recorded.values == plain.values


def test_accumulation_is_one_step_with_its_batches(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, rows=160, gradient_accumulation_steps=4)
    made.train()
    rows = bundle_of(callback).step_records
    assert rows.height == made.state.global_step == 10
    assert (rows["samples"].drop_nulls() <= 5 * 4).all()
    assert rows["samples"].median() == 16
    assert rows["backwards"].to_list() == [4] * 10


def test_an_evaluation_belongs_to_no_step(tmp_path: Path) -> None:
    class Slow(transformers.Trainer):  # type: ignore[misc, name-defined]
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.3)
            return super().prediction_step(*args, **kwargs)

    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, kind=Slow, eval_strategy="steps", eval_steps=5, logging_steps=100)
    made.train()
    bundle = bundle_of(callback)
    rows = bundle.step_records
    assert rows.height == made.state.global_step == 12
    gaps = (rows["start_unix_ns"][1:] - (rows["start_unix_ns"] + rows["wall_ns"])[:-1]).to_list()
    assert [number for number, gap in enumerate(gaps, 1) if gap > 290_000_000] == [5, 10]


def test_an_evaluation_that_only_another_callback_knows_of_belongs_to_no_step(tmp_path: Path) -> None:
    class Late(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = state.global_step == 4

    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, Late())
    made.train()
    rows = bundle_of(callback).step_records
    assert rows.height == made.state.global_step == 12
    gaps = (rows["start_unix_ns"][1:] - (rows["start_unix_ns"] + rows["wall_ns"])[:-1]).to_list()
    assert max(range(len(gaps)), key=gaps.__getitem__) == 3


def test_saving_belongs_to_the_next_step_and_its_mark_says_so(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback, save_strategy="steps", save_steps=6).train()
    saves = bundle_of(callback).host_marks.filter(pl.col("kind") == "save")
    assert saves.height > 2
    assert set(saves["step"].drop_nulls()) == {6, 12}  # steps count from 0: the one after the sixth, and one that never ended


def test_a_second_training_makes_a_second_bundle(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback).train()
    with pytest.warns(RuntimeWarning, match="already holds a recording"):
        trainer(tmp_path, callback, rows=40).train()
    assert callback.path == tmp_path / "run-2"
    assert [open_bundle(tmp_path / name).manifest.steps for name in ("run", "run-2")] == [12, 10]


def test_a_resumed_training_counts_its_own_steps(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=5, max_steps=5).train()
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback)
    made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert made.state.global_step == 12
    assert bundle_of(callback).manifest.steps == 7


# -- trainings that end early -------------------------------------------------------------------------------------------------


def test_a_training_that_raises_is_ended_by_the_next_batch_outside(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, dataset=Tokens(48, fail_at=20), seed=11)
    with pytest.raises(KeyError, match="a broken row"):
        made.train()
    assert not open_bundle(callback.path).manifest.finished
    assert "eval_loss" in made.evaluate()
    bundle = bundle_of(callback)
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps == made.state.global_step
    assert any("ended early" in text for text in format_notices(bundle.notices))


def test_a_training_that_raises_is_ended_by_the_next_training(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    with pytest.raises(KeyError):
        trainer(tmp_path, callback, dataset=Tokens(48, fail_at=20)).train()
    with pytest.warns(RuntimeWarning, match="already holds a recording"):
        trainer(tmp_path, callback).train()
    assert [open_bundle(tmp_path / name).manifest.finished for name in ("run", "run-2")] == [True, True]


def test_a_training_that_raises_is_ended_by_the_training_of_another_callback(tmp_path: Path) -> None:
    first, second = (GpudiagCallback(tmp_path / name, **SHORT) for name in ("first", "second"))
    with pytest.raises(KeyError):
        trainer(tmp_path, first, dataset=Tokens(48, fail_at=20)).train()
    trainer(tmp_path, second).train()
    assert bundle_of(first).manifest.finished
    assert any("ended early" in text for text in format_notices(bundle_of(first).notices))
    assert bundle_of(second).manifest.finished
    assert bundle_of(second).step_records.height == 12


def test_a_second_callback_of_one_training_does_not_end_the_first(tmp_path: Path) -> None:
    first, second = (GpudiagCallback(tmp_path / name, **SHORT) for name in ("first", "second"))
    with pytest.warns(RuntimeWarning, match="already recording"):
        trainer(tmp_path, first, second).train()
    assert bundle_of(first).step_records.height == 12
    assert second.path is None


def test_as_a_context_manager_it_ends_a_training_that_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyError), GpudiagCallback(tmp_path / "run", **SHORT) as callback:
        trainer(tmp_path, callback, dataset=Tokens(48, fail_at=20)).train()
    bundle = bundle_of(callback)
    assert bundle.manifest.finished
    assert "the training loop ended with KeyError" in format_notices(bundle.notices)


@pytest.mark.slow
@pytest.mark.long  # tests/cli/test_run.py has a script without a trainer that raises
def test_a_script_that_raises_leaves_a_finished_bundle_and_its_own_traceback(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from integrations.test_huggingface import SHORT, GpudiagCallback, Tokens, trainer
        folder = Path(sys.argv[1])
        trainer(folder, GpudiagCallback(folder / "run", **SHORT), dataset=Tokens(48, fail_at=47)).train()
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'a broken row'\n")
    assert "USDT:" not in done.stderr  # torch's profiler writes such lines
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps


# -- the training comes first -------------------------------------------------------------------------------------------------


def test_inside_another_recording_the_training_goes_on_with_one_warning(tmp_path: Path) -> None:
    losses = Losses()
    with Session(tmp_path / "outer"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(tmp_path, losses, GpudiagCallback(tmp_path / "run", **SHORT))
        made.train()
    assert made.state.global_step == 12
    assert ["already recording" in str(item.message) for item in caught if "gpudiag" in str(item.message)] == [True]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    plain, recorded = Losses(), Losses()
    trainer(tmp_path, plain).train()
    with pytest.warns(RuntimeWarning, match="switched off"):
        trainer(tmp_path, recorded, GpudiagCallback(tmp_path / "file" / "run")).train()
    assert recorded.values == plain.values


def test_a_wrong_option_is_told_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="record=0 is not a number of steps"):
        GpudiagCallback(tmp_path / "run", record=0)


def test_without_transformers_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    monkeypatch.delitem(sys.modules, "gpudiag.integrations.huggingface")
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        importlib.import_module("gpudiag.integrations.huggingface")


# -- ranks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_the_ranks_of_torchrun_share_one_bundle(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from integrations.test_huggingface import SHORT, GpudiagCallback, trainer
        folder = Path(sys.argv[1])
        made = trainer(folder, GpudiagCallback(folder / "run", **SHORT), rows=96, use_cpu=True)
        made.train()
        assert made.state.global_step == 12
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path, TESTS]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    manifests = [json.loads((tmp_path / "run" / name).read_bytes()) for name in ("manifest.json", "manifest-rank1.json")]
    assert [(m["rank"], m["world_size"], m["steps"], m["finished"]) for m in manifests] == [(0, 2, 12, True), (1, 2, 12, True)]


# -- the report -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_finds_the_steps(tmp_path: Path) -> None:
    from gpudiag.model.report import encode_report
    from gpudiag.recorder import diagnose_in_child

    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback, gradient_accumulation_steps=2, num_train_epochs=2).train()
    report = diagnose_in_child(str(callback.path))
    assert report.steps.source == "ProfilerStep marks"
    assert report.steps.count == 3
    of_gpudiag = rb"(?:recorder|integrations/(?:huggingface|lightning))\.py"
    assert not re.search(of_gpudiag, encode_report(report))  # no place in gpudiag itself is given as the user's

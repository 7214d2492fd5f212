"""The callback on the real Trainer of Lightning, with a tiny module."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from noticewords import format_notices

torch = pytest.importorskip("torch", reason="torch is not installed")
lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from gpudiag.capture.bundle import open_bundle  # noqa: E402
from gpudiag.errors import MissingDependencyError, UsageError  # noqa: E402
from gpudiag.integrations.lightning import GpudiagCallback  # noqa: E402

pytestmark = pytest.mark.slow

SHORT = {"skip": 2, "warm": 1, "record": 3, "sites": 1}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Lightning warns of few workers, short epochs and the like; warnings of gpudiag are let through."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A regression with dropout; keeps its losses. `pause_s`: what a validation batch takes; `fail_at`: the batch that raises."""

    def __init__(self, pause_s: float = 0.0, fail_at: int | None = None, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        self.losses: list[float] = []
        self.pause_s, self.fail_at, self.error = pause_s, fail_at, error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fail_at:
            raise self.error("planted")
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause_s)
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Gan(Module):
    """Manual optimization: two steps of one optimizer and one of the other in a batch; `plain`: optimizers that Lightning does not see."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain = plain

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=not self.plain)
        for optimizer in (first, first, second):
            optimizer.zero_grad()
            loss = self.net(batch[0]).square().mean()
            loss.backward() if self.plain else self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3), torch.optim.SGD(self.parameters(), lr=1e-3)]


def loader(batches: int = 12) -> DataLoader[Any]:
    inputs = torch.randn(4 * batches, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    settled = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    return lightning.Trainer(callbacks=list(callbacks), **{**settled, **options})


def gaps_ns(rows: Any) -> list[int]:
    """Return the time between each step and the next."""
    return (rows["start_unix_ns"][1:] - (rows["start_unix_ns"] + rows["wall_ns"])[:-1]).to_list()


def test_a_step_is_a_batch_and_the_windows_are_there(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, max_epochs=2)
    made.fit(Module(), loader())
    bundle = open_bundle(callback.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps == made.global_step == 24
    assert [(window.kind, window.first_step, window.steps) for window in bundle.manifest.windows] == [("timing", 3, 3), ("sites", 8, 1)]
    assert bundle.step_records["samples"].to_list() == [4] * 24
    assert not format_notices(bundle.notices)


def test_losses_are_bit_identical_with_and_without(tmp_path: Path) -> None:
    modules = Module(), Module()
    for module, callbacks in zip(modules, ([], [GpudiagCallback(tmp_path / "run", **SHORT)]), strict=True):
        torch.manual_seed(7)
        trainer(tmp_path, *callbacks, max_epochs=2, val_check_interval=5).fit(module, loader(), loader(2))
    assert len(modules[0].losses) == 24
    assert modules[1].losses == modules[0].losses


def test_accumulation_is_one_step_with_its_batches(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, accumulate_grad_batches=4)
    made.fit(Module(), loader(42))
    rows = open_bundle(callback.path).step_records
    assert rows.height == made.global_step == 11
    assert rows["samples"].to_list() == [16] * 10 + [8]
    assert rows["backwards"].to_list() == [4] * 10 + [2]


@pytest.mark.parametrize("plain", [False, True])
def test_with_manual_optimization_a_step_holds_all_optimizers_of_its_batch(tmp_path: Path, plain: bool) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback)
    made.fit(Gan(plain), loader())
    assert made.global_step == (0 if plain else 36)
    assert open_bundle(callback.path).manifest.steps == 12


def test_validation_and_sanity_check_belong_to_no_step(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, max_epochs=2, val_check_interval=5, num_sanity_val_steps=2)
    made.fit(Module(pause_s=0.15), loader(), loader(2))
    rows = open_bundle(callback.path).step_records
    assert rows.height == made.global_step == 24
    gaps = {gap: number for number, gap in enumerate(gaps_ns(rows), 1)}
    assert sorted(gaps[gap] for gap in sorted(gaps)[-4:]) == [5, 10, 17, 22]
    assert sorted(gaps)[-4] > 290_000_000  # both batches of the validation
    assert rows["samples"].to_list() == [4] * 24


def test_validation_inside_an_accumulation_keeps_the_count(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, accumulate_grad_batches=4, val_check_interval=6)
    made.fit(Module(), loader(40), loader(2))
    assert open_bundle(callback.path).manifest.steps == made.global_step == 10


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_training_that_raises_is_ended_at_once(tmp_path: Path, error: type[BaseException]) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    try:
        with pytest.raises(error) if error is ZeroDivisionError else suppress(SystemExit):  # Lightning before 2.4 returns on Ctrl-C
            trainer(tmp_path, callback).fit(Module(fail_at=5, error=error), loader())
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores Ctrl-C from then on
    bundle = open_bundle(callback.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps == 5
    assert f"the training loop ended with {error.__name__}" in format_notices(bundle.notices)


def test_a_second_training_makes_a_second_bundle(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback).fit(Module(), loader())
    with pytest.warns(RuntimeWarning, match="already holds a recording"):
        trainer(tmp_path, callback).fit(Module(), loader(10))
    assert [open_bundle(tmp_path / name).manifest.steps for name in ("run", "run-2")] == [12, 10]


def test_a_training_resumed_in_the_middle_of_an_epoch_is_recorded(tmp_path: Path) -> None:
    saved = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5, filename="five")
    trainer(tmp_path, saved, enable_checkpointing=True, max_steps=5).fit(Module(), loader())
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    made = trainer(tmp_path, callback, max_epochs=2)
    made.fit(Module(), loader(), ckpt_path=str(tmp_path / "five.ckpt"))
    assert made.global_step in (24, 25)  # Lightning before 2.5 begins the epoch at its first batch again
    assert open_bundle(callback.path).manifest.steps == made.global_step - 5


def test_validate_and_predict_alone_record_nothing(tmp_path: Path) -> None:
    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback).validate(Module(), loader(2), verbose=False)
    assert callback.path is None
    assert not (tmp_path / "run").exists()


def test_a_copy_made_while_it_records_has_no_recording_of_its_own(tmp_path: Path) -> None:
    class Copies(lightning.Callback):  # type: ignore[misc, name-defined]
        made: Any = ()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.made = copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))  # noqa: S301

    callback, copies = GpudiagCallback(tmp_path / "run", **SHORT), Copies()
    trainer(tmp_path, callback, copies).fit(Module(), loader())
    for copied in copies.made:
        copied.on_train_end(None, None)
    assert open_bundle(tmp_path / "run").manifest.steps == 12
    assert not (tmp_path / "run-2").exists()


def test_a_wrong_option_is_told_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="skip=-1 is not a number of steps"):
        GpudiagCallback(tmp_path / "run", skip=-1)


def test_without_lightning_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gpudiag.integrations.lightning")
    with pytest.raises(MissingDependencyError, match="pip install lightning"):
        importlib.import_module("gpudiag.integrations.lightning")


@pytest.mark.long
@pytest.mark.slow
def test_it_is_a_callback_of_the_other_package_where_that_is_imported(tmp_path: Path) -> None:
    code = """
        import sys, warnings; warnings.simplefilter("ignore")
        import pytorch_lightning
        from pytorch_lightning.demos.boring_classes import BoringModel
        from gpudiag.integrations.lightning import GpudiagCallback
        assert GpudiagCallback.__bases__ == (pytorch_lightning.Callback,)
        trainer = pytorch_lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=GpudiagCallback(sys.argv[1]), logger=False, enable_checkpointing=False,
            default_root_dir=sys.argv[1],
        )
        trainer.fit(BoringModel())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert open_bundle(tmp_path / "run").manifest.steps == 64


@pytest.mark.slow
def test_the_report_finds_the_steps(tmp_path: Path) -> None:
    from gpudiag.model.report import encode_report
    from gpudiag.recorder import diagnose_in_child

    callback = GpudiagCallback(tmp_path / "run", **SHORT)
    trainer(tmp_path, callback, accumulate_grad_batches=2).fit(Module(), loader(24))
    report = diagnose_in_child(str(callback.path))
    assert report.steps.source == "ProfilerStep marks"
    assert report.steps.count == 3
    of_gpudiag = rb"(?:recorder|integrations/(?:huggingface|lightning))\.py"
    assert not re.search(of_gpudiag, encode_report(report))  # no place in gpudiag itself is given as the user's

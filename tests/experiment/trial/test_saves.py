"""Nothing is saved in a trial, whatever it is called by; what is copied through memory is."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.experiment.trial.side_effects import LOGS_FOLDER, Saves  # noqa: E402


@pytest.fixture
def patches() -> Iterator[Patches]:
    finders, made = list(sys.meta_path), Patches()
    yield made
    made.restore()
    sys.meta_path[:] = finders


def test_torch_save_writes_nothing_but_into_memory(patches: Patches, tmp_path: Path) -> None:
    saves = Saves(patches, str(tmp_path), blocked=True)
    saves.install()
    file = tmp_path / "model.pt"
    torch.save(torch.ones(2), file)
    torch.serialization.save(torch.ones(2), str(file))
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), torch.ones(2))
    assert not file.exists()
    assert saves.counts == {"torch.save": 2}


def test_saves_that_are_not_blocked_are_counted(patches: Patches, tmp_path: Path) -> None:
    saves = Saves(patches, str(tmp_path), blocked=False)
    saves.install()
    torch.save(torch.ones(2), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").exists()
    assert saves.counts == {"torch.save": 1}


def test_safetensors_writes_nothing_however_it_was_imported(patches: Patches, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    save_file = safetensors.save_file  # bound before the wrappers are there, as transformers does
    saves = Saves(patches, str(tmp_path), blocked=True)
    saves.install()
    saves.again()
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    assert saves.counts == {"safetensors.torch.serialize_file": 1}


@pytest.fixture
def trainer_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A module of the name of the one that transformers has, which is imported later."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    methods = ("save_model(self, folder)", "_save_checkpoint(self, model, trial)")
    code = "class Trainer:\n" + "".join(f"    def {method}: raise AssertionError\n" for method in methods)
    (package / "trainer.py").write_text(code, encoding="utf-8")
    for name in [name for name in sys.modules if name == "transformers" or name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "transformers.trainer"


def test_a_library_that_is_imported_later_is_caught(patches: Patches, tmp_path: Path, trainer_module: str) -> None:
    saves = Saves(patches, str(tmp_path), blocked=True)
    saves.install()
    __import__(trainer_module)
    trainer = sys.modules[trainer_module].Trainer()
    assert trainer.save_model("folder") is None
    assert trainer._save_checkpoint(None, None) is None
    assert saves.counts == {"Trainer.save_model": 1, "Trainer._save_checkpoint": 1}
    for name in ("transformers", trainer_module):
        sys.modules.pop(name, None)


def test_a_logger_writes_into_the_folder_of_the_arm(patches: Patches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FileWriter:
        def __init__(self, logdir: str, max_queue: int = 10) -> None:
            self.logdir, self.max_queue = logdir, max_queue

    module = types.ModuleType("tensorboardX.writer")
    module.FileWriter = FileWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX.writer", module)
    saves = Saves(patches, str(tmp_path), blocked=True)
    saves.again()
    assert FileWriter("runs/mine", 3).logdir == FileWriter(logdir="runs/mine").logdir == str(tmp_path / LOGS_FOLDER)
    assert FileWriter("runs/mine", 3).max_queue == 3

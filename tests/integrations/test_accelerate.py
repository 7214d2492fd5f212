"""Loops over prepared DataLoaders of the real Accelerate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from gpudiag.bundle.reader import open_bundle  # noqa: E402
from gpudiag.errors import UsageError  # noqa: E402
from gpudiag.integrations.accelerate import profile  # noqa: E402

SHORT = {"skip": 2, "warm": 1, "record": 3, "sites": 1}


class Loop:
    """A tiny loop as Accelerate's guide on gradient accumulation writes it; counts its updates."""

    def __init__(self, accumulation: int = 1, batches: int = 12, dispatch: bool = False) -> None:
        torch.manual_seed(0)
        config = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config)
        inputs = torch.randn(4 * batches, 8)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4, shuffle=True)
        )
        self.losses: list[float] = []
        self.updates = 0

    def train(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.updates += self.accelerator.sync_gradients
        self.losses.append(loss.item())

    def epochs(self, batches: Any, number: int = 2) -> None:
        for _ in range(number):
            for batch in batches():
                self.train(batch)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerator keeps its settings in a process-wide state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 28), (4, 8)])
def test_a_step_is_an_update(tmp_path: Path, accumulation: int, steps: int) -> None:
    loop = Loop(accumulation, batches=14)  # with 4 the last two batches of an epoch are an update of their own
    with profile(loop.accelerator, tmp_path / "run", **SHORT) as prof:
        loop.epochs(lambda: prof.steps(loop.loader))
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == bundle.manifest.steps == loop.updates == steps
    assert bundle.step_records["samples"].drop_nulls().sum() == 2 * 14 * 4
    if accumulation == 4:
        assert bundle.step_records["backwards"].to_list() == [4, 4, 4, 2] * 2


@pytest.mark.parametrize("dispatch", [False, True])
def test_losses_are_bit_identical_with_and_without(tmp_path: Path, dispatch: bool) -> None:
    plain, recorded = Loop(3, dispatch=dispatch), Loop(3, dispatch=dispatch)
    assert isinstance(plain.loader, DataLoaderDispatcher if dispatch else DataLoaderShard)
    torch.manual_seed(7)
    plain.epochs(lambda: plain.loader)
    torch.manual_seed(7)
    with profile(recorded.accelerator, tmp_path / "run", **SHORT) as prof:
        recorded.epochs(lambda: prof.steps(recorded.loader))
    assert recorded.losses == plain.losses
    assert open_bundle(prof.path).manifest.steps == plain.updates == 8


def test_an_iterable_dataset_of_unknown_length(tmp_path: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.ones(8), torch.ones(1)) for _ in range(40))

    loop = Loop(4)
    loader = loop.accelerator.prepare(DataLoader(Rows(), batch_size=4))
    with profile(loop.accelerator, tmp_path / "run", **SHORT) as prof:
        loop.epochs(lambda: prof.steps(loader))
    assert open_bundle(prof.path).manifest.steps == loop.updates == 6


def test_a_given_accumulation_is_taken_at_its_word(tmp_path: Path) -> None:
    loop = Loop()
    with profile(loop.accelerator, tmp_path / "run", **SHORT) as prof:
        loop.epochs(lambda: prof.steps(loop.loader, accumulation=2))
    rows = open_bundle(prof.path).step_records
    assert rows["samples"].to_list() == [8] * 12


def test_a_loop_that_raises_leaves_a_finished_bundle(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ZeroDivisionError), profile(loop.accelerator, tmp_path / "run", **SHORT) as prof:  # noqa: PT012
        for number, batch in enumerate(prof.steps(loop.loader)):
            loop.train(batch)
            if number == 7:
                _ = 1 / 0
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.manifest.steps == 7


@pytest.mark.long
def test_batches_do_not_live_longer_than_in_a_plain_loop(tmp_path: Path) -> None:
    def alive(batches: Any) -> list[int]:
        seen: list[Any] = []
        counts = []
        for batch in batches:
            seen.append(weakref.ref(batch))
            del batch
            gc.collect()
            counts.append(sum(reference() is not None for reference in seen))
        return counts

    loop = Loop()
    with profile(loop.accelerator, tmp_path / "run", **SHORT) as prof:
        assert alive(prof.steps(torch.ones(4, 8) for _ in range(10))) == alive(torch.ones(4, 8) for _ in range(10)) == [0] * 10


def test_wrong_calls_are_told(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(UsageError, match=r"no option 'recrod'; did you mean 'record'\?"):
        profile(loop.accelerator, tmp_path / "run", recrod=3)
    with pytest.raises(UsageError, match="outside the session"):
        profile(loop.accelerator, tmp_path / "run").steps(loop.loader)

"""What two runs from one known start have in common, and what an arm may draw without moving the other numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.experiment.trial.known_start import KnownStart  # noqa: E402
from gpudiag.experiment.trial.protocol import ParityPlan  # noqa: E402
from gpudiag.fixes.fix import Site  # noqa: E402


@contextmanager
def started(plan: ParityPlan | None = None) -> Iterator[Site]:
    patches = Patches()
    site = Site(patches)
    try:
        KnownStart(plan or ParityPlan()).install(site, patches)
        yield site
    finally:
        patches.restore()


def drawn(draw: Callable[[], Any], plan: ParityPlan | None = None) -> Any:
    with started(plan):
        return draw()


def test_a_script_without_any_seed_begins_alike_in_each_run() -> None:
    def draw() -> tuple[float, ...]:
        return (
            random.random(),
            np.random.rand(),
            float(torch.rand(())),
            float(np.random.default_rng().random()),
            float(nn.Linear(2, 2).bias[0]),
        )

    assert drawn(draw) == drawn(draw)
    assert drawn(draw) != draw()


def test_seeds_of_the_script_itself_stand() -> None:
    def draw() -> tuple[float, ...]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        return random.random(), np.random.rand(), float(torch.rand(())), float(np.random.default_rng(5).random())

    assert drawn(draw) == draw()


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def batches(*, workers: int = 0, prefetch: int | None = None, between: Callable[[], Any] = lambda: None) -> list[Any]:
    loader = torch.utils.data.DataLoader(Noisy(), 3, shuffle=True, num_workers=workers, prefetch_factor=prefetch)
    found = []
    for _ in range(2):
        for batch in loader:
            found.append([column.tolist() for column in batch])
            between()
    return found


def test_what_a_step_draws_does_not_move_the_data() -> None:
    """A change that tunes kernels draws random inputs for them."""
    plain = drawn(batches)
    assert plain[0] != plain[1]
    assert plain[:4] != plain[4:], "each epoch has an order of its own"
    assert drawn(lambda: batches(between=lambda: (torch.rand(7), random.random(), np.random.rand()))) == plain


def test_more_batches_ahead_are_the_same_batches() -> None:
    assert drawn(lambda: batches(workers=1, prefetch=2)) == drawn(lambda: batches(workers=1, prefetch=4))


def test_what_comes_after_a_batch_draws_on_as_if_there_had_been_none() -> None:
    def draw(fetch: bool) -> tuple[float, ...]:
        if fetch:
            next(iter(torch.utils.data.DataLoader(Noisy(), 3, shuffle=True)))
        return random.random(), np.random.rand(), float(torch.rand(()))

    assert drawn(lambda: draw(True)) == drawn(lambda: draw(False))


def test_after_a_step_both_arms_draw_alike_again() -> None:
    def draw(extra: int) -> float:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(2)
        torch.rand(extra)
        optimizer.step()
        return float(torch.rand(()))

    assert drawn(lambda: draw(0)) == drawn(lambda: draw(5))


def test_dropout_is_off() -> None:
    x = torch.ones(4, 8, 16)
    makers: list[Callable[[], Any]] = [
        lambda: nn.Dropout(0.5)(x),
        lambda: nn.Dropout2d(0.5)(x),
        lambda: nn.AlphaDropout(0.5)(x),
        lambda: functional.dropout(x, 0.5),
        lambda: functional.dropout(x, training=True, inplace=False),
    ]
    with started():
        assert all(torch.equal(make(), x) for make in makers)
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9, is_causal=True)
        mixed = nn.MultiheadAttention(16, 2, dropout=0.9)
        assert torch.equal(mixed(x, x, x, need_weights=False)[0], mixed(x, x, x, need_weights=False)[0])
    assert torch.equal(attended, functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert not any(torch.equal(make(), x) for make in makers)


def test_dropout_inside_of_layers_is_off_but_for_the_settings() -> None:
    class DropPath(nn.Module):
        drop_prob = 0.3

    net = nn.ModuleList([nn.LSTM(4, 4, num_layers=2, dropout=0.5), DropPath(), nn.Dropout(0.2)])
    with started() as site:
        site.add(site.roots, site.root_changes, net)
    assert (net[0].dropout, net[1].drop_prob, net[2].p) == (0.0, 0.0, 0.2)


def noise(weights: torch.Tensor, plan: ParityPlan) -> torch.Tensor:
    """The relative change that a root's weights get."""
    net = nn.Linear(1, 1, bias=False)
    net.weight = nn.Parameter(weights.clone())
    with started(plan) as site:
        site.add(site.roots, site.root_changes, nn.Sequential(net, net))  # the same weights twice
    return (net.weight.detach().double() - weights.double()) / weights.double()


def test_noise_in_the_weights_has_the_size_asked_for_and_is_given_once() -> None:
    weights = torch.full((1000, 100), 3.0)
    assert float(noise(weights, ParityPlan(perturb=1.1e-3)).std()) == pytest.approx(1.1e-3, rel=0.02)
    found = noise(weights, ParityPlan(perturb=6e-8))
    assert 3e-8 < float(found.std()) < 1.2e-7
    assert torch.equal(found, noise(weights, ParityPlan(perturb=6e-8)))
    assert not torch.equal(found, noise(weights, ParityPlan(perturb=6e-8, perturb_seed=1)))
    assert not noise(weights, ParityPlan()).any()


def test_noise_is_at_least_a_rounding_unit_of_the_weights() -> None:
    found = noise(torch.full((1000, 100), 3.0, dtype=torch.bfloat16), ParityPlan(perturb=6e-8))
    assert 2e-3 < float(found.std()) < 8e-3


def test_a_scaler_begins_low() -> None:
    with started():
        assert torch.amp.GradScaler("cpu").get_scale() == 1024.0
        assert torch.amp.GradScaler("cpu", init_scale=8.0).get_scale() == 8.0
    assert torch.amp.GradScaler("cpu").get_scale() == 65536.0

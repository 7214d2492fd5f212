"""Distances of gradients, told from their sketches."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.experiment.trial.fingerprint import BUCKETS, compute_squared_norm, sketch_gradient  # noqa: E402


def told(before: torch.Tensor, after: torch.Tensor) -> float:
    return float(np.linalg.norm(sketch_gradient(after) - sketch_gradient(before)) / np.linalg.norm(sketch_gradient(before)))


@pytest.mark.parametrize("relative", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("shape", [(1 << 18,), (64, 300), (8, 8, 3, 3)])
def test_a_relative_distance_is_told_within_a_tenth(shape: tuple[int, ...], relative: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    true = relative * float(noise.norm() / before.norm())
    assert told(before, before + relative * noise) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("kind", ["constant", "ramp", "one column", "stripes"])
def test_regular_gradients_are_told_too(kind: str) -> None:
    """The hash must not follow the order of the elements: gradients are anything but random."""
    rows, columns = torch.meshgrid(torch.arange(512.0), torch.arange(1024.0), indexing="ij")
    shapes = {
        "constant": rows * 0 + 1,
        "ramp": rows * 1024 + columns,
        "one column": (columns == 5) * 1.0,
        "stripes": (columns % 16 == 0) * 1.0,
    }
    gradient = shapes[kind]
    assert np.linalg.norm(sketch_gradient(gradient)) == pytest.approx(float(gradient.double().norm()), rel=0.15)


def test_small_tensors_are_kept_as_they_are() -> None:
    row = sketch_gradient(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    assert row.shape == (BUCKETS,)
    assert row[:5].tolist() == [1.0, -2.0, 3.0, 4.0, 0.0]


def test_memory_layout_and_storage_make_no_difference() -> None:
    gradient = torch.randn(16, 8, 5, 5)
    assert np.array_equal(sketch_gradient(gradient), sketch_gradient(gradient.to(memory_format=torch.channels_last)))
    table = torch.zeros(100, 20)
    table[7] = 2.0
    assert np.array_equal(sketch_gradient(table), sketch_gradient(table.to_sparse()))
    assert compute_squared_norm(table.to_sparse()) == pytest.approx(80.0)


def test_a_squared_norm_does_not_overflow_the_type_of_the_gradient() -> None:
    assert compute_squared_norm(torch.full((1000,), 1000.0, dtype=torch.float16)) == pytest.approx(1e9)

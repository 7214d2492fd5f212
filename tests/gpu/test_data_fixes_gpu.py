"""Fixes that only a GPU can show: pinned memory, copies that are not waited for, batches ahead, segments that grow."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from applied_fixes import applied
from torch.utils.data import DataLoader

from gpudiag.fixes.memory import AllocConf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

ROWS = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


def trained(make: Any = None, **arguments: Any) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).cuda()
    optimizer = make(model.parameters()) if make is not None else torch.optim.SGD(model.parameters(), 0.1)
    for rows in DataLoader(ROWS, 16, **arguments):
        optimizer.zero_grad()
        model(rows.to("cuda")).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("fixes", "arguments", "found"),
    [
        (("pin-memory",), {}, "pin_memory True instead of False"),
        (("pin-memory", "non-blocking"), {}, "copies to the GPU, all from pinned memory, are no longer waited for"),
        (("non-blocking",), {"pin_memory": True, "num_workers": 1}, "are no longer waited for"),
        (("pin-memory", "device-prefetch"), {}, "were copied to the GPU on a stream of their own"),
        (("device-prefetch",), {"pin_memory": True, "num_workers": 1}, "were copied to the GPU on a stream of their own"),
    ],
)
def test_copies_change_and_training_is_bit_for_bit_the_same(fixes: tuple[str, ...], arguments: dict[str, Any], found: str) -> None:
    plain = trained(**arguments)
    with applied(*fixes) as evidence:
        changed = trained(**arguments)
        shown = evidence()
    assert found in shown.found, shown.reason
    assert equal(plain, changed)


@pytest.mark.parametrize("fix", ["non-blocking", "device-prefetch"])
def test_pageable_memory_is_not_applied(fix: str) -> None:
    with applied(fix) as evidence:
        trained()
        assert "--fix pin-memory" in evidence().reason


def test_the_gpu_has_the_foreach_step_by_default() -> None:
    with applied("foreach-optimizer") as evidence:
        trained(torch.optim.AdamW)
        assert "by torch's default on a GPU" in evidence().reason
    plain = trained(lambda p: torch.optim.AdamW(p, foreach=False))
    with applied("foreach-optimizer") as evidence:
        changed = trained(lambda p: torch.optim.AdamW(p, foreach=False))
        assert evidence().found
    assert equal(plain, changed)


def test_the_fused_step_differs_by_rounding_only() -> None:
    plain = trained(torch.optim.AdamW)
    with applied("fused-optimizer") as evidence:
        changed = trained(torch.optim.AdamW)
        assert evidence().found
    for before, after in zip(plain, changed, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_segments_of_the_allocator_grow_with_the_variables() -> None:
    program = (
        "import torch; from gpudiag.fixes.memory import AllocConf; kept = torch.ones(1 << 22, device='cuda'); "
        "from gpudiag.capture.hooks import Patches; from gpudiag.fixes.fix import Site; "
        "print(AllocConf().evidence(Site(Patches())))"
    )
    environ = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    plain = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert "segments can grow" in plain.stderr
    changed = subprocess.run(
        [sys.executable, "-c", program], env={**environ, **AllocConf().environ}, capture_output=True, text=True, check=True
    )
    assert "segments of the allocator can grow" in changed.stdout

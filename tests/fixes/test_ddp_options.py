"""Options of DistributedDataParallel, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.errors import InputError  # noqa: E402
from gpudiag.fixes.distributed import DdpOptions  # noqa: E402

dist = torch.distributed


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(**options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("fix", "found"),
    [
        ("ddp-options", "DistributedDataParallel holds bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True"),
        ("ddp-options=bucket=3", "DistributedDataParallel holds bucket_cap_mb=3"),
        ("ddp-options=no-buffers", "DistributedDataParallel holds broadcast_buffers=False"),
        ("ddp-options=static,view", "DistributedDataParallel holds static_graph=True, gradient_as_bucket_view=True"),
    ],
)
def test_options_are_read_back_and_training_is_the_same(fix: str, found: str) -> None:
    plain = trained(bucket_cap_mb=1)
    with applied(fix) as evidence:
        changed = trained(bucket_cap_mb=1)
        assert evidence().found == found
    for before, after in zip(plain, changed, strict=True):
        torch.testing.assert_close(after, before)


def test_what_the_program_asks_for_itself_is_no_change() -> None:
    with applied("ddp-options=view") as evidence:
        assert evidence().reason == "the program has made no DistributedDataParallel"
        trained(gradient_as_bucket_view=True)
    with applied("ddp-options=view") as evidence:
        trained(gradient_as_bucket_view=True)
        assert evidence().reason == "the program asks for gradient_as_bucket_view=True already"


@pytest.mark.parametrize("value", ["", "bucket", "bucket=", "bucket=0", "bucket=many", "views", "view static"])
def test_options_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(InputError, match="ddp-options takes bucket=MIB, view and static"):
        DdpOptions(value)

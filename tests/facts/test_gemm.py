"""Which products alignment matters for (times in us)."""

from __future__ import annotations

import msgspec
import pytest
from factories import A100, analysis, kernel

from gpudiag.facts import Facts


@pytest.mark.parametrize(("rows", "bound", "share"), [(1, "memory", 0.0), (7, "memory", 0.0), (9, "memory", 0.5), (1, "compute", 0.5)])
def test_products_with_a_few_vectors_that_bytes_bind_have_no_alignment(rows: int, bound: str, share: float) -> None:
    work = [kernel("aten::linear", 0, 500, shapes=[[rows, 4096], [4096, 4096]], dtype="bf16", bound=bound)]
    assert Facts(analysis(work)).value("misaligned_product_share") == pytest.approx(share)


@pytest.mark.parametrize(
    ("told", "prefers"), [("8.0", True), ("10.0", True), ("7.5", False), ("\u00b2.0", False), ("9" * 5000, False), (None, False)]
)
def test_a_compute_capability_that_is_none_names_no_device(told: str | None, prefers: bool) -> None:
    device = msgspec.structs.replace(A100, compute_capability=told)
    work = [kernel("aten::linear", 0, 500, shapes=[[4096, 4104], [4096, 4104]], dtype="bf16", bound="compute", t_roof=100)]
    assert Facts(analysis(work, device=device)).value("softly_misaligned_product_share") == (0.5 if prefers else 0.0)

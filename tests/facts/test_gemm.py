"""Which products alignment matters for (times in us)."""

from __future__ import annotations

import pytest
from factories import analysis, kernel

from gpudiag.facts import Facts


@pytest.mark.parametrize(("rows", "bound", "share"), [(1, "memory", 0.0), (7, "memory", 0.0), (9, "memory", 0.5), (1, "compute", 0.5)])
def test_products_with_a_few_vectors_that_bytes_bind_have_no_alignment(rows: int, bound: str, share: float) -> None:
    work = [kernel("aten::linear", 0, 500, shapes=[[rows, 4096], [4096, 4096]], dtype="bf16", bound=bound)]
    assert Facts(analysis(work)).value("misaligned_product_share") == pytest.approx(share)

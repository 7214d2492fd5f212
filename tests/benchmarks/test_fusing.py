"""Upper bounds of fusing against what fused kernels gave (sources: bench_fusing.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from bench_fusing import PROGRAMS, diagnose, read_pairs
from bench_op_costs import OPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OPS.is_dir(), reason="needs the measured times of ../shared/evidence/ops"),
]

# Liger's kernel takes in the residual addition too: a single op, part of no pattern and no chain
WIDER_CHANGE = {"fused_add_rms_norm"}


@pytest.mark.parametrize("kernel", sorted(PROGRAMS.keys() - WIDER_CHANGE))
@pytest.mark.parametrize("mode", ["forward", "full"])
def test_no_bound_is_below_what_the_fused_kernel_gave(kernel: str, mode: str) -> None:
    slowest = max((pair for pair in read_pairs() if (pair.kernel, pair.mode) == (kernel, mode)), key=lambda pair: pair.eager_ms)
    found = diagnose(slowest)
    if kernel == "geglu":  # its two element-wise ops stand apart: nothing is promised, and the fused form gave 2 % at most
        assert found.bound_ms is None
        assert abs(found.gain_ms) < 0.02 * slowest.eager_ms
    else:
        assert found.bound_ms is not None
        assert found.gain_ms - slowest.noise_ms <= found.bound_ms <= slowest.eager_ms

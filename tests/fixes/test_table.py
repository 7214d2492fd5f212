"""The fix descriptors that rules and experiments share."""

from __future__ import annotations

import ast
import re
from typing import get_args

from gpudiag.fixes import FIX_BY_ID, FIXES
from gpudiag.fixes.fix import Parity


def test_ids_are_unique_and_readable() -> None:
    assert len(FIX_BY_ID) == len(FIXES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fix.id) for fix in FIXES)


def test_conflicts_name_other_fixes_and_hold_both_ways() -> None:
    for fix in FIXES:
        for other in fix.conflicts:
            assert other != fix.id
            assert other in FIX_BY_ID, f"{fix.id} conflicts with {other}, which does not exist"
            assert fix.id in FIX_BY_ID[other].conflicts, f"{fix.id} conflicts with {other}, but not the other way round"


def test_two_ways_to_capture_cuda_graphs_are_not_combined() -> None:
    # torch.compile documents that reduce-overhead and max-autotune use CUDA graphs by default
    assert set(FIX_BY_ID["cuda-graphs"].conflicts) == {"compile-reduce-overhead", "compile-max-autotune"}


def test_every_fix_says_what_it_does_and_how_results_may_differ() -> None:
    for fix in FIXES:
        assert fix.title
        assert fix.parity in get_args(Parity)
        assert fix.change
        if fix.id not in {"accumulation", "device-prefetch", "alloc-conf", "malloc"}:  # words about the loop, environment variables
            ast.parse(fix.change)


def test_reduced_precision_is_never_called_rounding() -> None:
    assert {fix.id for fix in FIXES if fix.parity == "low_precision"} == {"bf16", "fp16", "tf32", "gelu-tanh"}

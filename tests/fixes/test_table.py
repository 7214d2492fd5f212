"""The table of fixes that rules and experiments share: descriptors, what applies them, and what is said of the others."""

from __future__ import annotations

import ast
import re
from typing import get_args

import pytest

from gpudiag.errors import InputError
from gpudiag.fixes import APPLIERS, FIX_BY_ID, FIXES, make_applier
from gpudiag.fixes.fix import Fix
from gpudiag.model.experiment import FixCall, ParityKind


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
        assert fix.parity in get_args(ParityKind)
        assert fix.change
        if fix.id not in {"accumulation", "device-prefetch", "alloc-conf", "malloc"}:  # words about the loop, environment variables
            ast.parse(fix.change)


def test_reduced_precision_is_never_called_rounding() -> None:
    assert {fix.id for fix in FIXES if fix.parity == "low_precision"} == {"bf16", "fp16", "tf32", "gelu-tanh"}


# -- what applies them -----------------------------------------------------------------------------------------------------

DATA = (
    "fused-optimizer",
    "foreach-optimizer",
    "batch-size",
    "loader-workers",
    "loader-prefetch",
    "worker-threads",
    "persistent-workers",
    "pin-memory",
    "non-blocking",
    "device-prefetch",
    "zero-grad-none",
    "alloc-conf",
    "malloc",
    "gc-freeze",
    "ddp-options",
)


def test_appliers_are_listed_once_in_the_order_of_the_fixes() -> None:
    listed = [known.id for known in APPLIERS]
    assert listed == [fix.id for fix in FIXES if fix.id in listed]
    assert set(DATA) <= set(listed)


@pytest.mark.parametrize("fix", DATA)
def test_a_fix_without_a_value_has_one_of_its_own(fix: str) -> None:
    made = make_applier(FixCall(fix))
    assert made.id == fix
    assert made.needs_gpu == ("cpu" not in FIX_BY_ID[fix].verified)


def test_accumulation_says_why_it_is_left_to_the_program() -> None:
    with pytest.raises(InputError, match="the program's own loop decides what a batch or a micro-batch is") as refused:
        make_applier(FixCall("accumulation", "4"))
    assert "--variant NAME=script:COPY.py" in str(refused.value)


_APPLIERS = {applier.id: applier for applier in APPLIERS}


def _refused_without_value(fix: Fix) -> bool:
    try:
        _APPLIERS[fix.id](None)
    except InputError:
        return True
    return False


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.id)
def test_the_descriptor_tells_what_the_command_takes(fix: Fix) -> None:
    assert fix.injected == (fix.id in _APPLIERS)
    assert fix.needs_value == (fix.injected and _refused_without_value(fix))

"""Which fixes can be put into a running program, and what is said of the others."""

from __future__ import annotations

import pytest

from gpudiag.errors import InputError
from gpudiag.fixes import APPLIERS, FIX_BY_ID, FIXES, make_applier
from gpudiag.model.experiment import FixCall

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

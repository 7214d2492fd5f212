"""The buckets of a breakdown sum to its wall time, or validate() says so."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.timeline import BUCKETS, BUSY_BUCKETS, IDLE_BUCKETS, Breakdown, BucketsNs

parts = st.lists(st.integers(0, 10**15), min_size=len(BUCKETS), max_size=len(BUCKETS))


def test_the_names_are_the_fields() -> None:
    assert msgspec.structs.fields(BucketsNs)[0].name == "compute"
    assert tuple(field.name for field in msgspec.structs.fields(BucketsNs)) == BUCKETS
    assert len(set(BUCKETS)) == len(BUSY_BUCKETS) + len(IDLE_BUCKETS)


@given(parts)
def test_a_partition_is_valid_and_splits_into_busy_and_idle(values: list[int]) -> None:
    breakdown = Breakdown(sum(values), BucketsNs(*values))
    breakdown.validate()
    assert breakdown.idle_ns == breakdown.wall_ns - sum(getattr(breakdown.buckets_ns, name) for name in BUSY_BUCKETS)


@given(parts, st.integers(-3, 3).filter(bool))
def test_one_nanosecond_too_many_or_too_few_is_an_error(values: list[int], error: int) -> None:
    with pytest.raises(AssertionError, match="buckets sum to"):
        Breakdown(sum(values) + error, BucketsNs(*values)).validate()


def test_a_negative_bucket_is_an_error_even_where_the_sum_is_right() -> None:
    with pytest.raises(AssertionError, match="negative bucket"):
        Breakdown(10, BucketsNs(compute=11, idle_launch=-1)).validate()

"""The search for the largest batch, on a memory that is linear in pieces as measured on real training."""

from __future__ import annotations

import pytest

from gpudiag.experiment.memory import TriedBatch, find_largest_batch, predict_peak_bytes

MB = 1_000_000


def peak(batch: int, *, fixed: int = 100 * MB, update: int = 60 * MB, sample: int = 5 * MB) -> int:
    """The larger of two phases: the update of the weights needs `update` whatever the batch, activations grow with it."""
    return fixed + max(update, sample * batch)


def test_the_line_through_two_large_sizes_foretells_and_one_through_small_ones_does_not() -> None:
    large = [TriedBatch(batch, peak(batch)) for batch in (16, 32)]
    assert predict_peak_bytes(large, 64) == peak(64)
    assert predict_peak_bytes(large[::-1], 64) == peak(64)
    small = [TriedBatch(batch, peak(batch)) for batch in (2, 4)]
    assert predict_peak_bytes(small, 64) == 160 * MB < peak(64)  # the update hid the slope
    assert predict_peak_bytes(large[:1], 64) is None
    assert predict_peak_bytes([TriedBatch(8, 200), TriedBatch(16, 180)], 32) == 180  # less memory is no trend


def test_a_size_that_would_not_fit_is_not_tried() -> None:
    tried: list[int] = []

    def run(batch: int) -> int:
        tried.append(batch)
        return peak(batch)

    found = find_largest_batch(run, 2, limit_bytes=1000 * MB, largest=4096)
    assert found.stopped_by == "predicted"  # 900 MB may be taken: 128 fit (740 MB), 256 would take 1380
    assert tried == [2, 4, 8, 16, 32, 64, 128]
    assert [size.batch for size in found.tried[-2:]] == [64, 128]
    assert max(size.peak_bytes for size in found.tried) <= 900 * MB


def test_a_failure_ends_the_search_with_what_fits() -> None:
    found = find_largest_batch(lambda batch: peak(batch) if batch < 32 else None, 4, limit_bytes=None)
    assert (found.stopped_by, [size.batch for size in found.tried]) == ("failed", [4, 8, 16])
    found = find_largest_batch(lambda batch: None, 4, limit_bytes=None)
    assert (found.stopped_by, found.tried) == ("first", ())


def test_a_failure_that_the_line_could_not_foretell_is_survived() -> None:
    found = find_largest_batch(lambda batch: peak(batch) if peak(batch) <= 170 * MB else None, 4, limit_bytes=190 * MB)
    assert (found.stopped_by, [size.batch for size in found.tried]) == ("failed", [4, 8])


@pytest.mark.parametrize(("largest", "last"), [(16, 16), (17, 16), (31, 16), (None, 256)])
def test_no_larger_size_is_tried_than_asked_for(largest: int | None, last: int) -> None:
    found = find_largest_batch(lambda batch: 1000, 4, limit_bytes=10**9, largest=largest)
    assert (found.stopped_by, found.tried[-1].batch) == ("limit", last)

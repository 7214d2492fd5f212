"""The search for the largest batch, on a memory that is linear in pieces as measured on real training."""

from __future__ import annotations

from gpudiag.experiment.batch_size import TriedBatch, find_fitting_batches, predict_peak_bytes

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

    found = find_fitting_batches(run, 4, limit_bytes=1000 * MB)
    assert tried == [4, 8, 16, 32, 64, 128]  # 900 MB may be taken: 128 fit (740 MB), 256 would take 1380
    assert [size.batch for size in found] == tried
    assert max(size.peak_bytes for size in found) <= 900 * MB


def test_a_failure_ends_the_search_with_what_fits() -> None:
    found = find_fitting_batches(lambda batch: peak(batch) if batch < 32 else None, 4, limit_bytes=None)
    assert [size.batch for size in found] == [4, 8, 16]
    assert not find_fitting_batches(lambda batch: None, 4, limit_bytes=None)


def test_a_failure_that_the_line_could_not_foretell_is_survived() -> None:
    found = find_fitting_batches(lambda batch: peak(batch) if peak(batch) <= 170 * MB else None, 4, limit_bytes=190 * MB)
    assert [size.batch for size in found] == [4, 8]


def test_the_search_ends_after_six_doublings() -> None:
    assert find_fitting_batches(lambda batch: 1000, 4, limit_bytes=10**9)[-1].batch == 256

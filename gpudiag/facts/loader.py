"""Facts about waiting for batches (INP-01)."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.bundle import LoaderSettings

DEFAULT_PREFETCH = 2
"""prefetch_factor that torch.utils.data.DataLoader takes where none is given and there are workers."""

NO_LOADER = "no DataLoader call was seen: iterate a torch DataLoader inside the profiled window, or record with gpudiag.profile"


def loader_spans(window: Window) -> spans.Spans:
    """Return when the loop was inside the loader's __next__; raises NotKnownError where no call was seen."""
    waits = window.loader_waits
    if waits is None:
        raise NotKnownError(NO_LOADER)
    return spans.of(waits)


def _from_records(window: Window) -> int:
    """Return the wait in ns by the step records of the bundle: at most the idle time of each recorded step."""
    records = window.analysis.step_records
    if records is None or records["loader_wait_ns"].null_count() == records.height:
        raise NotKnownError(NO_LOADER)
    numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64)
    known = records.filter(pl.col("step").is_in(numbers.drop_nulls().implode()) & pl.col("loader_wait_ns").is_not_null())
    require(known.height == window.steps.height > 0, "the analysed steps are not among the recorded ones: " + NO_LOADER)
    total = int(known["loader_wait_ns"].sum())
    return min(total, window.wall_ns if window.on_cpu else window.analysis.breakdown.idle_ns)


def _wait_ns(window: Window) -> int:
    if window.loader_waits is None:
        return _from_records(window)
    waits = loader_spans(window)
    if window.on_cpu:
        return spans.overlap(waits, window.step_spans)
    return spans.overlap(waits, spans.of(window.idle))


@fact("loader_wait_ns", unit="ns")
def loader_wait_ns(window: Window) -> int:
    """Time of the analysed steps inside the loader's __next__ while the device was idle.

    A wait while the device is still busy costs nothing and does not count. On a CPU-only run the CPU itself fetches the batch: all
    time inside __next__ counts, also what a loader without workers computes there.
    """
    return _wait_ns(window)


@fact("loader_wait_share", unit="share")
def loader_wait_share(window: Window) -> float:
    """loader_wait_ns over the wall time of the analysed steps."""
    return _wait_ns(window) / window.wall_ns


@fact("loader_in_process", unit="bool")
def loader_in_process(window: Window) -> bool:
    """Whether batches are made in the training process itself (num_workers=0)."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.loader is not None:
        return manifest.settings.loader.num_workers == 0
    waits = window.loader_waits
    if waits is None:
        raise NotKnownError(NO_LOADER)
    return bool(waits["name"].str.contains("_SingleProcessDataLoaderIter").any())


def _settings(window: Window) -> LoaderSettings:
    """Return what the bundle says of the DataLoader; raises NotKnownError for a plain trace."""
    manifest = window.analysis.manifest
    if manifest is None or manifest.settings.loader is None:
        raise NotKnownError("the trace does not hold the settings of the DataLoader: record with gpudiag.profile")
    return manifest.settings.loader


@fact("loader_prefetch_factor", unit="count")
def loader_prefetch_factor(window: Window) -> int:
    """Batches that each worker process of the DataLoader prepares ahead; 0 without workers."""
    settings = _settings(window)
    if settings.num_workers == 0:
        return 0
    return DEFAULT_PREFETCH if settings.prefetch_factor is None else settings.prefetch_factor


@fact("loader_keeps_workers", unit="bool")
def loader_keeps_workers(window: Window) -> bool:
    """Whether the DataLoader keeps its worker processes between epochs (persistent_workers=True)."""
    return _settings(window).persistent_workers


@fact("loader_pins_memory", unit="bool")
def loader_pins_memory(window: Window) -> bool:
    """Whether the DataLoader puts batches into pinned memory (pin_memory=True)."""
    return _settings(window).pin_memory


@fact("loader_workers", unit="count")
def loader_workers(window: Window) -> int:
    """Worker processes of the DataLoader."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.loader is not None:
        return manifest.settings.loader.num_workers
    waits = window.loader_waits
    if waits is not None and waits["name"].str.contains("_SingleProcessDataLoaderIter").all():
        return 0
    raise NotKnownError("the trace does not hold the number of loader workers: record with gpudiag.profile")

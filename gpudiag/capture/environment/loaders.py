"""The arguments of a DataLoader, from itself or from an iterator of it."""

from __future__ import annotations

import multiprocessing
from typing import Any, Literal

from gpudiag.capture.environment.reading import count, flag, name, read
from gpudiag.model.bundle import LoaderSettings


def loader_settings(loader: object) -> LoaderSettings | None:
    """Return the settings of a DataLoader, or of an iterator of one; None for any other iterable."""
    under = next((prefix for prefix in ("", "_") if count(getattr(loader, f"{prefix}num_workers", None)) is not None), None)
    if under is None:
        return None

    def get(wanted: str) -> Any:
        return getattr(loader, f"{under}{wanted}", None)

    index_sampler = read(lambda: loader._index_sampler)  # type: ignore[attr-defined]  # BatchSampler, or the sampler itself
    size = get("batch_size") if not under else None
    kind = _dataset(loader)
    return LoaderSettings(
        num_workers=get("num_workers"),
        pin_memory=bool(get("pin_memory")),
        persistent_workers=bool(get("persistent_workers")),
        prefetch_factor=count(get("prefetch_factor")),
        batch_size=count(size if size is not None else getattr(index_sampler, "batch_size", None)),
        drop_last=flag(get("drop_last")),
        in_order=flag(get("in_order")),
        sampler=None if kind != "map" else name(type(getattr(index_sampler, "sampler", index_sampler)).__name__),
        dataset=kind,
        start_method=read(lambda: _start_method(loader)) if get("num_workers") else None,
        pin_memory_device=name(get("pin_memory_device")),
    )


def _dataset(loader: object) -> Literal["map", "iterable"] | None:
    """Return the kind of dataset (torch.utils.data.dataloader._DatasetKind: 0 map, 1 iterable)."""
    kind = count(getattr(loader, "_dataset_kind", None))
    return None if kind not in (0, 1) else "iterable" if kind else "map"


def _start_method(loader: Any) -> str | None:
    """Return how the workers start; where the program has not chosen, Python's default once it is fixed."""
    context = getattr(loader, "multiprocessing_context", None)
    workers = getattr(loader, "_workers", None)
    chosen = context.get_start_method(allow_none=True) if context is not None else None
    chosen = chosen or (getattr(workers[0], "_start_method", None) if workers else None)
    return name(chosen or multiprocessing.get_start_method(allow_none=True))

"""A batch in parts: gradient accumulation that trains on the same samples."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any

from gpudiag.capture.samples import samples_of
from gpudiag.experiment.fixes.fix import NotAppliedError

_PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""What is the same for every sample, or has no samples."""


def micro_batches(batch: Any, count: int, rows: int | None = None) -> list[tuple[Any, float]]:
    """Return `count` parts of `batch` along the first dimension of its tensors, and the share of the samples that each has.

    The sum of share x (mean loss of the part) is the mean loss of the batch, whatever the sizes of the parts. With fewer samples than
    `count` each is a part. `rows`: its samples where that is known. Raises NotAppliedError where what belongs to a sample cannot be told.
    """
    rows = samples_of(batch) if rows is None else rows
    if not rows:
        raise NotAppliedError("batches cannot be split: no tensor in them has samples in its first dimension")
    if rows == 1:
        raise NotAppliedError("batches cannot be split: they have one sample")
    count = min(count, rows)
    bounds = [rows * number // count for number in range(count + 1)]
    return [(_cut(batch, rows, start, end), (end - start) / rows) for start, end in pairwise(bounds)]


def _cut(value: Any, rows: int, start: int, end: int) -> Any:
    """Return samples `start` to `end` of `value`, a batch of `rows` samples or a part of one."""
    if isinstance(value, _PLAIN):
        return value
    if _is_array(value):
        return _cut_array(value, rows, start, end)
    if isinstance(value, MutableMapping):
        part = copy.copy(value)  # keeps the class: BatchEncoding of transformers has methods that a dict has not
        for name in value:
            part[name] = _cut(value[name], rows, start, end)
        return part
    if isinstance(value, (list, tuple)):
        return _cut_sequence(value, rows, start, end)
    raise NotAppliedError(f"batches cannot be split: they hold a {type(value).__name__}")


def _is_array(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "ndim"))


def _cut_array(value: Any, rows: int, start: int, end: int) -> Any:
    if value.ndim == 0:
        return value
    if value.shape[0] != rows:
        raise NotAppliedError(f"batches cannot be split: they hold tensors of {rows} and of {value.shape[0]} rows")
    return value[start:end]


def _cut_sequence(value: Any, rows: int, start: int, end: int) -> Any:
    """Return a list or tuple of the same class: of names the samples' own, of anything else each item cut."""
    if value and len(value) == rows and all(isinstance(item, _PLAIN) for item in value):
        if not all(isinstance(item, (str, bytes)) for item in value):
            raise NotAppliedError(f"batches cannot be split: it cannot be told whether a {type(value).__name__} has one number a sample")
        return value[start:end]
    items = [_cut(item, rows, start, end) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

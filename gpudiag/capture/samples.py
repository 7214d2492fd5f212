"""How many samples a batch has."""

from __future__ import annotations

from contextlib import suppress

from gpudiag.capture import inside

MOST_ITEMS = 256
"""Items of one level of a batch that are looked at, about: so many cost 0.1 ms."""


def samples_of(batch: object) -> int | None:
    """Return the first dimension of the first tensor in `batch` (itself, or inside dicts, lists, tuples two levels deep); else None.

    Never raises, and runs nothing of the user's.
    """
    import torch

    with suppress(Exception), torch._C.DisableTorchFunction():  # whatever a batch of the user's own kind does: it is unknown then
        return _samples_of(batch, torch.Tensor)
    return None


def _samples_of(batch: object, tensor: type) -> int | None:
    level = [batch]
    for _ in range(3):
        inner: list[object] = []
        for item in level:
            if type(item) is tensor or tensor in inside.classes(item):
                samples = inside.first_dimension(item)
                if samples is not None:
                    return samples
            elif len(inner) < MOST_ITEMS:
                inner.extend(inside.contents(item))
        level = inner
    return None

"""Another number of samples in a batch. It trains otherwise: the learning rate stays as it is."""

from __future__ import annotations

from typing import Any

from gpudiag.capture.samples import samples_of
from gpudiag.errors import InputError
from gpudiag.experiment.fixes.fix import NotAppliedError, Site
from gpudiag.experiment.fixes.loaders import LoaderArgument, Made, loaders_of

FACTOR = 2.0
"""Without a value: twice as many samples."""


class BatchSize(LoaderArgument):
    """batch_size=n, or x times what each loader of the program has."""

    id = "batch-size"
    argument = "batch_size"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._size, self._factor = size_and_factor(value)

    def install(self, site: Site) -> None:
        """Have batches of another size made, and look at the first that each iterator gives."""
        from torch.utils.data import dataloader

        super().install(site)
        self._loaders = loaders_of(site)
        site.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._counted)

    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Set the size of the loader's batches, where it is the loader that makes them."""
        size = made.asked["batch_size"]
        if size is None or arguments.get("batch_sampler") is not None:
            return "the program makes its batches itself: its DataLoader has a batch_sampler, or batch_size=None"
        wanted = self._size or max(1, round(size * self._factor))
        if wanted == size:
            return f"batches have {size} samples already"
        arguments["batch_size"] = wanted
        return ""

    def evidence(self, site: Site) -> str:
        """Return the samples of a batch beside those asked for. Raises NotAppliedError where they are as many as before."""
        iterated = self._loaders.iterated
        if not iterated:
            raise NotAppliedError("no DataLoader gave batches")
        shown = next((made for made in iterated if not made.refused.get(self.id) and _holds(made)), None)
        if shown is not None:
            return f"batches of {shown.samples} samples instead of {shown.asked['batch_size']}"
        first = iterated[0]
        if first.refused.get(self.id):
            raise NotAppliedError(first.refused[self.id])
        held = "an unknown number of" if first.samples is None else str(first.samples)
        raise NotAppliedError(f"the loader makes batches of {first.given['batch_size']}, but what it gives holds {held} samples")

    def _counted(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:  # noqa: N807 - as torch names it
            batch = original(iterator)
            if iterator._num_yielded == 1:
                made = self._loaders.of(iterator)
                if made is not None:
                    made.samples = samples_of(batch)
            return batch

        return __next__


def _holds(made: Made) -> bool:
    """Return whether a batch holds the samples that it was to hold: a collate function may pack them, and a small dataset has fewer."""
    wanted, samples = made.given["batch_size"], made.samples
    return samples is not None and (samples == wanted or made.asked["batch_size"] < samples < wanted)


def size_and_factor(value: str | None) -> tuple[int | None, float]:
    """Return the size and the factor of a value: x2, x0.5, 64. Raises InputError for what is none."""
    if value is None:
        return None, FACTOR
    try:
        factor = float(value[1:]) if value.startswith("x") else 1.0
        size = None if value.startswith("x") else int(value)
    except ValueError:
        factor, size = 0.0, None
    if not 0 < factor <= 1024 or (size is not None and size < 1):
        raise InputError(
            f"batch-size takes a factor or a number of samples, not {value!r}", "for example --fix batch-size=x2 or batch-size=64"
        )
    return size, factor

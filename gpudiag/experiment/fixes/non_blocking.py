"""Copies to the GPU that the program does not wait for.

Only those from pinned memory are changed: a copy from pageable memory is staged by the driver, and the way back from the GPU must be
waited for (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.values import nothing


class NonBlocking(Applier):
    """non_blocking=True in Tensor.to(device) and Tensor.cuda()."""

    id = "non-blocking"
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self._copies = self._pinned = self._changed = 0

    def install(self, site: Site) -> None:
        """Wrap the two methods."""
        import torch

        site.patches.wrap_method(torch.Tensor, "to", self._method(to_gpu, place_in_to))
        site.patches.wrap_method(torch.Tensor, "cuda", self._method(lambda *_: True, lambda _: 1))

    def evidence(self, site: Site) -> str:
        """Return how many copies from pinned memory no longer wait. Raises NotAppliedError where there are none."""
        if self._changed:
            return f"{self._changed} of {self._copies} copies to the GPU, all from pinned memory, are no longer waited for"
        if not self._copies:
            raise NotAppliedError("the program copies nothing to a GPU by Tensor.to() or .cuda()")
        if not self._pinned:
            raise NotAppliedError(f"none of {self._copies} copies to the GPU comes from pinned memory: --fix pin-memory")
        raise NotAppliedError("the program's copies from pinned memory are non_blocking already")

    def _method(self, goes: Callable[..., bool], place: Callable[[tuple[Any, ...]], int]) -> Callable[[Any], Any]:
        import torch

        def make(original: Any) -> Any:
            def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and goes(args, kwargs):
                    args, kwargs = self._seen(tensor, args, kwargs, place(args))
                return original(tensor, *args, **kwargs)

            return copy

        return make

    def _seen(self, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Count a copy to the GPU, and return its arguments, changed where it comes from pinned memory."""
        self._copies += 1
        if not tensor.is_pinned():
            return args, kwargs
        self._pinned += 1
        if kwargs.get("non_blocking") or (len(args) > place and args[place]):
            return args, kwargs
        self._changed += 1
        return not_waiting(args, kwargs, place)


def to_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether Tensor.to with these arguments leads to a CUDA or HIP device: it takes a device, another tensor, or only a type."""
    import torch

    where = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(where, torch.Tensor):
        where = where.device
    if isinstance(where, str):
        return where.partition(":")[0] == "cuda"
    if isinstance(where, torch.device):
        return bool(where.type == "cuda")
    return isinstance(where, int) and not isinstance(where, bool)


def place_in_to(args: tuple[Any, ...]) -> int:
    """Return where non_blocking stands among the arguments of Tensor.to: (other, non_blocking) or (device, dtype, non_blocking)."""
    import torch

    return 1 if args and isinstance(args[0], torch.Tensor) else 2


def not_waiting(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with non_blocking=True, given by place or by name as the program does."""
    if len(args) > place:
        return (*args[:place], True, *args[place + 1 :]), kwargs
    return args, {**kwargs, "non_blocking": True}

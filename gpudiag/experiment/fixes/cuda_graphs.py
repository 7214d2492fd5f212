"""cuda-graphs: the forward and backward pass of each root, captured once and replayed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpudiag.experiment.fixes.fix import GRAPHED, NotAppliedError
from gpudiag.experiment.fixes.modules import RootFix, device_of, forward_of, inner, name_of, put_forward, wrap_forward
from gpudiag.experiment.fixes.outputs import tensors


class CudaGraphs(RootFix):
    """Captures each root at its first call, by torch.cuda.make_graphed_callables.

    A graph replays with the shapes that it was captured with, and its outputs stand in the same memory each time. So other shapes, and a
    call whose backward pass is still to come, run as before.
    """

    id = "cuda-graphs"
    layer = GRAPHED
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._graphs: list[Graphed] = []

    def change(self, module: Any) -> None:
        """Capture the root at its first call. Raises NotAppliedError where that cannot work."""
        if device_of(module).type != "cuda":
            raise NotAppliedError("CUDA graphs need a model on a GPU")
        if type(module).__name__ == "OptimizedModule":
            raise NotAppliedError('the program compiles already: torch.compile(mode="reduce-overhead") makes CUDA graphs of it')
        if inner(module) is not module:
            raise NotAppliedError(f"{type(module).__name__} has to be captured where it is made: before DDP wraps it, on a side stream")
        self._graphs.append(Graphed(module))

    def shown(self) -> str:
        """Return how often the graphs were replayed. Raises NotAppliedError where none was."""
        if not any(graph.replays for graph in self._graphs):
            raise NotAppliedError("; ".join(graph.refused or f"{graph.name} was never replayed" for graph in self._graphs))
        return "; ".join(f"{graph.name} replayed {graph.replays} times, run as before {graph.others} times" for graph in self._graphs)


class Graphed:
    """One module with its graph."""

    def __init__(self, module: Any) -> None:
        self.name = name_of(module)
        self.replays = self.others = 0
        self.refused = ""
        self._pending = False
        self._shapes: list[tuple[Any, ...]] | None = None
        self._replay: Any = None
        wrap_forward(module, self._make)

    def _make(self, forward: Any) -> Any:
        import torch

        def graphed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not module.training:
                return forward(module, *args, **kwargs)
            if self._shapes is None:
                self._capture(module, forward, args, kwargs)
            if self._replay is None or kwargs or self._pending or _shapes(args) != self._shapes:
                self.others += 1
                return forward(module, *args, **kwargs)
            self.replays += 1
            return self._followed(self._replay(*args))

        return graphed

    def _capture(self, module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the forward and backward pass on inputs like these; keep the reason where torch refuses. State of the module is put back:
        it runs several times for that."""
        import torch

        self._shapes = _shapes(args)
        if kwargs or not args or any(not isinstance(arg, torch.Tensor) for arg in args):
            self.refused = f"{self.name} is called with other things than tensors by position"
            return
        ours = forward_of(module)
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        random = torch.cuda.get_rng_state()
        put_forward(module, forward)
        try:
            samples = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
            with _autocast_without_cache():
                torch.cuda.make_graphed_callables(module, samples)
            self._replay = module.forward
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            self.refused = f"{self.name} cannot be captured: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        finally:
            put_forward(module, ours)
            torch.cuda.set_rng_state(random)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _followed(self, output: Any) -> Any:
        """Keep that the backward pass of this output is still to come, until its gradient is there."""
        first = next((tensor for tensor in tensors(output) if tensor.requires_grad), None)
        if first is not None:
            self._pending = True
            first.register_hook(self._passed)
        return output

    def _passed(self, _: Any) -> None:
        self._pending = False


def _shapes(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [(getattr(arg, "shape", None), getattr(arg, "dtype", None), getattr(arg, "requires_grad", None)) for arg in args]


def _autocast_without_cache() -> AbstractContextManager[Any]:
    """Return autocast as it is now, without its cache of weights, which no graph may read (torch.cuda.make_graphed_callables says so)."""
    import torch

    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    again: AbstractContextManager[Any] = torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
    return again

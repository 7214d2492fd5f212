"""Fixes by torch.compile (default, reduce-overhead, max-autotune, one region) and by CUDA graphs."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpudiag.capture.hooks import skip_frame
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.experiment.fixes.fix import COMPILED, GRAPHED, NotAppliedError, Site
from gpudiag.experiment.fixes.forward_pass import (
    RootFix,
    find_device,
    get_forward,
    get_module_name,
    list_tensors,
    set_forward,
    unwrap_module,
    wrap_forward,
)


class DynamoCounts(msgspec.Struct, frozen=True):
    """What Dynamo has done in this process so far."""

    graphs: int = 0
    breaks: int = 0
    recompiles: int = 0

    def since(self, before: DynamoCounts) -> DynamoCounts:
        """Return what it has done since `before`."""
        return DynamoCounts(self.graphs - before.graphs, self.breaks - before.breaks, self.recompiles - before.recompiles)

    def plus(self, other: DynamoCounts) -> DynamoCounts:
        """Return both together."""
        return DynamoCounts(self.graphs + other.graphs, self.breaks + other.breaks, self.recompiles + other.recompiles)

    def __str__(self) -> str:
        said = (("graph", self.graphs), ("graph break", self.breaks), ("recompilation", self.recompiles))
        return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in said)


def read_dynamo_counts() -> DynamoCounts:
    """Return what Dynamo has done in this process so far; it keeps count in torch._dynamo.utils.counters and in convert_frame."""
    utils, convert = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch._dynamo.convert_frame")
    with suppress(Exception):  # no public interface
        if utils is not None:
            frames = getattr(convert, "FRAME_COMPILE_COUNTER", {})
            again = sum(count - 1 for count in frames.values() if count > 1)
            return DynamoCounts(utils.counters["stats"]["unique_graphs"], sum(utils.counters["graph_break"].values()), again)
    return DynamoCounts()


class CompiledModule:
    """A module whose forward pass is compiled.

    `forward` is compiled, and not the module: torch.compile(module) makes another object, and module.compile() compiles nothing where the
    class of the module is torch's own, whose frames Dynamo skips (https://github.com/pytorch/pytorch/issues/150915).
    """

    def __init__(self, module: Any, name: str, **options: Any) -> None:
        import torch

        self.counts = DynamoCounts()
        self.name = name
        self._counting = True
        compiled = torch.compile(get_forward(module), **options)

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._counting:
                return compiled(module, *args, **kwargs)
            before = read_dynamo_counts()
            try:
                return compiled(module, *args, **kwargs)
            finally:
                self.counts = self.counts.plus(read_dynamo_counts().since(before))

        skip_frame(forward)
        set_forward(module, functools.wraps(compiled, updated=())(forward))

    def settle(self) -> str:
        """Count no more, and return what was compiled, for a person; '' where nothing was."""
        self._counting = False
        return f"{self.name}: {self.counts}" if self.counts.graphs else ""


class CompileFix(RootFix):
    """Compiles what is inside of each root, with the options of the subclass."""

    layer = COMPILED
    mode: str | None = None

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._modules: list[CompiledModule] = []
        self._site: Site | None = None

    def install(self, site: Site) -> None:
        """Compile roots when they are called first."""
        self._site = site
        super().install(site)

    def change(self, module: Any) -> None:
        """Have the root compiled at its first call. Raises NotAppliedError where the program compiles it itself."""
        for name, target in self.targets(module):
            self._modules.append(CompiledModule(target, name, mode=self.mode))
        if self._site is not None:
            self._site.compiles = True

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return what of a root is to be compiled, by name. Raises NotAppliedError."""
        refuse_compiled(module)
        return [(get_module_name(module), unwrap_module(module))]

    def describe_evidence(self) -> str:
        """Return the graphs that Dynamo made of each root, with breaks and recompilations. Raises NotAppliedError where it made none."""
        shown = [module.settle() for module in self._modules]
        if not any(shown):
            raise NotAppliedError(f"torch.compile made no graph of {', '.join(module.name for module in self._modules)}")
        return "; ".join(text for text in shown if text)


def refuse_compiled(module: Any) -> None:
    """Do nothing. Raises NotAppliedError where the program compiles `module`, or a part of it, itself, or jit has."""
    import torch

    for name, part in module.named_modules():
        where = f" (at {name})" if name else ""
        if isinstance(part, torch.jit.ScriptModule):
            raise NotAppliedError(f"the program runs a torch.jit module{where}, which torch.compile refuses")
        if _is_compiled(part):
            raise NotAppliedError(f"the program compiles already{where}")


def _is_compiled(module: Any) -> bool:
    """Return whether torch.compile was called on `module`, its forward pass, or by its own compile(); disable() marks a function alike."""
    if type(module).__name__ == "OptimizedModule":
        return type(getattr(module, "dynamo_ctx", None)).__name__ != "DisableContext"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable") and not getattr(module.forward, "_torchdynamo_disable", False)


class Compile(CompileFix):
    """compile: torch.compile with its defaults.

    Compiles each root (https://docs.pytorch.org/docs/stable/generated/torch.compile.html).
    """

    id = "compile"


class CompileReduceOverhead(CompileFix):
    """compile-reduce-overhead: compiled, and replayed as CUDA graphs.

    Compiles each root with mode="reduce-overhead", which on a CPU is no other than the default.
    """

    id = "compile-reduce-overhead"
    mode = "reduce-overhead"
    needs_gpu = True

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return the root. Raises NotAppliedError where it is not on a GPU, or the program compiles it itself."""
        if find_device(module).type != "cuda":
            raise NotAppliedError("CUDA graphs need a model on a GPU")
        return super().targets(module)

    def describe_evidence(self) -> str:
        """Return what was compiled and recorded. Raises NotAppliedError where no CUDA graph was."""
        compiled, recorded = super().describe_evidence(), _count_cuda_graphs()
        if not recorded:
            refused = _read_inductor_count("cudagraph_skips")
            raise NotAppliedError(f"no CUDA graph was recorded, {refused} were refused (TORCH_LOGS=cudagraphs says why): {compiled}")
        return f"{compiled}; {recorded} CUDA graphs"


def _count_cuda_graphs() -> int:
    """Count the CUDA graphs that Inductor has recorded on this device (the trees of torch/_inductor/cudagraph_trees.py)."""
    import torch

    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    with suppress(Exception):  # no public interface
        if trees is not None:
            manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
            nodes = [root for roots in manager.roots.values() for root in roots]
            for node in nodes:  # grows meanwhile: a child was recorded behind its parent
                nodes += [child for children in node.children.values() for child in children]
            return len(nodes)
    return 0


def _read_inductor_count(name: str) -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    with suppress(Exception):  # no public interface
        if utils is not None:
            return int(utils.counters["inductor"][name])
    return 0


class CompileMaxAutotune(CompileFix):
    """compile-max-autotune: matrix products by the fastest of several kernels, found by timing them.

    Compiles each root with mode="max-autotune"; on a GPU that makes CUDA graphs too.
    """

    id = "compile-max-autotune"
    mode = "max-autotune"

    def describe_evidence(self) -> str:
        """Return what was compiled, and how many ops were tuned: none where their kernels came from a cache. Raises NotAppliedError."""
        tuned = _read_inductor_count("select_algorithm_autotune")  # by timing (torch/_inductor/select_algorithm.py)
        return f"{super().describe_evidence()}; {tuned} ops tuned in this process"


class FuseRegion(CompileFix):
    """fuse-region: torch.compile for a part of the model, whose ops are then fused.

    Compiles the modules below a root whose path is `value`; in it '*' stands for any part, as in 'layers.*.mlp'.

    Blocks of the same class share what is compiled (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
    """

    id = "fuse-region"

    def __init__(self, value: str | None = None) -> None:
        if not value:
            raise InputError("fuse-region takes the path of a module below the model", "for example --fix 'fuse-region=layers.*.mlp'")
        super().__init__(None)
        self.value = self._pattern = value

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return the modules of the path. Raises NotAppliedError where there is none, or the program compiles already."""
        refuse_compiled(module)
        parts = dict(unwrap_module(module).named_modules())
        found = [(name, part) for name, part in parts.items() if name and fnmatchcase(name, self._pattern)]
        if not found:
            raise NotAppliedError(f"the model has no module {self._pattern}{suggest_nearest(self._pattern, parts)}")
        return found

    def describe_evidence(self) -> str:
        """Return what was compiled. Blocks that share their graphs are counted with the first. Raises NotAppliedError where nothing was."""
        super().describe_evidence()
        together = self._modules[0].counts
        for module in self._modules[1:]:
            together = together.plus(module.counts)
        return f"{len(self._modules)} x {self._pattern}: {together}"


class CudaGraphs(RootFix):
    """cuda-graphs: the forward and backward pass of each root, captured once and replayed.

    Captures each root at its first call, by torch.cuda.make_graphed_callables.

    A graph replays with the shapes that it was captured with, and its outputs stand in the same memory each time. So other shapes, and a
    call whose backward pass is still to come, run as before.
    """

    id = "cuda-graphs"
    layer = GRAPHED
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._graphs: list[GraphedModule] = []

    def change(self, module: Any) -> None:
        """Capture the root at its first call. Raises NotAppliedError where that cannot work."""
        if find_device(module).type != "cuda":
            raise NotAppliedError("CUDA graphs need a model on a GPU")
        if type(module).__name__ == "OptimizedModule":
            raise NotAppliedError('the program compiles already: torch.compile(mode="reduce-overhead") makes CUDA graphs of it')
        if unwrap_module(module) is not module:
            raise NotAppliedError(f"{type(module).__name__} has to be captured where it is made: before DDP wraps it, on a side stream")
        self._graphs.append(GraphedModule(module))

    def describe_evidence(self) -> str:
        """Return how often the graphs were replayed. Raises NotAppliedError where none was."""
        if not any(graph.replays for graph in self._graphs):
            raise NotAppliedError("; ".join(graph.refused or f"{graph.name} was never replayed" for graph in self._graphs))
        return "; ".join(f"{graph.name} replayed {graph.replays} times, run as before {graph.others} times" for graph in self._graphs)


class GraphedModule:
    """One module with its graph."""

    def __init__(self, module: Any) -> None:
        self.name = get_module_name(module)
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
            if self._replay is None or kwargs or self._pending or _list_shapes(args) != self._shapes:
                self.others += 1
                return forward(module, *args, **kwargs)
            self.replays += 1
            output = self._replay(*args)
            # its backward pass is still to come, until its gradient is there
            first = next((tensor for tensor in list_tensors(output) if tensor.requires_grad), None)
            if first is not None:
                self._pending = True
                first.register_hook(lambda _: setattr(self, "_pending", False))
            return output

        return graphed

    def _capture(self, module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the forward and backward pass on inputs like these; keep the reason where torch refuses. State of the module is put back:
        it runs several times for that."""
        import torch

        self._shapes = _list_shapes(args)
        if kwargs or not args or any(not isinstance(arg, torch.Tensor) for arg in args):
            self.refused = f"{self.name} is called with other things than tensors by position"
            return
        ours = get_forward(module)
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        random = torch.cuda.get_rng_state()
        set_forward(module, forward)
        try:
            samples = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
            again: AbstractContextManager[Any] = nullcontext()
            if torch.is_autocast_enabled("cuda"):  # without its cache of weights, which no graph may read (make_graphed_callables says so)
                again = torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
            with again:
                torch.cuda.make_graphed_callables(module, samples)
            self._replay = module.forward
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            self.refused = f"{self.name} cannot be captured: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        finally:
            set_forward(module, ours)
            torch.cuda.set_rng_state(random)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _list_shapes(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [(getattr(arg, "shape", None), getattr(arg, "dtype", None), getattr(arg, "requires_grad", None)) for arg in args]

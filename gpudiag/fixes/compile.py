"""Fixes by torch.compile (default, reduce-overhead, max-autotune, one region) and by CUDA graphs."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from fnmatch import fnmatchcase
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any

from gpudiag.capture.hooks import skip_frame
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes.fix import COMPILED, GRAPHED, Fix, NoPlaceError, NotAppliedError, Site
from gpudiag.fixes.forward_pass import RootFix, get_forward, get_module_name, list_tensors, set_forward, unwrap_module, wrap_forward
from gpudiag.fixes.memory import find_blocks

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

DYNAMO_WORK = ("graph", "graph break", "recompilation")


def read_dynamo_counts() -> Counter[str]:
    """Read what Dynamo has done in this process so far, by DYNAMO_WORK: from torch._dynamo.utils.counters and convert_frame."""
    utils, convert = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch._dynamo.convert_frame")
    with suppress(Exception):  # no public interface
        if utils is not None:
            frames = getattr(convert, "FRAME_COMPILE_COUNTER", {})
            again = sum(count - 1 for count in frames.values() if count > 1)
            counts = (utils.counters["stats"]["unique_graphs"], sum(utils.counters["graph_break"].values()), again)
            return Counter(dict(zip(DYNAMO_WORK, counts, strict=True)))
    return Counter()


def format_dynamo_counts(counts: Counter[str]) -> str:
    """Format all counts, those of nothing too."""
    return ", ".join(f"{counts[what]} {what}{'' if counts[what] == 1 else 's'}" for what in DYNAMO_WORK)


class CompiledCall:
    """A function that is compiled: `call` runs it."""

    def __init__(self, original: Callable[..., Any], name: str, **options: Any) -> None:
        import torch

        self.counts: Counter[str] = Counter()
        self.name = name
        self.counting = True
        compiled = torch.compile(original, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.counting:
                return compiled(*args, **kwargs)
            before = read_dynamo_counts()
            try:
                return compiled(*args, **kwargs)
            finally:
                self.counts += read_dynamo_counts() - before

        skip_frame(call)
        self.call = functools.wraps(compiled, updated=())(call)


class CompileFix(RootFix):
    """Compiles what is inside of each root, with the options of the subclass; only the modules at the path `pattern`, where given.

    A root without modules in it is one of many layers, as a rule: where the program puts them together in functions of its own, or computes
    with bare parameters, those functions are compiled, from the third step on.
    """

    layer = COMPILED
    kind = "torch.compile"
    frameworks = MappingProxyType({"transformers.TrainingArguments": "torch_compile=True"})
    mode: str | None = None
    pattern = ""

    def install(self, site: Site) -> None:
        super().install(site)
        self._compiled: list[CompiledCall] = []
        self._layers: list[Any] = []
        self._graphs = read_dynamo_counts()["graph"]
        if not self.pattern:
            from gpudiag.fixes.functions import find_loss_functions

            find_loss_functions(self._compile_functions, site.patches)

    def change(self, module: Any) -> None:
        refuse_compiled(module)
        targets = {get_module_name(module): unwrap_module(module)}
        if self.pattern:
            parts = dict(unwrap_module(module).named_modules())
            targets = {name: part for name, part in parts.items() if name and fnmatchcase(name, self.pattern)}
            if not targets:
                raise NotAppliedError(f"the model has no module {self.pattern}{suggest_nearest(self.pattern, parts)}")
        elif next(unwrap_module(module).children(), None) is None:
            self._layers.append(module)
            return
        for name, target in targets.items():
            set_forward(target, self._compile(get_forward(target), name))

    def _compile(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Compile a forward pass, and not the module: torch.compile(module) makes another object, and module.compile() compiles nothing
        where the class is torch's own, whose frames Dynamo skips (https://github.com/pytorch/pytorch/issues/150915)."""
        self._compiled.append(CompiledCall(original, name, mode=self.mode))
        self._site.compiles = True
        return self._compiled[-1].call

    def _compile_functions(self, found: Sequence[CodeType]) -> None:
        """Compile the functions that make the loss, where no module does; layers by themselves where the loop calls them itself."""
        from gpudiag.fixes.functions import replace_function

        if not self._compiled and read_dynamo_counts()["graph"] > self._graphs:
            self._changed, self._reasons = 0, (*self._reasons, "the program compiles already")
            return
        modules = len(self._compiled)
        for code in () if modules or self._reasons else found:  # what was refused is not compiled from outside either
            replace_function(code, lambda function: self._compile(function, f"{function.__name__}()"), self._site.patches)
        for layer in self._layers if len(self._compiled) == modules else ():
            set_forward(unwrap_module(layer), self._compile(get_forward(unwrap_module(layer)), get_module_name(layer)))
        self._changed += len(self._compiled)
        if not self._compiled:
            self._reasons += ("neither a module nor a function of its own makes the loss: the loop computes it itself",)

    def describe_evidence(self) -> str:
        """Return the graphs that Dynamo made of each, with breaks and recompilations. Raises NotAppliedError where it made none."""
        for one in self._compiled:
            one.counting = False
        shown = [f"{one.name}: {format_dynamo_counts(one.counts)}" for one in self._compiled if one.counts["graph"]]
        if not shown:
            raise NotAppliedError(f"torch.compile made no graph of {', '.join(one.name for one in self._compiled) or 'single layers'}")
        return "; ".join(shown)

    def patch(self, code: TrainingCode) -> None:
        """Compile the model in place, once it is complete: what holds it, and the names of its weights, stay as they are.

        A class of torch's own, whose frames Dynamo skips, is wrapped instead, where the file does nothing with it but train.
        """
        refuse_compiling_code(code)
        step = code.find_step()
        place, name, made = code.find_model_place(step)
        options = f'mode="{self.mode}"' if self.mode else ""
        if not code.is_made_by_torch(made):
            code.insert_after(place, f"{name}.compile({options})")
            return
        code.check_wrappable(step, place)
        code.need_import("torch")
        code.insert_after(place, f"{name} = torch.compile({', '.join(filter(None, (name, options)))})")


def refuse_compiling_code(code: TrainingCode) -> None:
    """Do nothing. Raises NoPlaceError where the file compiles already, or calls something else so."""
    for call in code.calls:
        if code.qualify(call.func) == "torch.compile" or (code.get_method(call) == "compile" and code.qualify(call.func) != "re.compile"):
            raise NoPlaceError(f"the file has {code.render(call.func)}() already", code.line(call))
    if code.defines("compile"):
        raise NoPlaceError("a class of the file has a compile() of its own")
    for call in code.find_calls("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        raise NoPlaceError("DataParallel makes replicas of the module in each step: use DistributedDataParallel", code.line(call))


def refuse_compiled(module: Any) -> None:
    """Do nothing. Raises NotAppliedError where the program compiles `module`, or a part of it, itself, or jit has."""
    import torch

    for name, part in module.named_modules():
        where = f" (at {name})" if name else ""
        if isinstance(part, torch.jit.ScriptModule):
            raise NotAppliedError(f"the program runs a torch.jit module{where}, which torch.compile refuses")
        if type(part).__name__ == "OptimizedModule":
            compiled = type(getattr(part, "dynamo_ctx", None)).__name__ != "DisableContext"
        else:  # by its own compile(), or its forward pass: disable() marks a function alike
            compiled = getattr(part, "_compiled_call_impl", None) is not None or (
                hasattr(part.forward, "_torchdynamo_orig_callable") and not getattr(part.forward, "_torchdynamo_disable", False)
            )
        if compiled:
            raise NotAppliedError(f"the program compiles already{where}")


class Compile(CompileFix):
    """compile: torch.compile with its defaults.

    Compiles each root (https://docs.pytorch.org/docs/stable/generated/torch.compile.html).
    """

    fix = Fix(
        "compile", "Compile the model", "rounding", "model = torch.compile(model)",
        conflicts=("compile-reduce-overhead", "compile-max-autotune", "fuse-region"),
    )  # fmt: skip


class CompileReduceOverhead(CompileFix):
    """compile-reduce-overhead: compiled, and replayed as CUDA graphs.

    Compiles each root with mode="reduce-overhead", which on a CPU is no other than the default.
    """

    fix = Fix(
        "compile-reduce-overhead", "Compile with CUDA graphs", "rounding", 'model = torch.compile(model, mode="reduce-overhead")',
        conflicts=("compile-max-autotune", "fuse-region", "cuda-graphs"), verified=(),
    )  # fmt: skip
    mode = "reduce-overhead"
    needs_gpu = True

    def describe_evidence(self) -> str:
        """Return what was compiled and recorded. Raises NotAppliedError where no CUDA graph was."""
        compiled, nodes = super().describe_evidence(), []
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        with suppress(Exception):  # no public interface
            if trees is not None:
                import torch

                manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
                nodes = [root for roots in manager.roots.values() for root in roots]
                for node in nodes:  # grows meanwhile: a child was recorded behind its parent
                    nodes += [child for children in node.children.values() for child in children]
        if not nodes:
            refused = _read_inductor_count("cudagraph_skips")
            raise NotAppliedError(f"no CUDA graph was recorded, {refused} were refused (TORCH_LOGS=cudagraphs says why): {compiled}")
        return f"{compiled}; {len(nodes)} CUDA graphs"


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

    fix = Fix(
        "compile-max-autotune", "Compile and autotune GEMMs", "rounding", 'model = torch.compile(model, mode="max-autotune")',
        conflicts=("fuse-region", "cuda-graphs"),
    )  # fmt: skip
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

    fix = Fix(
        "fuse-region", "Compile the region that fuses", "rounding", "region = torch.compile(region)",
        values="the path of a module below the model; '*' stands for any part, as in layers.*.mlp", needs_value=True,
    )  # fmt: skip

    def __init__(self, value: str | None = None) -> None:
        if not value:
            raise InputError("fuse-region takes the path of a module below the model", "for example --fix 'fuse-region=layers.*.mlp'")
        super().__init__(None)
        self.value = self.pattern = value

    def describe_evidence(self) -> str:
        """Return what was compiled. Blocks that share their graphs are counted with the first. Raises NotAppliedError where nothing was."""
        super().describe_evidence()
        together = sum((one.counts for one in self._compiled), Counter[str]())
        return f"{len(self._compiled)} x {self.pattern}: {format_dynamo_counts(together)}"

    def patch(self, code: TrainingCode) -> None:
        """Compile each module at the path in place, once the model is complete."""
        refuse_compiling_code(code)
        place, name, _ = code.find_model_place(code.find_step())
        indent, lines, holder = "", list[str](), name
        for part in self.pattern.split("."):
            if part == "*":
                lines.append(f"{indent}for region in {holder}.children():" if not lines else "")
                indent, holder = "    ", "region"
            elif part.isdigit():
                holder += f"[{part}]"
            elif part.isidentifier():
                holder += f".{part}"
            else:
                lines.append("")
        if "" in lines:
            raise NoPlaceError(f"the path {self.pattern} is no line of code", code.line(place[0].body[place[1]]))
        code.insert_after(place, "\n".join([*lines, f"{indent}{holder}.compile()"]))


class CompileBlocks(CompileFix):
    """compile-blocks: torch.compile for the repeated blocks of a model, one by one.

    Compiles the equal children of the outermost lists and sequences of each root: blocks of one class share what is compiled, so that the
    start is as short as for one of them (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
    """

    fix = Fix(
        "compile-blocks", "Compile the repeated blocks", "rounding", "[block.compile() for block in model.layers]",
        conflicts=("compile", "compile-reduce-overhead", "compile-max-autotune", "fuse-region"), verified=(),
    )  # fmt: skip
    pattern = "the repeated blocks"
    frameworks = MappingProxyType({})

    def change(self, module: Any) -> None:
        refuse_compiled(module)
        blocks = find_blocks(unwrap_module(module))
        if not blocks:
            raise NotAppliedError(f"{get_module_name(module)} has no list of equal blocks")
        for block in blocks:
            set_forward(block, self._compile(get_forward(block), get_module_name(block)))

    def describe_evidence(self) -> str:
        """Return what was compiled; blocks that share their graphs are counted with the first. Raises NotAppliedError where nothing was."""
        super().describe_evidence()
        together = sum((one.counts for one in self._compiled), Counter[str]())
        return f"{len(self._compiled)} blocks: {format_dynamo_counts(together)}"

    def patch(self, code: TrainingCode) -> None:
        """Compile the blocks of the one list that the class of the model has, once the model is complete."""
        refuse_compiling_code(code)
        place, name, made = code.find_model_place(code.find_step())
        blocks = code.find_block_list(made)
        code.insert_after(place, f"for block in {name}.{blocks}:\n    block.compile()")


class CudaGraphs(RootFix):
    """cuda-graphs: the forward and backward pass of each root, captured once and replayed.

    Captures each root at its first call, by torch.cuda.make_graphed_callables.

    A graph replays with the shapes that it was captured with, and its outputs stand in the same memory each time. So other shapes, and a
    call whose backward pass is still to come, run as before.
    """

    fix = Fix(
        "cuda-graphs", "The step as a CUDA graph", "rounding", "model = torch.cuda.make_graphed_callables(model, sample_args)", verified=()
    )
    layer = GRAPHED
    needs_gpu = True
    _graphs: tuple[GraphedModule, ...] = ()

    def change(self, module: Any) -> None:
        if type(module).__name__ == "OptimizedModule":
            raise NotAppliedError('the program compiles already: torch.compile(mode="reduce-overhead") makes CUDA graphs of it')
        if unwrap_module(module) is not module:
            raise NotAppliedError(f"{type(module).__name__} has to be captured where it is made: before DDP wraps it, on a side stream")
        self._graphs += (GraphedModule(module),)

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
        wrap_forward(module, self._run)

    def _run(self, forward: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

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

"""Fixes of memory: activation checkpointing, expandable segments of the CUDA allocator, malloc that keeps host memory.

Segments of the CUDA caching allocator that grow:
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf

Host memory, mallopt(3): blocks above M_MMAP_THRESHOLD are mapped one by one and returned when freed; the top of the heap is returned above
M_TRIM_THRESHOLD. Each page that comes back costs a fault and is filled with zeros.
"""

from __future__ import annotations

import ctypes
import gc
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpudiag.fixes.fix import Applier, Fix, NoPlaceError, NotAppliedError, Site, around, parse_whole_number, require_used_gpu
from gpudiag.fixes.forward_pass import RootFix, get_module_name, unwrap_module, wrap_forward

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

_CHECKPOINT_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Of Hugging Face's models; the second is deprecated from transformers 5 on."""

_CHECKPOINT_FLAG = "gradient_checkpointing"


class Checkpointing(RootFix):
    """checkpointing: activations are computed again in the backward pass instead of being kept.

    Checkpoints the blocks of each root: by its own switch where it has one, else the equal children of a list or a sequence.

    Without re-entrance (https://docs.pytorch.org/docs/stable/checkpoint.html): blocks may take keyword arguments and frozen inputs. Random
    numbers are drawn again as they were, so that dropout is the same.
    """

    fix = Fix("checkpointing", "Activation checkpointing", "exact", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)")

    frameworks = MappingProxyType({"transformers.TrainingArguments": "gradient_checkpointing=True"})
    _switched: tuple[Any, ...] = ()
    _blocks: tuple[str, ...] = ()
    _normalised = False
    _calls = _runs = 0

    def change(self, module: Any) -> None:
        target, name = unwrap_module(module), get_module_name(module)
        switch = next((getattr(target, name) for name in _CHECKPOINT_SWITCHES if callable(getattr(target, name, None))), None)
        if switch is not None:
            if _list_checkpointing(target):
                raise NotAppliedError(f"{name} checkpoints already")
            try:
                switch({"use_reentrant": False})
            except ValueError as error:  # the model does not support it
                raise NotAppliedError(str(error)) from None
            self._switched += (target,)
            return
        blocks = find_blocks(target)
        if not blocks:
            raise NotAppliedError(f"{name} has no list of equal blocks: put torch.utils.checkpoint.checkpoint round its parts")
        self._checkpoint(blocks)

    def _checkpoint(self, blocks: list[Any]) -> None:
        import torch
        from torch.nn.modules.batchnorm import _BatchNorm
        from torch.utils.checkpoint import checkpoint

        compiling = torch.compiler.is_compiling

        def run_checkpointed(forward: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return forward(block, *args, **kwargs)
            if not compiling():
                self._calls += 1

            def run_counted(block: Any, *args: Any, **kwargs: Any) -> Any:
                if not compiling():
                    self._runs += 1
                return forward(block, *args, **kwargs)

            return checkpoint(run_counted, block, *args, use_reentrant=False, **kwargs)

        for block in blocks:
            self._blocks += (type(block).__name__,)
            self._normalised = self._normalised or any(isinstance(part, _BatchNorm) for part in block.modules())
            wrap_forward(block, run_checkpointed)

    def describe_evidence(self) -> str:
        """Return the blocks, and how often they ran in the backward pass again. Raises NotAppliedError where they did not."""
        flags = [name for module in self._switched for name in _list_checkpointing(module)]
        if flags:
            return f"{len(flags)} modules checkpoint: {', '.join(dict.fromkeys(flags))}"
        blocks = f"{len(self._blocks)} blocks ({', '.join(dict.fromkeys(self._blocks))})"
        twice = "; their running means of BatchNorm take each batch in twice" if self._normalised else ""
        if self._calls and self._runs <= self._calls:
            raise NotAppliedError(f"{blocks} were not run again in the backward pass")
        if not self._blocks:
            raise NotAppliedError("the model says that it does not checkpoint")
        return f"{blocks} run again in the backward pass{twice}" if self._calls else f"{blocks} compiled with their checkpoints{twice}"

    def patch(self, code: TrainingCode) -> None:
        """Use the switch of a Hugging Face model; else checkpoint the blocks of the one list that the model's class goes through."""
        place, name, made = code.find_model_place(code.find_step())
        if made is not None and code.qualify(made.func).startswith("transformers."):
            code.insert_after(place, f'{name}.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False}})')
            return
        call = code.find_block_call(made)
        code.need_import("torch.utils.checkpoint")
        code.put_in_call(call, "torch.utils.checkpoint.checkpoint", "use_reentrant=False")


def _list_checkpointing(module: Any) -> list[str]:
    return [type(part).__name__ for part in module.modules() if getattr(part, _CHECKPOINT_FLAG, False) is True]


def find_blocks(module: Any) -> list[Any]:
    """Find the children of the outermost lists and sequences whose children are of one class, and train."""
    from torch import nn

    children = list(module.children())
    equal = len(children) > 1 and len({type(child) for child in children}) == 1 and any(True for _ in children[0].parameters())
    if equal and isinstance(module, (nn.ModuleList, nn.Sequential)):
        return children
    return [block for child in children for block in find_blocks(child)]


ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.9, and the one before: both are set."""

ALLOC_CONF_OPTION, ALLOC_CONF_WANTED = "expandable_segments", "expandable_segments:True"

_EXPANDABLE_BEFORE = "GPUDIAG_EXPANDABLE_SEGMENTS"
"""Environment variable: set where the program was started with the option on already."""


class AllocConf(Applier):
    """Segments of the CUDA caching allocator that grow, so that blocks of changing sizes leave no holes.

    expandable_segments:True beside what is configured already.
    """

    fix = Fix("alloc-conf", "Allocator settings", "exact", "PYTORCH_ALLOC_CONF=expandable_segments:True", verified=())
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self.environ = build_alloc_conf({name: os.environ[name] for name in ALLOC_CONF_VARIABLES if name in os.environ})

    def install(self, site: Site) -> None:
        """Do nothing: the variables are there already. Raises NotAppliedError where they were before."""
        if os.environ.get(_EXPANDABLE_BEFORE):
            raise NotAppliedError(f"the program is started with {ALLOC_CONF_WANTED} already")

    def evidence(self, site: Site) -> str:
        """Return how many segments of the allocator can grow. Raises NotAppliedError where none can."""
        import torch

        require_used_gpu("segments are those of a GPU's memory")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise NotAppliedError(f"the allocator is {backend}, which has no such segments")
        segments = torch.cuda.memory_snapshot()
        growing = sum(bool(segment.get("is_expandable")) for segment in segments)
        if not growing:
            raise NotAppliedError(f"none of the allocator's {len(segments)} segments can grow: this driver or platform does not support it")
        return f"{growing} of {len(segments)} segments of the allocator can grow"


def build_alloc_conf(before: dict[str, str]) -> dict[str, str]:
    """Build the variables of an arm: the option beside what `before` configures."""
    conf = next((before[name] for name in ALLOC_CONF_VARIABLES if before.get(name)), "")
    options = [option for option in conf.split(",") if option.strip()]
    if ALLOC_CONF_WANTED in (option.replace(" ", "") for option in options):
        return {_EXPANDABLE_BEFORE: "1"}
    kept = [option for option in options if option.partition(":")[0].strip() != ALLOC_CONF_OPTION]
    return dict.fromkeys(ALLOC_CONF_VARIABLES, ",".join([*kept, ALLOC_CONF_WANTED]))


class GcFreeze(Applier):
    """gc-freeze: Python's collector goes over what steps make, and no longer over what was there before them.

    Collects and freezes once a model has been called for the third time: data, optimizer and caches are there by then.
    """

    fix = Fix("gc-freeze", "Collect garbage of the steps alone", "exact", "gc.collect(); gc.freeze()  # after the first steps")
    _calls = _frozen = 0

    def install(self, site: Site) -> None:
        def count(forward: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls == 3:
                gc.collect()
                before = gc.get_freeze_count()
                gc.freeze()
                self._frozen = gc.get_freeze_count() - before
            return forward(target, *args, **kwargs)

        site.on_root(lambda module: wrap_forward(module, count))

    def evidence(self, site: Site) -> str:
        """Return how many objects the collector leaves alone. Raises NotAppliedError where it leaves none."""
        if self._frozen <= 0 or not gc.get_freeze_count():
            raise NotAppliedError("no object is frozen: no model was called often enough, or the program thaws them itself")
        return f"{self._frozen:,} objects are frozen"

    def patch(self, code: TrainingCode) -> None:
        """Freeze what is there before the outermost training loop."""
        loop = code.find_loops()[-1]
        refuse_own_collection(code)
        code.need_import("gc")
        code.insert_before(code.find_places(loop)[0], "gc.collect()", "gc.freeze()")


def refuse_own_collection(code: TrainingCode) -> None:
    """Do nothing. Raises NoPlaceError where the file steers the collector itself."""
    own = next((call for call in code.calls if code.qualify(call.func).startswith("gc.")), None)
    if own is not None:
        raise NoPlaceError(f"the file calls {code.render(own.func)}() itself", code.line(own))


COLLECT_EVERY = 50
"""Steps between two collections, without a value: as torchtitan's garbage collection (torchtitan/tools/utils.py)."""


class GcSchedule(Applier):
    """gc-schedule: Python's collector runs every `value` steps (50), and not in the middle of one whenever it likes.

    Switches the automatic collection off when a model has been called for the third time, and collects at every n-th call from then on.
    """

    fix = Fix(
        "gc-schedule", "Collect garbage at fixed steps", "exact", "gc.disable(); ...; gc.collect()  # every 50 steps",
        values="steps between two collections, 50 by default",
    )  # fmt: skip
    _calls = _collected = 0

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._every = parse_whole_number(self.id, value, least=2) or COLLECT_EVERY

    def install(self, site: Site) -> None:
        def count(forward: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls == 3:
                gc.disable()
            if self._calls >= 3 and self._calls % self._every == 0:
                gc.collect()
                self._collected += 1
            return forward(target, *args, **kwargs)

        site.on_root(lambda module: wrap_forward(module, count))

    def evidence(self, site: Site) -> str:
        """Return that the automatic collection is off. Raises NotAppliedError where it is on."""
        if self._calls < 3 or gc.isenabled():
            raise NotAppliedError("the collector still runs by itself: no model was called often enough, or the program switches it on")
        return f"the automatic collection is off; {self._collected} collections in {self._calls:,} calls of the model"

    def patch(self, code: TrainingCode) -> None:
        """Switch the automatic collection off before the outermost loop, and collect by the counter of the inmost one."""
        loops = code.find_loops()
        refuse_own_collection(code)
        counter = code.find_counter(loops[0])
        if counter is None or not code.steps_in(loops[0]):
            raise NoPlaceError("the training loop has no counter of steps", code.line(loops[0]))
        code.need_import("gc")
        code.insert_before(code.find_places(loops[-1])[0], "gc.disable()")
        code.insert_before(code.get_first_place(loops[0]), f"if {counter} % {self._every} == 0:\n    gc.collect()")


class NoEmptyCache(Applier):
    """no-empty-cache: memory of the GPU stays with torch's allocator.

    Has torch.cuda.empty_cache() do nothing: each call returns memory to the driver, which waits for the device, and asks for it anew in the
    next step (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
    """

    fix = Fix("no-empty-cache", "Keep the allocator's memory", "exact", "# no torch.cuda.empty_cache() in the loop", verified=())
    needs_gpu = True
    _calls = 0

    def install(self, site: Site) -> None:
        import torch

        def keep(original: Any) -> None:
            self._calls += 1

        site.patches.wrap(torch.cuda, "empty_cache", around(keep))

    def evidence(self, site: Site) -> str:
        """Return how many calls were left out. Raises NotAppliedError where there was none."""
        if not self._calls:
            raise NotAppliedError("the program never calls torch.cuda.empty_cache()")
        return f"{self._calls} calls of torch.cuda.empty_cache() did nothing"

    def patch(self, code: TrainingCode) -> None:
        """Take the calls out of the loops round the backward pass."""
        loops = code.find_loops()
        calls = [call for call in code.find_calls("torch.cuda.empty_cache") if any(one in loops for one in code.list_ancestors(call))]
        if not calls:
            raise NoPlaceError("no torch.cuda.empty_cache() stands in the training loop of this file")
        for call in calls:
            code.remove_statement(call)


MALLOC_KEPT_BYTES = 256 * 1024 * 1024
"""Both thresholds."""

MALLOC_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(MALLOC_KEPT_BYTES), "MALLOC_TRIM_THRESHOLD_": str(MALLOC_KEPT_BYTES)}
"""What glibc reads when a process starts."""

_HEAP_BYTES, _MAPPED_BYTES = 192 * 1024 * 1024, 2 * MALLOC_KEPT_BYTES
"""Two blocks, reserved and never touched. Without the variables both are mapped one by one: the threshold that glibc moves by itself ends
at 32 MiB (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX), and an older glibc takes no larger one from us either. The first is large, so that no
hole in the heap holds it."""


class Malloc(Applier):
    """Host memory that malloc keeps, instead of asking the kernel for it anew and touching each page again, for every large tensor of
    a step.

    The thresholds as variables of the environment.
    """

    fix = Fix(
        "malloc", "Keep host memory instead of returning it", "exact",
        "MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=268435456",
    )  # fmt: skip
    environ = MALLOC_VARIABLES

    def install(self, site: Site) -> None:
        """Do nothing: the variables are there already. Raises NotAppliedError where malloc is not glibc's."""
        _read_glibc_version()

    def evidence(self, site: Site) -> str:
        """Return that a block of 192 MiB comes from the heap and one of 512 MiB does not. Raises NotAppliedError where that is not so."""
        version = _read_glibc_version()
        library = ctypes.CDLL(None)
        if not is_mapped(library, _MAPPED_BYTES):
            raise NotAppliedError("malloc is not that of glibc: another one stands in its place")
        if is_mapped(library, _HEAP_BYTES):
            raise NotAppliedError(f"glibc {version} still maps blocks of {_HEAP_BYTES >> 20} MiB one by one")
        return f"glibc {version} takes {_HEAP_BYTES >> 20} MiB from the heap, and maps {_MAPPED_BYTES >> 20} MiB"


def _read_glibc_version() -> str:
    """Read the version of glibc. Raises NotAppliedError where the C library is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        name = version = ""
    if name != "glibc":
        raise NotAppliedError("these variables are glibc's, and this C library is another one")
    return version


_MALLINFO_MEMBERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def is_mapped(library: ctypes.CDLL, size: int) -> bool:
    """Return whether malloc maps a block of `size` bytes by itself. Raises NotAppliedError where there is no such block to be had."""
    info, kind = (library.mallinfo2, ctypes.c_size_t) if hasattr(library, "mallinfo2") else (library.mallinfo, ctypes.c_int)  # glibc 2.33
    # a struct of malloc.h; hblks: blocks that are mapped one by one
    info.restype = type("MallInfo", (ctypes.Structure,), {"_fields_": [(name, kind) for name in _MALLINFO_MEMBERS]})
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    before = info().hblks
    block = library.malloc(size)
    if not block:
        raise NotAppliedError(f"malloc gives no block of {size >> 20} MiB to look at")
    after = info().hblks
    library.free(block)
    return bool(after > before)

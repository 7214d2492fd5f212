"""What is alive in the process when a recording ends: wrapped models, loss scalers, compiled code.

Nothing is hooked: models are wrapped before the recording begins. Looks at every object that Python's collector knows, so it is done once,
after the loop; only the types of objects are looked at, and attributes of torch's own classes.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from typing import Any

_CLASSES = {
    "ddp": ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    "data_parallel": ("torch.nn.parallel.data_parallel", "DataParallel"),
    "fsdp1": ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    "fsdp2": ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
    "fsdp2_old": ("torch.distributed._composable.fsdp.fully_shard", "FSDPModule"),
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    "scaler": ("torch.amp.grad_scaler", "GradScaler"),
    "compile": ("torch._dynamo.eval_frame", "OptimizeContext"),
    "generated": ("torch._inductor.output_code", "CompiledFxGraph"),
    "generated_old": ("torch._inductor.codecache", "CompiledFxGraph"),
    "checkpointed": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"),
    "module": ("torch.nn.modules.module", "Module"),
}
"""Kind -> the class (module, name); subclasses are of the kind too. The first that fits counts, so Module stands last."""

_OLD = {"fsdp2_old": "fsdp2", "generated_old": "generated"}
"""Where classes lived before torch 2.6."""

Alive = dict[str, list[Any]]


def alive() -> Alive | None:
    """Return the living objects of each kind of _CLASSES; None where the collector does not know them (gc.freeze)."""
    if gc.get_freeze_count():
        return None
    wanted = {cls: _OLD.get(kind, kind) for kind, (home, name) in _CLASSES.items() if isinstance(cls := _loaded(home, name), type)}
    kinds: dict[type, str | None] = {}
    found: Alive = defaultdict(list)
    for item in gc.get_objects():
        cls = type(item)
        if cls not in kinds:
            kinds[cls] = next((kind for base, kind in wanted.items() if base in type.__dict__["__mro__"].__get__(cls)), None)
        kind = kinds[cls]
        if kind is not None:
            found[kind].append(item)
    return found


def _loaded(home: str, name: str) -> Any:
    """Return the class `name` of the module `home` if that is imported already."""
    module = sys.modules.get(home)
    return None if module is None else vars(module).get(name)


def checkpointing(found: Alive) -> bool:
    """Return whether a living module is set up for activation checkpointing: wrapped for it, or with transformers' switch on."""
    return bool(found.get("checkpointed")) or any(vars(item).get("gradient_checkpointing") is True for item in found.get("module", ()))

"""How living models are wrapped for several devices, read from the attributes of the wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from gpudiag.capture.environment.alive import Alive
from gpudiag.capture.environment.reading import count, dtype, flag, name, read
from gpudiag.model.program import DistributedData, ShardedData, Wrappers


def wrappers(found: Alive) -> Wrappers:
    """Return the wrappers and loss scalers among the living objects."""
    devices = [len(getattr(item, "device_ids", ()) or ()) for item in found.get("data_parallel", ())]
    return Wrappers(
        ddp=tuple(dict.fromkeys(known for item in found.get("ddp", ()) if (known := read(partial(_ddp, item))) is not None)),
        fsdp=(*_units(_fsdp1, found.get("fsdp1", ())), *_units(_fsdp2, found.get("fsdp2", ()))),
        data_parallel_devices=max(devices, default=None),
        deepspeed_zero_stage=_zero_stage(found.get("deepspeed", ())),
        grad_scaler=any(vars(item).get("_enabled") is True for item in found.get("scaler", ())),
    )


def _ddp(model: Any) -> DistributedData:
    """Return the arguments of a DistributedDataParallel (attributes of torch/nn/parallel/distributed.py, 2.4 to 2.13)."""
    precision = getattr(model, "mixed_precision", None)
    own = vars(model)  # attributes, not properties: the older name of a setting warns in newer torch
    buffers = own.get("forward_sync_buffers", own.get("broadcast_buffers"))
    hooks = (name(getattr(hook[0], "__name__", None)) for hook in getattr(model, "_comm_hooks", ()))
    return DistributedData(
        world_size=count(read(lambda: model.process_group.size())),
        bucket_cap_bytes=count(getattr(model, "bucket_bytes_cap", None)),
        **{key: flag(getattr(model, key, None)) for key in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")},
        broadcast_buffers=flag(buffers),
        param_dtype=dtype(getattr(precision, "param_dtype", None)),
        comm_hooks=tuple(hook for hook in hooks if hook),
    )


def _fsdp1(module: Any) -> ShardedData:
    """Return the settings of one FullyShardedDataParallel (torch/distributed/fsdp/_init_utils.py)."""
    precision = getattr(module, "mixed_precision", None)
    replicas = count(read(lambda: module._inter_node_pg.size()))  # hybrid strategies only
    shards = count(getattr(module, "world_size", None))
    return ShardedData(
        version=1, units=1, sharding=name(read(lambda: module.sharding_strategy.name)), world_size=shards,
        mesh=() if shards is None else (shards,) if replicas is None else (replicas, shards),
        param_dtype=dtype(getattr(precision, "param_dtype", None)), reduce_dtype=dtype(getattr(precision, "reduce_dtype", None)),
        cpu_offload=flag(read(lambda: module.cpu_offload.offload_params)),
    )  # fmt: skip


def _fsdp2(module: Any) -> ShardedData | None:
    """Return the settings of one module under fully_shard; None where it holds no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since 2.12; before, at most one
    group = next(iter(groups), None) if groups is not None else getattr(state, "_fsdp_param_group", None)
    if group is None:
        return None
    after = getattr(group, "post_forward_mesh_info", None)
    first = next(iter(getattr(group, "fsdp_params", ())), None)
    policy = getattr(group, "mp_policy", None) or getattr(first, "mp_policy", None)  # each parameter has its own since 2.15
    return ShardedData(
        version=2, units=1, sharding="no reshard after forward" if after is None else "reshard after forward",
        world_size=count(read(lambda: group.mesh_info.shard_mesh_size)),
        mesh=tuple(read(lambda: [int(size) for size in group.mesh_info.mesh.shape]) or ()),
        param_dtype=dtype(getattr(policy, "param_dtype", None)), reduce_dtype=dtype(getattr(policy, "reduce_dtype", None)),
        cpu_offload=type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy",
    )  # fmt: skip


def _units(describe: Any, modules: Iterable[Any]) -> tuple[ShardedData, ...]:
    """Return the settings that occur, each with the number of modules that have them, the most frequent first."""
    alike = Counter(known for module in modules if (known := read(partial(describe, module))) is not None)
    return tuple(msgspec.structs.replace(known, units=times) for known, times in alike.most_common())


def _zero_stage(engines: Iterable[Any]) -> int | None:
    """Return the ZeRO stage of the first engine that tells (deepspeed/runtime/engine.py: zero_optimization_stage)."""
    stages = (count(read(partial(type(engine).zero_optimization_stage, engine))) for engine in engines)
    return next((stage for stage in stages if stage is not None), None)

"""What is alive in the process when a recording ends: wrapped models, loss scalers, compiled code.

Nothing is hooked: models are wrapped before the recording begins. Looks at every object that Python's collector knows, so it is done once,
after the loop; only the types of objects are looked at, and attributes of torch's own classes.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from gpudiag.capture.environment.process import MAX_NAME, as_count, as_dtype_name, as_flag, as_name, find_instances, try_read
from gpudiag.model.bundle import CompileCall, Compiled, DistributedData, ShardedData, Wrappers

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

LiveObjects = dict[str, list[Any]]


def find_live_objects() -> LiveObjects | None:
    """Return the living objects of each kind of _CLASSES; None where the collector does not know them (gc.freeze)."""
    if gc.get_freeze_count():
        return None
    wanted: dict[type, str] = {}
    for kind, (home, name) in _CLASSES.items():
        module = sys.modules.get(home)  # of what is imported already
        cls = None if module is None else vars(module).get(name)
        if isinstance(cls, type):
            wanted[cls] = {"fsdp2_old": "fsdp2", "generated_old": "generated"}.get(kind, kind)  # where classes lived before torch 2.6
    return find_instances(wanted)


_KERNEL = re.compile(r"^\s*\w+ = async_compile\.\w+\(", re.MULTILINE)
"""How Inductor's source defines a kernel (torch/_inductor/codegen/wrapper.py): `triton_poi_fused_add_0 = async_compile.triton(`."""


def read_compiled(found: LiveObjects | None) -> Compiled | None:
    """Return the counts, and from `found` (alive.alive()) the calls and the generated code; None where torch.compile was not used."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None) or {}
    contexts = found.get("compile", ()) if found else ()
    alike = Counter(call for context in contexts if (call := try_read(partial(_read_call, context))) is not None)
    graphs = int((counters.get("stats") or {}).get("unique_graphs", 0))
    if not graphs and not alike:
        return None
    # torch/_dynamo/convert_frame.py counts the compilations by frame; those beyond the first of each are recompilations
    times = dict(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", None) or {})
    generated = None if found is None else found.get("generated", [])
    sources = [source for graph in generated or () if isinstance(source := getattr(graph, "source_code", None), str)]
    return Compiled(
        calls=tuple(msgspec.structs.replace(call, count=count) for call, count in alike.most_common()),
        graphs=graphs,
        graph_breaks=sum((counters.get("graph_break") or {}).values()),
        recompiles=sum(count - 1 for count in times.values() if count > 1),
        generated_graphs=None if generated is None else len(generated),
        generated_kernels=None if generated is None else sum(len(_KERNEL.findall(source)) for source in sources),
    )


def _read_call(context: Any) -> CompileCall | None:
    backend = context.callback
    for _ in range(16):  # wrappers round a backend that are looked through
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        backend = inner
    if not callable(backend):
        return None
    # the registered name, else that of the function or class that was given as a backend
    given = getattr(backend, "compiler_fn", backend)  # torch._TorchCompileWrapper; its compiler_name may be the text of an object
    words = (getattr(backend, "compiler_name", None), getattr(given, "__name__", None), type(given).__name__)
    # the mode whose options the backend holds; 'options' where no mode has these, None where it is not Inductor's
    mode = None
    config, inductor = getattr(backend, "config", None), sys.modules.get("torch._inductor")
    if type(backend).__name__ == "_TorchCompileInductorWrapper" and isinstance(config, dict) and inductor is not None:
        modes = inductor.list_mode_options(dynamic=getattr(backend, "dynamic", None))
        mode = next((mode for mode, options in modes.items() if options == config), "options")
    return CompileCall(
        backend=next((word for word in map(as_name, words) if word), type(given).__name__[:MAX_NAME]),
        mode=mode,
        dynamic=as_flag(getattr(context, "_dynamic", None)),
        fullgraph=as_flag(getattr(context, "fullgraph", None)),
    )


def read_wrappers(found: LiveObjects) -> Wrappers:
    """Return the wrappers and loss scalers among the living objects."""
    devices = [len(getattr(item, "device_ids", ()) or ()) for item in found.get("data_parallel", ())]
    engines = found.get("deepspeed", ())  # deepspeed/runtime/engine.py: zero_optimization_stage
    stages = (as_count(try_read(partial(type(engine).zero_optimization_stage, engine))) for engine in engines)
    return Wrappers(
        ddp=tuple(dict.fromkeys(known for item in found.get("ddp", ()) if (known := try_read(partial(_read_ddp, item))) is not None)),
        fsdp=(*_count_units(_read_fsdp1, found.get("fsdp1", ())), *_count_units(_read_fsdp2, found.get("fsdp2", ()))),
        data_parallel_devices=max(devices, default=None),
        deepspeed_zero_stage=next((stage for stage in stages if stage is not None), None),
        grad_scaler=any(vars(item).get("_enabled") is True for item in found.get("scaler", ())),
    )


def _read_ddp(model: Any) -> DistributedData:
    """Return the arguments of a DistributedDataParallel (attributes of torch/nn/parallel/distributed.py, 2.4 to 2.13)."""
    precision = getattr(model, "mixed_precision", None)
    own = vars(model)  # attributes, not properties: the older name of a setting warns in newer torch
    buffers = own.get("forward_sync_buffers", own.get("broadcast_buffers"))
    hooks = (as_name(getattr(hook[0], "__name__", None)) for hook in getattr(model, "_comm_hooks", ()))
    return DistributedData(
        world_size=as_count(try_read(lambda: model.process_group.size())),
        bucket_cap_bytes=as_count(getattr(model, "bucket_bytes_cap", None)),
        **{key: as_flag(getattr(model, key, None)) for key in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")},
        broadcast_buffers=as_flag(buffers),
        param_dtype=as_dtype_name(getattr(precision, "param_dtype", None)),
        comm_hooks=tuple(hook for hook in hooks if hook),
    )


def _read_fsdp1(module: Any) -> ShardedData:
    precision = getattr(module, "mixed_precision", None)
    replicas = as_count(try_read(lambda: module._inter_node_pg.size()))  # hybrid strategies only
    shards = as_count(getattr(module, "world_size", None))
    return ShardedData(
        version=1,
        units=1,
        sharding=as_name(try_read(lambda: module.sharding_strategy.name)),
        world_size=shards,
        mesh=() if shards is None else (shards,) if replicas is None else (replicas, shards),
        param_dtype=as_dtype_name(getattr(precision, "param_dtype", None)),
        reduce_dtype=as_dtype_name(getattr(precision, "reduce_dtype", None)),
        cpu_offload=as_flag(try_read(lambda: module.cpu_offload.offload_params)),
    )


def _read_fsdp2(module: Any) -> ShardedData | None:
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
        version=2,
        units=1,
        sharding="no reshard after forward" if after is None else "reshard after forward",
        world_size=as_count(try_read(lambda: group.mesh_info.shard_mesh_size)),
        mesh=tuple(try_read(lambda: [int(size) for size in group.mesh_info.mesh.shape]) or ()),
        param_dtype=as_dtype_name(getattr(policy, "param_dtype", None)),
        reduce_dtype=as_dtype_name(getattr(policy, "reduce_dtype", None)),
        cpu_offload=type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy",
    )


def _count_units(describe: Any, modules: Iterable[Any]) -> tuple[ShardedData, ...]:
    alike = Counter(known for module in modules if (known := try_read(partial(describe, module))) is not None)
    return tuple(msgspec.structs.replace(known, units=times) for known, times in alike.most_common())

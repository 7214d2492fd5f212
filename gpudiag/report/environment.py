"""What a run was recorded with: versions, precision, loader, optimizer, how the model runs, the commit."""

from __future__ import annotations

from gpudiag.model.bundle import Compiled, LoaderSettings, OptimizerSettings, Program, Settings, Wrappers
from gpudiag.model.report import ReportData
from gpudiag.report.blocks import Section, Topics
from gpudiag.report.labels import is_on_cpu, pluralize
from gpudiag.units import format_bytes, format_count

_MOST_PACKAGES = 8
_MOST_ALIKE = 3


def build_environment_section(report: ReportData) -> Section | None:
    """Return what the run was recorded with, None for a trace alone."""
    rows = list_environment(report)
    return Section("Environment", (Topics(tuple(rows)),), "recorded-title") if rows else None


def list_environment(report: ReportData) -> list[tuple[str, str]]:
    """Return (topic, text) of what the bundle says; [] for a trace alone."""
    found = report.recorded
    if found is None:
        return []
    cpu = is_on_cpu(report)
    program = found.program or Program()
    first = (
        f"torch {found.machine.torch}" if found.machine.torch else "",
        f"Python {found.machine.python}" if found.machine.python else "",
        f"CUDA {found.machine.cuda}" if found.machine.cuda else "",
        f"driver {found.machine.driver}" if found.machine.driver else "",
    )
    others = [f"{name} {version}" for name, version in sorted(program.packages.items()) if name != "torch"]
    more = f"{len(others) - _MOST_PACKAGES} more" if len(others) > _MOST_PACKAGES else ""
    parts = [f"autocast {' and '.join(found.settings.autocast)}" if found.settings.autocast else "no autocast"]
    if cpu:
        parts.append(f'fp32 matmul "{found.settings.float32_matmul_precision}"' if found.settings.float32_matmul_precision else "")
    else:
        parts.append(_format_switch("TF32 in matmul", found.settings.cuda_matmul_allow_tf32))
        parts.append(_format_switch("in convolutions", found.settings.cudnn_allow_tf32))
    parts.append("GradScaler" if program.wrappers and program.wrappers.grad_scaler else "")
    processor = (
        f"{found.settings.threads} threads" if found.settings.threads else "",
        f"{found.machine.cpu_cores} cores" if found.machine.cpu_cores else "",
        f"limited to the time of {found.machine.cpu_quota:g}" if found.machine.cpu_quota is not None else "",
        found.machine.isa or "",
    )
    # What is set in the environment; the allocator's variable is told by its options
    told = {name: value for name, value in program.variables.items() if not (name.endswith("_ALLOC_CONF") and value)}
    said = (
        ("versions", _join_parts(*first, *others[:_MOST_PACKAGES], more)),
        ("precision", _join_parts(*parts)),
        (
            "switches",
            _join_parts(
                _list_switches(found.settings, cpu=cpu),
                *(f"{name} set" if value is None else f"{name}={value}" for name, value in told.items()),
            ),
        ),
        ("processor", _join_parts(*processor) if cpu else ""),
        ("loader", _format_loader(found.settings.loader, cpu=cpu) if found.settings.loader else ""),
        ("optimizer", _format_optimizers(found.settings.optimizers)),
        ("model", _format_model(found.settings, program)),
        ("code", _format_commit(program)),
    )
    return [(topic, text) for topic, text in said if text]


def _join_parts(*parts: str, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


def _format_count_of(count: int, word: str) -> str:
    return f"{count:,} {pluralize(count, word)}"


def _format_switch(what: str, on: bool | None) -> str:
    return "" if on is None else f"{what} {'on' if on else 'off'}"


def _list_switches(settings: Settings, *, cpu: bool) -> str:
    fused = settings.sdp_backends is None or any(name != "math" for name in settings.sdp_backends)
    return _join_parts(
        "" if cpu else _format_switch("cuDNN benchmark", settings.cudnn_benchmark),
        "cuDNN disabled" if settings.cudnn_enabled is False and not cpu else "",
        "deterministic algorithms" if settings.deterministic or settings.cudnn_deterministic else "",
        "anomaly detection on" if settings.anomaly_detection else "",
        "" if fused else "fused attention off",
        *(() if cpu else (f"{key} {value}" for key, value in settings.allocator.items())),
    )


def _format_loader(loader: LoaderSettings, *, cpu: bool) -> str:
    workers = loader.num_workers
    return _join_parts(
        _format_count_of(workers, "worker") if workers else "no workers",
        f"batches of {loader.batch_size}" if loader.batch_size is not None else "",
        f"prefetch {loader.prefetch_factor}" if loader.prefetch_factor is not None else "",
        "pinned memory" if loader.pin_memory else "" if cpu else "memory not pinned",
        ("persistent" if loader.persistent_workers else "not persistent") if workers else "",
        loader.sampler or ("iterable dataset" if loader.dataset == "iterable" else ""),
        "last batch dropped" if loader.drop_last else "",
        "in any order" if loader.in_order is False else "",
    )


def _format_optimizers(optimizers: tuple[OptimizerSettings, ...]) -> str:
    texts = []
    for found in optimizers[:_MOST_ALIKE]:
        many = found.parameters >= 1e6
        amount = f"{format_count(found.parameters / 1e6)} million parameters" if many else _format_count_of(found.parameters, "parameter")
        way: str = found.implementation or ""
        if way in ("foreach", "for-loop") and found.fused is None and found.foreach is None:
            way += " (torch's choice)"
        texts.append(_join_parts(found.name, way, f"{amount} in {_format_count_of(found.tensors, 'tensor')}"))
    more = f"{len(optimizers) - _MOST_ALIKE} more" if len(optimizers) > _MOST_ALIKE else ""
    return _join_parts(*texts, more, by="; ")


def _format_model(settings: Settings, program: Program) -> str:
    wrapped = program.wrappers or Wrappers()
    parts = []
    options = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
    for ddp in wrapped.ddp[:_MOST_ALIKE]:
        ranks = f"{ddp.world_size} ranks" if ddp.world_size else ""
        buckets = f"buckets of {format_bytes(ddp.bucket_cap_bytes)}" if ddp.bucket_cap_bytes else ""
        chosen = (option for option in options if getattr(ddp, option))
        parts.append(_join_parts("DDP", ranks, buckets, *chosen, *ddp.comm_hooks[:_MOST_ALIKE]))
    for fsdp in wrapped.fsdp[:_MOST_ALIKE]:
        said = _join_parts(
            "fully_shard" if fsdp.version == 2 else "FSDP",
            fsdp.sharding or "",
            _format_count_of(fsdp.units, "unit"),
            f"mesh {' x '.join(map(str, fsdp.mesh[:4]))}" if fsdp.mesh else "",
            _join_parts(fsdp.param_dtype or "", fsdp.reduce_dtype or "", by="/"),
            "parameters on the CPU" if fsdp.cpu_offload else "",
        )
        parts.append(said)
    parts += [
        f"DataParallel over {wrapped.data_parallel_devices} devices" if wrapped.data_parallel_devices else "",
        f"DeepSpeed ZeRO {wrapped.deepspeed_zero_stage}" if wrapped.deepspeed_zero_stage is not None else "",
        _format_compiled(program.compiled) if program.compiled else "",
        "activation checkpointing" if program.activation_checkpointing else "",
        "channels_last" if any(optimizer.channels_last for optimizer in settings.optimizers) else "",
    ]
    return _join_parts(*parts, by="; ")


def _format_compiled(found: Compiled) -> str:
    calls = []
    for call in found.calls[:_MOST_ALIKE]:
        words = [call.backend if call.backend != "inductor" else "", "" if call.mode in (None, "default") else f"mode {call.mode}"]
        words += ["fullgraph" if call.fullgraph else "", "" if call.dynamic is None else f"dynamic={call.dynamic}"]
        calls.append(f"torch.compile ({_join_parts(*words)})" if any(words) else "torch.compile")
    return _join_parts(
        " and ".join(dict.fromkeys(calls)) or "torch.compile",
        _format_count_of(found.graphs, "graph"),
        _format_count_of(found.generated_kernels, "generated kernel") if found.generated_kernels else "",
        _format_count_of(found.graph_breaks, "graph break") if found.graph_breaks else "no graph break",
        _format_count_of(found.recompiles, "recompilation") if found.recompiles else "none recompiled",
    )


def _format_commit(program: Program) -> str:
    found = program.code
    if found is None:
        return ""
    unchanged = "nothing changed since" if found.script_tracked else "no tracked file changed since"
    state = {True: "with uncommitted changes", False: unchanged, None: "changes unknown"}
    outside = "the script is not in git" if found.script_tracked is False else ""
    return _join_parts(f"commit {found.commit[:12]}", state[found.dirty], outside)

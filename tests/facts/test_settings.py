"""Facts about how a run was set up: the figures of the manifest, and why one is not known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import CPU, analysis, kernel

from gpudiag.facts import Facts
from gpudiag.model.bundle import (
    CompileCall,
    Compiled,
    DistributedData,
    LoaderSettings,
    Manifest,
    OptimizerSettings,
    Program,
    Settings,
    ShardedData,
    Wrappers,
)
from gpudiag.model.finding import Missing

DDP = DistributedData(
    world_size=8, bucket_cap_bytes=25 << 20, find_unused_parameters=True, static_graph=False, gradient_as_bucket_view=False,
    broadcast_buffers=True,
)  # fmt: skip
FSDP = ShardedData(version=2, units=24, sharding="reshard after forward", world_size=8, cpu_offload=False)
ADAM = OptimizerSettings("AdamW", 100, 4, implementation="foreach", channels_last=True)
SGD = OptimizerSettings("SGD", 100, 4, implementation="fused")

PROGRAM = Program(
    variables={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    compiled=Compiled(calls=(CompileCall(backend="inductor", mode="reduce-overhead"),), graphs=3, graph_breaks=2, recompiles=5),
    wrappers=Wrappers(
        ddp=(DDP,), fsdp=(FSDP, msgspec.structs.replace(FSDP, units=1, sharding="no reshard after forward")), grad_scaler=True
    ),
    activation_checkpointing=True,
)
SETTINGS = Settings(
    cudnn_benchmark=False, deterministic=False, cudnn_deterministic=True, autocast=("cuda:fp16",), optimizers=(ADAM,),
    sdp_backends=("math",),
    anomaly_detection=False, tracers=("pydevd",), allocator={"expandable_segments": "True"},
    loader=LoaderSettings(4, True, True, drop_last=False, in_order=True),
)  # fmt: skip

KNOWN: dict[str, Any] = {
    "cudnn_benchmark": False,
    "deterministic_algorithms": True,
    "tracers": "pydevd",
    "autocast_used": True,
    "ddp_used": True,
    "ddp_finds_unused_parameters": True,
    "fsdp_units": 25,
    "nccl_ways_disabled": 1,
    "device_connections": 1,
    "compile_mode": "reduce-overhead",
    "graph_breaks": 2,
    "recompiles": 5,
}


def facts(settings: Settings = SETTINGS, program: Program | None = PROGRAM) -> Facts:
    return Facts(analysis([kernel("aten::mm", 0, 10)], manifest=Manifest(settings=settings, program=program)))


@pytest.mark.parametrize("name", KNOWN)
def test_the_manifest_says(name: str) -> None:
    assert facts().value(name) == KNOWN[name]
    assert type(facts().value(name)) is type(KNOWN[name])


def test_every_fact_of_the_module_is_tested() -> None:
    from gpudiag.facts import settings
    from gpudiag.facts.catalogue import collect_facts

    of_debug_features = {
        "anomaly_mode",
        "blocking_launches",
        "debug_features_ns",
        "debug_variables",
        "nan_checks_per_step",
    }
    assert set(collect_facts((settings,))) == set(KNOWN) | of_debug_features, "test_trace_facts.py tests those of debug features"


def test_settings_of_cudnn_do_nothing_on_a_cpu() -> None:
    made = analysis([kernel("aten::mm", 0, 10)], device=CPU, manifest=Manifest(settings=SETTINGS))
    assert Facts(made).value("deterministic_algorithms") is False


@pytest.mark.parametrize("name", KNOWN)
def test_a_trace_alone_does_not_say(name: str) -> None:
    found = Facts(analysis([kernel("aten::mm", 0, 10)])).value(name)
    assert isinstance(found, Missing)
    assert "gpudiag.profile" in found.reason


FROM_THE_PROGRAM = {
    "blocking_launches", "ddp_used", "device_connections", "fsdp_units", "nccl_ways_disabled", "recompiles",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FROM_THE_PROGRAM))
def test_an_older_bundle_does_not_say(name: str) -> None:
    assert isinstance(facts(program=None).value(name), Missing)


@pytest.mark.parametrize("name", ["ddp_used", "fsdp_units"])
def test_a_killed_run_does_not_say_what_is_looked_up_at_the_end(name: str) -> None:
    killed = msgspec.structs.replace(PROGRAM, wrappers=None)
    assert isinstance(facts(program=killed).value(name), Missing)


@pytest.mark.parametrize("name", ["cudnn_benchmark", "deterministic_algorithms"])
def test_what_torch_did_not_tell_is_missing_not_false(name: str) -> None:
    assert isinstance(facts(settings=Settings(loader=LoaderSettings(0, False, False))).value(name), Missing)


def test_a_model_that_is_not_wrapped() -> None:
    plain = facts(program=Program(wrappers=Wrappers()))
    assert plain.value("ddp_used") is False
    assert plain.value("fsdp_units") == 0
    assert isinstance(plain.value("ddp_finds_unused_parameters"), Missing)
    assert plain.value("recompiles") == 0
    assert isinstance(plain.value("compile_mode"), Missing)


def test_an_allocator_with_its_defaults_does_not_expand() -> None:
    assert facts(settings=Settings()).value("expandable_segments") is False


def test_queues_of_a_gpu_are_eight_unless_it_is_said() -> None:
    assert facts(program=msgspec.structs.replace(PROGRAM, variables={})).value("device_connections") == 8
    odd = msgspec.structs.replace(PROGRAM, variables={"CUDA_DEVICE_MAX_CONNECTIONS": None})
    assert isinstance(facts(program=odd).value("device_connections"), Missing)


def test_a_value_of_launch_blocking_that_was_not_kept_is_unknown() -> None:
    odd = msgspec.structs.replace(PROGRAM, variables={"CUDA_LAUNCH_BLOCKING": None})
    assert isinstance(facts(program=odd).value("blocking_launches"), Missing)
    assert facts(program=msgspec.structs.replace(PROGRAM, variables={})).value("blocking_launches") is False


@pytest.mark.parametrize(("ranks", "ways"), [(8, 1), (16, 2)])
def test_infiniband_has_no_part_on_one_machine(ranks: int, ways: int) -> None:
    told = Program(variables={"NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
    manifest = Manifest(settings=SETTINGS, program=told, world_size=ranks)
    assert Facts(analysis([kernel("aten::mm", 0, 10)], manifest=manifest)).value("nccl_ways_disabled") == ways

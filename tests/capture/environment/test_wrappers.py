"""Wrapped models are found among the living objects, with the arguments that they were given."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.environment.live_objects import find_live_objects, read_wrappers
from gpudiag.model.bundle import DistributedData, ShardedData, Wrappers


def in_a_process(lines: str, tmp_path: Path) -> Wrappers:
    """Return what is found in a process of one rank that runs `lines`."""
    program = """
        import msgspec, torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
        {lines}
        from gpudiag.capture.environment.live_objects import find_live_objects, read_wrappers
        print(msgspec.json.encode(read_wrappers(find_live_objects())).decode())
        dist.destroy_process_group()
    """
    text = textwrap.dedent(program).format(store=tmp_path / "store", lines=lines)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout, type=Wrappers)


@pytest.mark.slow
def test_ddp_has_its_arguments(tmp_path: Path) -> None:
    found = in_a_process(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb=7, find_unused_parameters=True, "
        "gradient_as_bucket_view=True, broadcast_buffers=False)\n"
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
        "model.register_comm_hook(None, fp16_compress_hook)\n"
        "import warnings; warnings.simplefilter('error')",
        tmp_path,
    )
    (ddp,) = found.ddp
    assert ddp == DistributedData(
        world_size=1, bucket_cap_bytes=7 * 2**20, find_unused_parameters=True, static_graph=False, gradient_as_bucket_view=True,
        broadcast_buffers=False, comm_hooks=("fp16_compress_hook",),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="torch has fully_shard since 2.6")
def test_fully_shard_has_its_units_mesh_and_types(tmp_path: Path) -> None:
    found = in_a_process(
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
        "mesh = torch.distributed.init_device_mesh('cpu', (1,))\n"
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "[fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in list(model)[:2]]\n"
        "fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)",
        tmp_path,
    )
    both = {item.sharding: item for item in found.fsdp}
    same = {"version": 2, "world_size": 1, "mesh": (1,), "param_dtype": "bfloat16", "reduce_dtype": "float32", "cpu_offload": False}
    assert both["reshard after forward"] == ShardedData(units=2, sharding="reshard after forward", **same)
    assert both["no reshard after forward"] == ShardedData(units=1, sharding="no reshard after forward", **same)


@pytest.mark.slow
def test_fsdp_of_the_first_version(tmp_path: Path) -> None:
    found = in_a_process(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy\n"
        "model = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, device_id=torch.device('cpu'))",
        tmp_path,
    )
    (fsdp,) = found.fsdp
    assert (fsdp.version, fsdp.units, fsdp.world_size, fsdp.cpu_offload) == (1, 1, 1, False)
    assert fsdp.sharding in ("SHARD_GRAD_OP", "NO_SHARD")  # torch turns it off on one rank


@pytest.mark.slow
def test_data_parallel_and_a_scaler() -> None:
    gc.collect()  # what other tests left in cycles would be counted before and gone afterwards
    before = read_wrappers(find_live_objects() or {})
    model, scaler = nn.DataParallel(nn.Linear(2, 2)), torch.amp.GradScaler("cpu")
    model.device_ids = [0, 1, 2]
    found = read_wrappers(find_live_objects() or {})
    assert (found.data_parallel_devices, found.grad_scaler) == (3, True)
    del model, scaler
    gc.collect()
    assert read_wrappers(find_live_objects() or {}) == before


def test_a_scaler_that_is_switched_off_does_not_count() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert read_wrappers({"scaler": [scaler]}) == Wrappers()


def test_nothing_is_kept_alive() -> None:
    model = nn.DataParallel(nn.Linear(2, 2))
    gone = weakref.ref(model)
    read_wrappers(find_live_objects() or {})
    del model
    assert gone() is None


def test_objects_that_lie_about_their_class_are_not_asked() -> None:
    asked: list[str] = []

    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            asked.append("class")
            return nn.DataParallel

        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise RuntimeError(name)

    proxy = Proxy()
    read_wrappers(find_live_objects() or {})
    assert asked == []
    assert isinstance(proxy, nn.DataParallel)


def test_frozen_objects_are_unknown_not_absent() -> None:
    gc.freeze()
    try:
        assert find_live_objects() is None
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("way", ["wrapper", "switch", "none"])
def test_checkpointing_is_told_by_wrapper_and_switch(way: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: nn.Module = nn.Linear(2, 2)
    if way == "wrapper":
        model = checkpoint_wrapper(model)
    model.gradient_checkpointing = way == "switch"  # type: ignore[assignment]  # as transformers sets it
    part = Inventory()
    part.close()
    assert part._checkpointed == (way != "none")


def test_broken_wrappers_are_left_out() -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    broken = [Broken()]
    assert read_wrappers({"ddp": broken, "fsdp1": broken, "fsdp2": broken}) == Wrappers()

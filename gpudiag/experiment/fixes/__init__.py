"""The fixes that an experiment can apply, one file a kind. A new one: its descriptor in model/fixes.py, its class, and one line below."""

from __future__ import annotations

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.experiment.fixes.compile import Compile, CompileMaxAutotune, CompileReduceOverhead, CudaGraphs, FuseRegion
from gpudiag.experiment.fixes.copies import DevicePrefetch, NonBlocking
from gpudiag.experiment.fixes.dataloader import BatchSize, LoaderPrefetch, LoaderWorkers, PersistentWorkers, PinMemory
from gpudiag.experiment.fixes.distributed import DdpOptions
from gpudiag.experiment.fixes.fix import Applier
from gpudiag.experiment.fixes.kernels import ChannelsLast, CudnnBenchmark, Sdpa
from gpudiag.experiment.fixes.memory import AllocConf, Checkpointing, GcFreeze, Malloc
from gpudiag.experiment.fixes.optimizer import ForeachOptimizer, FusedOptimizer, ZeroGradNone
from gpudiag.experiment.fixes.precision import Bf16, Fp16, Tf32
from gpudiag.experiment.fixes.registry import REGISTERED
from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID

APPLIERS: tuple[type[Applier], ...] = (
    Compile,
    CompileReduceOverhead,
    CompileMaxAutotune,
    CudaGraphs,
    FuseRegion,
    Bf16,
    Fp16,
    Tf32,
    ChannelsLast,
    FusedOptimizer,
    ForeachOptimizer,
    Sdpa,
    Checkpointing,
    BatchSize,
    LoaderWorkers,
    LoaderPrefetch,
    PersistentWorkers,
    PinMemory,
    NonBlocking,
    DevicePrefetch,
    ZeroGradNone,
    CudnnBenchmark,
    AllocConf,
    Malloc,
    GcFreeze,
    DdpOptions,
)
"""In the order of model.fixes.FIXES. A fix that is described there and not here cannot be injected: it goes through `--variant`."""

_WHY_NOT_APPLIED = {
    "accumulation": "the program's own loop decides what a micro-batch is and when the optimizer steps",
    "worker-threads": "which libraries its workers use, and when they load them, is not known",
}
"""Why a fix that is described is not listed."""

_BY_ID = {applier.id: applier for applier in APPLIERS}


def make_applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id in REGISTERED:
        return REGISTERED[call.id](call.value)
    if call.id not in FIX_BY_ID:
        raise InputError(f"no fix is named {call.id!r}{suggest_nearest(call.id, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    if call.id not in _BY_ID:
        hint = f"make the change in a copy of the script and compare that with --variant NAME=script:COPY.py: {FIX_BY_ID[call.id].change}"
        why = _WHY_NOT_APPLIED.get(call.id, "only its source can be changed")
        raise InputError(f"{call.id} cannot be put into a running program: {why}", hint)
    return _BY_ID[call.id](call.value)

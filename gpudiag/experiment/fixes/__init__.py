"""The fixes that an experiment can apply, one file each. A new fix: its descriptor in model/fixes.py, its file here, and one line below."""

from __future__ import annotations

from gpudiag.errors import InputError, nearest
from gpudiag.experiment.fixes.alloc_conf import AllocConf
from gpudiag.experiment.fixes.batch_size import BatchSize
from gpudiag.experiment.fixes.bf16 import Bf16
from gpudiag.experiment.fixes.channels_last import ChannelsLast
from gpudiag.experiment.fixes.checkpointing import Checkpointing
from gpudiag.experiment.fixes.compile import Compile
from gpudiag.experiment.fixes.compile_max_autotune import CompileMaxAutotune
from gpudiag.experiment.fixes.compile_reduce_overhead import CompileReduceOverhead
from gpudiag.experiment.fixes.cuda_graphs import CudaGraphs
from gpudiag.experiment.fixes.cudnn_benchmark import CudnnBenchmark
from gpudiag.experiment.fixes.ddp_options import DdpOptions
from gpudiag.experiment.fixes.device_prefetch import DevicePrefetch
from gpudiag.experiment.fixes.fix import Applier
from gpudiag.experiment.fixes.foreach_optimizer import ForeachOptimizer
from gpudiag.experiment.fixes.fp16 import Fp16
from gpudiag.experiment.fixes.fuse_region import FuseRegion
from gpudiag.experiment.fixes.fused_optimizer import FusedOptimizer
from gpudiag.experiment.fixes.loader_prefetch import LoaderPrefetch
from gpudiag.experiment.fixes.loader_workers import LoaderWorkers
from gpudiag.experiment.fixes.malloc import Malloc
from gpudiag.experiment.fixes.non_blocking import NonBlocking
from gpudiag.experiment.fixes.persistent_workers import PersistentWorkers
from gpudiag.experiment.fixes.pin_memory import PinMemory
from gpudiag.experiment.fixes.registered import REGISTERED
from gpudiag.experiment.fixes.sdpa import Sdpa
from gpudiag.experiment.fixes.tf32 import Tf32
from gpudiag.experiment.fixes.zero_grad_none import ZeroGradNone
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
    DdpOptions,
)
"""In the order of model.fixes.FIXES. A fix that is described there and not here cannot be injected: it goes through `--variant`."""

_WHY = {"accumulation": "the program's own loop decides what a micro-batch is and when the optimizer steps"}
"""Why a fix that is described is not listed."""

_BY_ID = {applier.id: applier for applier in APPLIERS}


def applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id in REGISTERED:
        return REGISTERED[call.id](call.value)
    if call.id not in FIX_BY_ID:
        raise InputError(f"no fix is named {call.id!r}{nearest(call.id, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    if call.id not in _BY_ID:
        hint = f"make the change in a copy of the script and compare that with --variant NAME=script:COPY.py: {FIX_BY_ID[call.id].change}"
        why = _WHY.get(call.id, "only its source can be changed")
        raise InputError(f"{call.id} cannot be put into a running program: {why}", hint)
    return _BY_ID[call.id](call.value)

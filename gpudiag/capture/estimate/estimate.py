"""The estimate of one training: what is given made fake, run, and added up."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.capture.estimate.cuda import cuda_kernels, use_foreach
from gpudiag.capture.estimate.fake import faked, faking, is_fake, uncompiled
from gpudiag.capture.estimate.ledger import Ledger
from gpudiag.capture.estimate.training import Training, run
from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError, nearest
from gpudiag.model.estimate import EstimatePhase, ModelEstimate, PhasePeak

CUDA_BLOCK_BYTES = 512
"""Every allocation is a multiple of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

LEARNING_RATE = 1e-3
"""For an optimizer given by name; memory does not depend on it."""

DEVICES = ("cuda", "cpu")
AUTOCAST = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16"}
_PHASES: tuple[EstimatePhase, ...] = ("forward", "backward", "optimizer")
_PASS_NAMES = {None: "first pass", "forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}


class Given(msgspec.Struct, kw_only=True):
    """What is to be estimated. See gpudiag.api.model_memory.estimate_memory."""

    model: Any
    batch: Any
    loss: Callable[..., Any] | None = None
    optimizer: Any = "AdamW"
    autocast: Any = None
    device: Any = "cuda"
    accumulate: bool = False


def estimate(make: Callable[[], Given], making: str) -> ModelEstimate:
    """Return the memory of training what `make` makes, on fake tensors; `making`: what a failure of it is called.

    Raises InputError where the code fails or needs the values of a tensor, UsageError for what does not fit.
    """
    _need_torch()
    with faking():
        training = _told(lambda: making, lambda: _training(make()))
        ledger = Ledger(CUDA_BLOCK_BYTES if training.cuda else 1)
        with cuda_kernels(training.cuda), uncompiled():
            _told(lambda: f"the {_PASS_NAMES[ledger.phases[-1].name]}", lambda: run(training, ledger))
    return _summary(training, ledger)


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("an estimate of a model needs torch", "pip install 'gpudiag[train]'") from error


def _training(given: Given) -> Training:
    """Return all of it on fake tensors, what is shared between them still shared."""
    device = str(given.device).partition(":")[0]
    if device not in DEVICES:
        raise UsageError(f"device={given.device!r} is not known", f"one of {', '.join(DEVICES)}")
    model, batch, loss, optimizer = _all_fake(given)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{type(model).__name__} has no parameter to train", "set requires_grad where it is to learn")
    chosen = _optimizer(optimizer, model)
    if device == "cuda" and chosen is not None:
        use_foreach(chosen)
    return Training(model, batch, loss, chosen, _autocast(given.autocast), given.accumulate, device == "cuda")


def _all_fake(given: Given) -> Any:
    """Return model, batch, loss and optimizer; a function that was given for one of the first two is called."""
    import torch

    model, batch = (
        value() if callable(value) and not isinstance(value, torch.nn.Module) else value for value in (given.model, given.batch)
    )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", "give a torch.nn.Module, or a function that makes one")
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise UsageError(f"the model is wrapped in {type(model).__name__}, and one device is estimated", "give its .module")
    if all(map(is_fake, model.parameters())):
        return model, faked(batch), given.loss, given.optimizer
    return faked((model, batch, given.loss, given.optimizer))


def _optimizer(given: Any, model: Any) -> Any:
    """Return the optimizer: of that name in torch.optim, or what a function makes of the parameters. None: no optimizer."""
    import torch

    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        return given(model.parameters())
    names = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"]
    name = {known.lower(): known for known in names}.get(str(given).lower())
    if name is None:
        hint = "a name in torch.optim, or a function that makes it of the parameters"
        raise UsageError(f"there is no optimizer {given!r} in torch.optim{nearest(str(given), names)}", hint)
    return getattr(torch.optim, name)(model.parameters(), lr=LEARNING_RATE)


def _autocast(given: Any) -> str | None:
    """Return the name of the type in torch; None: no autocast."""
    name = str(given).removeprefix("torch.").lower()
    if given is None or name in ("none", "no", "fp32", "float32"):
        return None
    if name not in AUTOCAST:
        raise UsageError(f"autocast={given!r} is not known", "one of bf16, fp16, none")
    return AUTOCAST[name]


def _told(doing: Callable[[], str], action: Callable[[], Any]) -> Any:
    """Return what `action` does; its failure becomes one line that says what failed, how and where. Raises InputError."""
    from torch._subclasses import fake_tensor

    by_value = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    try:
        return action()
    except GpudiagError:
        raise
    except Exception as error:  # the code of the user may raise anything
        what = doing()
        if isinstance(error, by_value):
            op = getattr(error.func, "_schema", error.func)
            line = f"{what} needs the values of a tensor ({getattr(op, 'name', op)}), and an estimate has none{_where(error)}"
            raise InputError(line, "estimate without that part, or record a real step with gpudiag.profile(memory=True)") from error
        raise InputError(f"{what} failed: {type(error).__name__}: {_first_line(error)}{_where(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def _where(error: Exception) -> str:
    """Return the innermost line of the user's code that led there."""
    import torch

    others = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _summary(training: Training, ledger: Ledger) -> ModelEstimate:
    peaks = list(zip(ledger.phases, ledger.peaks(), strict=True))[1:]
    phase, peak = max(peaks, key=lambda known: known[1].bytes)
    kept, ended, last = ledger.last("forward"), ledger.last("backward"), ledger.position
    most = {name: max(known.bytes for part, known in peaks if part.name == name) for name in _PHASES}
    return ModelEstimate(
        device="cuda" if training.cuda else "cpu",
        parameter_count=sum(parameter.numel() for parameter in training.model.parameters()),
        parameters_bytes=ledger.total("parameters", last),
        buffers_bytes=ledger.total("buffers", last),
        gradients_bytes=ledger.total("gradients", ended),
        optimizer_bytes=ledger.total("optimizer_state", last),
        inputs_bytes=ledger.total("inputs", last),
        activations_bytes=ledger.total("activations", kept),
        weight_casts_bytes=ledger.total("weight_casts", kept),
        peak_bytes=peak.bytes,
        peak_phase=phase.name or "forward",
        peak_op=ledger.op_at(peak.position),
        at_peak=ledger.by_purpose(peak.position),
        phases=tuple(PhasePeak(name, most[name]) for name in _PHASES),
        modules=ledger.by_module(kept),
        block_bytes=ledger.block_bytes,
        optimizer=_described(training.optimizer),
        autocast=training.autocast or "none",
        notes=tuple(_notes(training)),
    )


def _described(optimizer: Any) -> str:
    """Return the class of the optimizer and how it works on its parameters."""
    if optimizer is None:
        return "none"
    group = optimizer.param_groups[0]
    ways = [way for way in ("fused", "foreach") if group.get(way)]
    return f"{type(optimizer).__name__}{f' ({ways[0]})' if ways else ''}"


def _notes(training: Training) -> list[str]:
    from torch import nn

    notes = []
    modules = list(training.model.modules())
    if not training.model.training:
        notes.append("the model is in eval mode: no dropout; call train() for what training keeps")
    if any(isinstance(module, nn.RNNBase) for module in modules):
        library = "cuDNN" if training.cuda else "oneDNN"
        notes.append(f"recurrent layers are taken as plain ops, step by step: what {library} keeps of them is not known and may be more")
    if training.cuda and any(type(module).__name__.startswith(("Conv", "LazyConv")) for module in modules):
        notes.append("convolutions: the workspaces of cuDNN are not known before it runs, and come on top")
    return notes

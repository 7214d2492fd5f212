"""The memory of one training: what is given, or what FILE.py:FUNCTION makes, is made fake, run for two steps, and added up."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpudiag.capture.estimate.fake_tensors import make_fake, use_cuda_kernels, use_fake_tensors
from gpudiag.capture.estimate.ledger import HOST, Ledger, Storages, make_tracker
from gpudiag.errors import GpudiagError, InputError, MissingDependencyError, UsageError, suggest_nearest
from gpudiag.model.memory import EstimatePhase, ModelEstimate, PhasePeak

RESULT_KEYS = ("model", "batch", "loss", "optimizer", "autocast", "device", "accumulate")
"""What a function may return by name."""

_MAX_SHOWN = 6


def load_function(text: str) -> tuple[Callable[[], Any], str]:
    """Return the function that FILE.py:FUNCTION names, and its name; the file is executed. Raises InputError for what is not there."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name:
        raise UsageError(f"{text}: no function is named", "write FILE.py:FUNCTION; the function returns (model, batch), or a dict")
    if not path.is_file():
        raise InputError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.path.insert(0, str(path.resolve().parent))  # it imports what stands beside it, as it would when run
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file may raise anything
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = at[-1] if at else getattr(error, "lineno", None)
        raise InputError(f"{path}{f':{line}' if line else ''}: {type(error).__name__}: {str(error).strip() or 'no message'}") from error
    finally:
        if before is not None:
            sys.modules[path.stem] = before
    function = getattr(module, name, None)
    if not callable(function):
        own = [known for known, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__]
        hint = f"it has {', '.join(own[:_MAX_SHOWN])}" if own else "it has no functions"
        raise InputError(f"{file}: no function {name!r}{suggest_nearest(name, own)}", hint)
    return function, name


def name_results(found: Any, name: str) -> dict[str, Any]:
    """Return what a function returned, by the names of KEYS. Raises InputError where it is not what was asked for."""
    if isinstance(found, Mapping):
        values = {str(key): value for key, value in found.items()}
        values = {"batch" if key == "example_batch" else key: value for key, value in values.items()}
        unknown = [key for key in values if key not in RESULT_KEYS]
        if unknown or not {"model", "batch"} <= values.keys():
            what = f"has {unknown[0]!r}" if unknown else "has no 'model' or no 'batch'"
            raise InputError(f"{name}() returns a dict that {what}", f"its keys: model, batch, and any of {', '.join(RESULT_KEYS[2:])}")
        return values
    if isinstance(found, tuple) and len(found) == 2:
        return {"model": found[0], "batch": found[1]}
    raise InputError(
        f"{name}() returns a {type(found).__name__}", "return (model, batch), or a dict with these and loss, optimizer, autocast"
    )


STEPS = 2
"""The first step makes the optimizer's states, at its end; from the second on they are there throughout."""


class Training(NamedTuple):
    """What is trained, on fake tensors."""

    model: Any
    batch: Any
    loss: Callable[..., Any] | None
    optimizer: Any
    """None: there is none."""
    autocast: str | None
    accumulate: bool
    cuda: bool


def run_steps(training: Training, ledger: Ledger) -> None:
    """Run STEPS steps and tell `ledger` of every storage."""
    import torch
    from torch.utils._pytree import tree_iter

    known = Storages(ledger)
    for parameter in training.model.parameters():
        known.see(parameter, "", "parameters")
    for buffer in training.model.buffers():
        known.see(buffer, "", "buffers")
    for value in tree_iter(training.batch):
        if isinstance(value, torch.Tensor):
            known.see(value, "")
    with make_tracker(known), _track_modules(training.model, known.modules):
        for _ in range(STEPS):
            if not training.accumulate:
                (training.optimizer or training.model).zero_grad()
            ledger.begin("forward")
            kind = training.autocast
            with nullcontext() if kind is None else torch.autocast("cpu", dtype=getattr(torch, kind)):
                output, loss = run_forward(training)
            ledger.begin("backward")
            loss.backward()
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    known.see(parameter.grad, "", "gradients")
            ledger.begin("optimizer")
            if training.optimizer is not None:
                training.optimizer.step()
                _mark_states(known, training.optimizer, training.cuda)
            del output, loss  # held to the end of the step, as a variable of the loop would hold them
        ledger.closed = True


def run_forward(training: Training) -> tuple[Any, Any]:
    """Return (output, loss) of the batch: a mapping gives keywords; of a sequence the first is the input and the rest the loss's.

    The loss: loss(output, *rest of the batch). Without one the model takes the whole sequence, and it is `output.loss`, output["loss"] or
    the only single number in the output. Raises UsageError where there is none.
    """
    import torch

    model, batch = training.model, training.batch
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif training.loss is None:
        output = model(*parts)
    else:
        output = model(parts[0])
    if training.loss is not None:
        found = [training.loss(output, *(parts if isinstance(batch, Mapping) else parts[1:]))]
    elif isinstance(output, Mapping):
        found = [output.get("loss")]
    else:
        found = [getattr(output, "loss", None), *(output if isinstance(output, (list, tuple)) else [output])]
    for value in found:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return output, value
    shown = output if training.loss is None else found[0]
    what = f"a tensor of {'x'.join(map(str, shown.shape))}" if isinstance(shown, torch.Tensor) else f"a {type(shown).__name__}"
    if training.loss is not None:
        raise UsageError(f"no loss: loss= returns {what}, not one number", "take the mean, for example")
    raise UsageError(f"no loss: the model returns {what}", "give loss=, which is called with the output and the rest of the batch")


def _mark_states(known: Storages, optimizer: Any, cuda: bool) -> None:
    """Say what the optimizer holds; the counters of steps stay on the host unless they are asked to be on the device (torch.optim)."""
    import torch

    for group in optimizer.param_groups:
        on_host = cuda and not group.get("capturable") and not group.get("fused")
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    known.see(value, "", HOST if on_host and name == "step" else "optimizer_state")


@contextmanager
def _track_modules(model: Any, stack: list[str]) -> Iterator[None]:
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            kind = type(module).__name__
            text = f"{name} ({kind})" if name.rpartition(".")[2].isdigit() else name or kind  # numbers alone do not tell layers apart

            def leave(_module: Any, _inputs: Any, _output: Any) -> None:
                stack.pop()

            hooks.callback(module.register_forward_pre_hook(lambda *_, text=text: stack.append(text)).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


DEVICES = ("cuda", "cpu")
AUTOCAST = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"), **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("none", "no", "fp32", "float32")),
}  # fmt: skip
_PHASES: tuple[EstimatePhase, ...] = ("forward", "backward", "optimizer")
_PASS_NAMES = {None: "first pass", "forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}


class EstimateInput(msgspec.Struct, kw_only=True):
    """What is to be estimated. See gpudiag.estimate_memory."""

    model: Any
    batch: Any
    loss: Callable[..., Any] | None = None
    optimizer: Any = "AdamW"
    autocast: Any = None
    device: Any = "cuda"
    accumulate: bool = False


def run_estimate(make: Callable[[], EstimateInput], making: str) -> ModelEstimate:
    """Return the memory of training what `make` makes, on fake tensors; `making`: what a failure of it is called.

    Raises InputError where the code fails or needs the values of a tensor, UsageError for what does not fit.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("an estimate of a model needs torch", "pip install 'gpudiag[train]'") from error
    with use_fake_tensors():
        training = _run_explained(lambda: making, lambda: _make_training(make()))
        # Every allocation is a multiple of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
        ledger = Ledger(512 if training.cuda else 1)
        # compiled functions run as they were written: a compiler needs values; it is not worth seconds of imports where nothing is compiled
        stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None  # torch 2.6
        with use_cuda_kernels(training.cuda), nullcontext() if stance is None else stance("force_eager"):
            _run_explained(lambda: f"the {_PASS_NAMES[ledger.phases[-1].name]}", lambda: run_steps(training, ledger))
    return _summarise(training, ledger)


def _make_training(given: EstimateInput) -> Training:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    device = str(given.device).partition(":")[0]
    if device not in DEVICES:
        raise UsageError(f"device={given.device!r} is not known", f"one of {', '.join(DEVICES)}")
    model, batch = (
        value() if callable(value) and not isinstance(value, torch.nn.Module) else value for value in (given.model, given.batch)
    )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", "give a torch.nn.Module, or a function that makes one")
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise UsageError(f"the model is wrapped in {type(model).__name__}, and one device is estimated", "give its .module")
    loss, optimizer = given.loss, given.optimizer
    if all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        batch = make_fake(batch)
    else:
        model, batch, loss, optimizer = make_fake((model, batch, loss, optimizer))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{type(model).__name__} has no parameter to train", "set requires_grad where it is to learn")
    optimizer = _make_optimizer(optimizer, model)
    for group in optimizer.param_groups if device == "cuda" and optimizer is not None else ():
        # an optimizer that was not told how works on lists of tensors by itself on a GPU (torch.optim, foreach=None)
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True
    autocast = str(given.autocast).removeprefix("torch.").lower()
    if autocast not in AUTOCAST:
        raise UsageError(f"autocast={given.autocast!r} is not known", "one of bf16, fp16, none")
    return Training(model, batch, loss, optimizer, AUTOCAST[autocast], given.accumulate, device == "cuda")


def _make_optimizer(given: Any, model: Any) -> Any:
    import torch

    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        return given(model.parameters())
    names = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"]
    name = {known.lower(): known for known in names}.get(str(given).lower())
    if name is None:
        hint = "a name in torch.optim, or a function that makes it of the parameters"
        raise UsageError(f"there is no optimizer {given!r} in torch.optim{suggest_nearest(str(given), names)}", hint)
    return getattr(torch.optim, name)(model.parameters(), lr=1e-3)  # for an optimizer given by name; memory does not depend on it


def _run_explained(doing: Callable[[], str], action: Callable[[], Any]) -> Any:
    import torch
    from torch._subclasses import fake_tensor

    by_value = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    try:
        return action()
    except GpudiagError:
        raise
    except Exception as error:  # the code of the user may raise anything
        what = doing()
        # the line of the user's own code
        others = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "<")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
        at = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        if isinstance(error, by_value):
            op = getattr(error.func, "_schema", error.func)
            line = f"{what} needs the values of a tensor ({getattr(op, 'name', op)}), and an estimate has none{at}"
            raise InputError(line, "estimate without that part, or record a real step with gpudiag.profile(memory=True)") from error
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]
        raise InputError(f"{what} failed: {type(error).__name__}: {message}{at}") from error


def _summarise(training: Training, ledger: Ledger) -> ModelEstimate:
    from torch import nn

    modules, notes = list(training.model.modules()), []
    if not training.model.training:
        notes.append("the model is in eval mode: no dropout; call train() for what training keeps")
    if any(isinstance(module, nn.RNNBase) for module in modules):
        library = "cuDNN" if training.cuda else "oneDNN"
        notes.append(f"recurrent layers are taken as plain ops, step by step: what {library} keeps of them is not known and may be more")
    if training.cuda and any(type(module).__name__.startswith(("Conv", "LazyConv")) for module in modules):
        notes.append("convolutions: the workspaces of cuDNN are not known before it runs, and come on top")
    optimizer = "none"
    if training.optimizer is not None:
        ways = [way for way in ("fused", "foreach") if training.optimizer.param_groups[0].get(way)]
        optimizer = f"{type(training.optimizer).__name__}{f' ({ways[0]})' if ways else ''}"
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
        peak_op=ledger.events[peak.position].op,
        at_peak=ledger.by_purpose(peak.position),
        phases=tuple(PhasePeak(name, most[name]) for name in _PHASES),
        modules=ledger.by_module(kept),
        block_bytes=ledger.block_bytes,
        optimizer=optimizer,
        autocast=training.autocast or "none",
        notes=tuple(notes),
    )

"""Two steps of a training without data, told to a ledger pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from gpudiag.capture.estimate.ledger import HOST, Ledger
from gpudiag.capture.estimate.tracker import Storages, tracker_class
from gpudiag.errors import UsageError

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


def run(training: Training, ledger: Ledger) -> None:
    """Run STEPS steps and tell `ledger` of every storage."""
    from torch.utils._pytree import tree_iter

    known = Storages(ledger)
    for parameter in training.model.parameters():
        known.see(parameter, "", "parameters")
    for buffer in training.model.buffers():
        known.see(buffer, "", "buffers")
    for value in tree_iter(training.batch):
        if _is_tensor(value):
            known.see(value, "")
    with tracker_class()(known), _named(training.model, known.modules):
        for index in range(STEPS):
            _step(training, ledger, known, index)
        ledger.close()


def _step(training: Training, ledger: Ledger, known: Storages, index: int) -> None:
    """Run one step, in which the output is held to the end as a variable of the loop would hold it."""
    if not training.accumulate:
        (training.optimizer or training.model).zero_grad()
    ledger.begin("forward", index)
    with _autocast(training.autocast):
        output = forward(training)
        loss = loss_of(training, output)
    ledger.begin("backward", index)
    loss.backward()
    _mark(known, [parameter.grad for parameter in training.model.parameters()], "gradients")
    ledger.begin("optimizer", index)
    if training.optimizer is not None:
        training.optimizer.step()
        _mark_states(known, training.optimizer, training.cuda)
    del output, loss


def forward(training: Training) -> Any:
    """Return what the model makes of the batch: a mapping gives keywords; of a sequence the first is the input and the rest the loss's.

    Without a loss the model makes it, and takes the whole sequence.
    """
    model, batch = training.model, training.batch
    if isinstance(batch, Mapping):
        return model(**batch)
    parts = _parts(batch)
    return model(*parts) if training.loss is None else model(parts[0])


def loss_of(training: Training, output: Any) -> Any:
    """Return the loss: loss(output, *rest of the batch); without one `output.loss`, output["loss"] or the only single number in the output.

    Raises UsageError where there is none.
    """
    if training.loss is not None:
        rest = [training.batch] if isinstance(training.batch, Mapping) else _parts(training.batch)[1:]
        found = training.loss(output, *rest)
        if not _single(found):
            raise UsageError(f"no loss: loss= returns {_described(found)}, not one number", "take the mean, for example")
        return found
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for value in (named, *(_parts(output) if not isinstance(output, Mapping) else ())):
        if _single(value):
            return value
    raise UsageError(
        f"no loss: the model returns {_described(output)}", "give loss=, which is called with the output and the rest of the batch"
    )


def _parts(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _single(value: Any) -> bool:
    return _is_tensor(value) and value.numel() == 1


def _described(value: Any) -> str:
    return f"a tensor of {'x'.join(map(str, value.shape))}" if _is_tensor(value) else f"a {type(value).__name__}"


def _mark(known: Storages, tensors: Sequence[Any], purpose: str) -> None:
    for tensor in tensors:
        if tensor is not None:
            known.see(tensor, "", purpose)


def _mark_states(known: Storages, optimizer: Any, cuda: bool) -> None:
    """Say what the optimizer holds; the counters of steps stay on the host unless they are asked to be on the device (torch.optim)."""
    for group in optimizer.param_groups:
        on_host = cuda and not group.get("capturable") and not group.get("fused")
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if _is_tensor(value):
                    known.see(value, "", HOST if on_host and name == "step" else "optimizer_state")


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _autocast(kind: str | None) -> AbstractContextManager[Any]:
    import torch

    return nullcontext() if kind is None else torch.autocast("cpu", dtype=getattr(torch, kind))


@contextmanager
def _named(model: Any, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are under way in `stack`."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            kind = type(module).__name__
            text = f"{name} ({kind})" if name.rpartition(".")[2].isdigit() else name or kind  # numbers alone do not tell layers apart

            def enter(_module: Any, _inputs: Any, text: str = text) -> None:
                stack.append(text)

            def leave(_module: Any, _inputs: Any, _output: Any) -> None:
                stack.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield

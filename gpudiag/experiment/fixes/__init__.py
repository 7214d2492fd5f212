"""The fixes that an experiment can apply, one file a kind. A new one: its descriptor in model/fixes.py, and its class in a file here."""

from __future__ import annotations

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.experiment.fixes import compile as compiler
from gpudiag.experiment.fixes import copies, dataloader, distributed, kernels, memory, optimizer, precision
from gpudiag.experiment.fixes.fix import Applier
from gpudiag.experiment.fixes.registry import REGISTERED
from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID

_FILES = (compiler, copies, dataloader, distributed, kernels, memory, optimizer, precision)
_BY_ID: dict[str, type[Applier]] = {
    kind.id: kind for file in _FILES for kind in vars(file).values() if isinstance(kind, type) and issubclass(kind, Applier) and kind.id
}
APPLIERS = tuple(_BY_ID[name] for name in FIX_BY_ID if name in _BY_ID)
"""In the order of model.fixes.FIXES. A fix that is described there and not here cannot be injected: it goes through `--variant`."""


def make_applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id in REGISTERED:
        return REGISTERED[call.id](call.value)
    if call.id not in FIX_BY_ID:
        raise InputError(f"no fix is named {call.id!r}{suggest_nearest(call.id, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    if call.id not in _BY_ID:
        hint = f"make the change in a copy of the script and compare that with --variant NAME=script:COPY.py: {FIX_BY_ID[call.id].change}"
        why = "the program's own loop decides what a batch or a micro-batch is, and when the optimizer steps"
        raise InputError(f"{call.id} cannot be put into a running program: {why}", hint)
    if call.value is not None and not FIX_BY_ID[call.id].values:
        raise InputError(f"{call.id} takes no value, but was given {call.value!r}", f"write --fix {call.id}")
    return _BY_ID[call.id](call.value)

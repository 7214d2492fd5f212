"""The fixes that an experiment can apply, one file each. A new fix: its descriptor in model/fixes.py, its file here, and one line below."""

from __future__ import annotations

from gpudiag.errors import InputError, nearest
from gpudiag.experiment.fixes.fix import Applier
from gpudiag.model.experiment import FixCall
from gpudiag.model.fixes import FIX_BY_ID

APPLIERS: tuple[type[Applier], ...] = ()
"""In the order of model.fixes.FIXES. A fix that is described there and not here cannot be injected: it goes through `--variant`."""

_BY_ID = {applier.id: applier for applier in APPLIERS}


def applier(call: FixCall) -> Applier:
    """Return how `call` is applied. Raises InputError for a fix that is not known, or one that only the user can apply."""
    if call.id not in FIX_BY_ID:
        raise InputError(f"no fix is named {call.id!r}{nearest(call.id, FIX_BY_ID)}", "`gpudiag fixes` lists them")
    if call.id not in _BY_ID:
        hint = "make the change in a copy of the script and compare that: --variant NAME=script:COPY.py"
        raise InputError(f"{call.id} cannot be put into a running program: {FIX_BY_ID[call.id].change}", hint)
    return _BY_ID[call.id](call.value)

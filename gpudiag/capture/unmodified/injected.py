"""The environment in which an unmodified script is watched: the plan, and the injector's folder first on PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpudiag.capture.unmodified.inject import sitecustomize
from gpudiag.capture.unmodified.inject.sitecustomize import PLAN, SHADOWED, WATCHER

INJECT = Path(sitecustomize.__file__).parent


def injected(plan: str, base: Mapping[str, str], watcher: str = "") -> dict[str, str]:
    """Return `base` with the text of a plan and the injector.

    `watcher`: the module whose watch(plan) is called once torch has been imported; '' for the one that records.
    """
    environ = {**base, PLAN: plan}
    for name in (SHADOWED, WATCHER):
        environ.pop(name, None)
    if watcher:
        environ[WATCHER] = watcher
    before = base.get("PYTHONPATH")
    if before is not None:
        environ[SHADOWED] = before
    environ["PYTHONPATH"] = f"{INJECT}{os.pathsep}{before}" if before else str(INJECT)
    return environ

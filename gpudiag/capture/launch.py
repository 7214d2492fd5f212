"""What the launcher says of this process: which launch it belongs to, and where its bundle goes by default."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

_NAMELESS = ("", "none")
"""torchrun's --rdzv-id without a value of its own is 'none' (torch/distributed/run.py)."""

TRIAL = "GPUDIAG_TRIAL"
"""Environment variable of each process that `gpudiag ab` measures (MARK of experiment/guard.py, which imports nothing)."""

_RUN_ID = "TORCHELASTIC_RUN_ID"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def _launcher() -> tuple[int, float] | None:
    """Return (process id, Unix time of its start) of torchrun: the nearest ancestor that is no worker; None where nobody says."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            if _RUN_ID not in parent.environ():
                return parent.pid, parent.create_time()
    except (psutil.Error, OSError):
        pass
    return None


def launch_id(environ: Mapping[str, str] | None = None) -> str:
    """Return a digest that is the same for all ranks of one launch and another for every other launch; '' where nobody says.

    torchrun: its run id and restart count, and, where all workers have one parent, which process that is
    (TORCHELASTIC_*, https://docs.pytorch.org/docs/stable/elastic/run.html). Slurm: its job, step and restart count.
    """
    env = os.environ if environ is None else environ
    if _RUN_ID in env:
        run, restart = env[_RUN_ID], env.get("TORCHELASTIC_RESTART_COUNT", "0")
        parent = _launcher() if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE") else None
        if run in _NAMELESS and parent is None:
            return ""
        said: tuple[str, ...] = ("torchrun", run, restart, repr(parent))
    elif "SLURM_STEP_ID" in env:
        said = ("slurm", *(env.get(name, "") for name in _SLURM))
    else:
        return ""
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<time>; under torchrun runs/<run id>, or runs/<time at which torchrun started>: the same for all ranks."""
    env = os.environ if environ is None else environ
    run = env.get(_RUN_ID)
    if run is None:
        return Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    suffix = f"-restart{restart}" if restart.isdigit() and restart != "0" else ""
    if run not in _NAMELESS:
        return Path("runs", (re.sub(r"[^\w.-]+", "-", run).strip(".-")[:64] or "run") + suffix)
    parent = _launcher()
    return Path("runs", time.strftime("%Y%m%d-%H%M%S", time.localtime(parent[1] if parent else None)) + suffix)

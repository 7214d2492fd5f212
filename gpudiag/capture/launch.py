"""The launch that a recording belongs to, and the folder that its ranks write into."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.bundle.layout import MAX_MANIFEST_BYTES, manifest_name
from gpudiag.files import read_file
from gpudiag.model.bundle import MANIFEST_NAME, UNREADABLE, Manifest

_NAMELESS = ("", "none")
"""torchrun's --rdzv-id without a value of its own is 'none' (torch/distributed/run.py)."""

TRIAL_VARIABLE = "GPUDIAG_TRIAL"
"""Environment variable of each process that `gpudiag ab` measures (MARK of experiment/guard.py, which imports nothing)."""

_RUN_ID = "TORCHELASTIC_RUN_ID"


def _find_launcher() -> tuple[int, float] | None:
    """Return (process id, Unix time of its start) of torchrun: the nearest ancestor that is no worker; None where nobody says."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            if _RUN_ID not in parent.environ():
                return parent.pid, parent.create_time()
    except (psutil.Error, OSError):
        pass
    return None


def read_launch_id(environ: Mapping[str, str] | None = None) -> str:
    """Return a digest that is the same for all ranks of one launch and another for every other launch; '' where nobody says.

    torchrun: its run id and restart count, and, where all workers have one parent, which process that is
    (TORCHELASTIC_*, https://docs.pytorch.org/docs/stable/elastic/run.html). Slurm: its job, step and restart count.
    """
    env = os.environ if environ is None else environ
    if _RUN_ID in env:
        run, restart = env[_RUN_ID], env.get("TORCHELASTIC_RESTART_COUNT", "0")
        parent = _find_launcher() if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE") else None
        if run in _NAMELESS and parent is None:
            return ""
        said: tuple[str, ...] = ("torchrun", run, restart, repr(parent))
    elif "SLURM_STEP_ID" in env:
        said = ("slurm", *(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")))
    else:
        return ""
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]


def choose_default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<time>; under torchrun runs/<run id>, or runs/<time at which torchrun started>: the same for all ranks."""
    env = os.environ if environ is None else environ
    run = env.get(_RUN_ID)
    if run is None:
        return Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    suffix = f"-restart{restart}" if restart.isdigit() and restart != "0" else ""
    if run not in _NAMELESS:
        return Path("runs", (re.sub(r"[^\w.-]+", "-", run).strip(".-")[:64] or "run") + suffix)
    parent = _find_launcher()
    return Path("runs", time.strftime("%Y%m%d-%H%M%S", time.localtime(parent[1] if parent else None)) + suffix)


MAX_SUFFIX = 1000
"""`<path>-2` ... `<path>-1000` are tried before giving up."""

SAME_RUN_NS = 600 * 10**9
"""An unfinished bundle begun by rank 0 within this time is taken for the run that another rank is joining, where no launcher says more."""

CLAIM_NAME = ".recording"
"""Holds the launch that writes into the folder, until its rank 0 has finished."""

UNKNOWN_LAUNCH = "?"

CLAIM_READS, CLAIM_WAIT_S = 20, 0.025
"""How often, and how far apart, an empty claim is read again: between making and filling it lie microseconds, or a slow file server."""


class Claim(NamedTuple):
    """Who wants a folder: one rank of a launch (`launch`: see read_launch_id; '' where the launcher does not say)."""

    rank: int = 0
    world_size: int = 1
    launch: str = ""


def _is_same_run(path: Path, who: Claim) -> bool:
    if who.world_size == 1 or (path / manifest_name(who.rank)).exists():
        return False
    begun: Manifest | None = None
    with suppress(OSError, *UNREADABLE):
        begun = msgspec.json.decode(read_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES), type=Manifest)
    claimant: str | None = None  # the launch that claimed the folder ('' unknown); None where there is no claim, or it stays empty
    for _ in range(CLAIM_READS):
        try:
            text = (path / CLAIM_NAME).read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        if text:
            claimant = "" if text == UNKNOWN_LAUNCH else text
            break
        time.sleep(CLAIM_WAIT_S)  # another rank is about to write it
    launch = claimant if claimant is not None else begun.launch if begun is not None else None
    if launch or (who.launch and launch is not None):
        return launch == who.launch
    if begun is not None:
        return not begun.finished and abs(time.time_ns() - begun.created_unix_ns) < SAME_RUN_NS
    if (path / MANIFEST_NAME).exists():
        return False  # one that cannot be read
    return claimant is not None or any(path.glob("manifest-rank*.json"))  # rank 0 comes later


def choose_folder(path: Path, who: Claim) -> Path:
    """Return `path`, or `<path>-2`, `-3`, ... where it already holds something: a finished recording is never overwritten.

    Ranks of one launch get the same folder. It is made, and claimed against other runs. Raises OSError where no folder can be used.
    """
    for suffix in range(1, MAX_SUFFIX + 1):
        candidate = path if suffix == 1 else path.with_name(f"{path.name}-{suffix}")
        try:
            candidate.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            continue  # a file
        if next(candidate.iterdir(), None) is None:
            # the first who writes the claim has it, also of two runs that begin at the same moment
            with suppress(FileExistsError), open(candidate / CLAIM_NAME, "x") as file:
                file.write(who.launch or UNKNOWN_LAUNCH)
                return candidate
        if _is_same_run(candidate, who):
            return candidate
    raise FileExistsError(f"{path} and {path}-2 ... -{MAX_SUFFIX} already exist")

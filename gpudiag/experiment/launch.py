"""How an arm is started: the environment that keeps a trial to itself, and ports that two distributed arms do not share."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from gpudiag.experiment.design import Arm
from gpudiag.experiment.fixes import applier

QUIET = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Trials are no runs that anybody wants to find in a tracker, nor do they upload, download or leave compiled files beside the script."""

_PORTS = ("MASTER_PORT", "PET_MASTER_PORT", "ACCELERATE_MAIN_PROCESS_PORT")
"""Where launchers read a port from: torch.distributed's env:// method; torchrun's default of --master-port (torch.distributed.argparse_util
puts PET_ before each of its options); accelerate."""

_LOGS_OF_RANKS = "PET_LOG_DIR"
"""torchrun's default of --log-dir; it leaves a folder torchelastic_... among the temporary files of the user else."""

_PORT_FLAG = re.compile(r"(--(?:master|main[-_]process)[-_]port)(?:=(.*))?")
_ENDPOINT_FLAG = re.compile(r"(--rdzv[-_]endpoint)(?:=(.*))?")
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())  # noqa: S104 - compared with, not bound to


def environment(arm: Arm, folder: Path, port: int) -> dict[str, str]:
    """Return the environment of `arm`, without its plan: this process's, quiet, with what the fixes and the arm itself ask for on top."""
    environ = {**os.environ, **QUIET, "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), _LOGS_OF_RANKS: str(folder / "ranks")}
    environ.update(dict.fromkeys(_PORTS, str(port)))
    for call in arm.fixes:
        environ.update(applier(call).environ)
    return {**environ, **arm.environ}


def separated(command: tuple[str, ...], port: int) -> tuple[str, ...]:
    """Return `command` with the ports that it names on this machine replaced by `port`: two arms are alive at once.

    Options of torchrun, accelerate and deepspeed: --master-port, --main_process_port, --rdzv-endpoint HOST:PORT. Port 0 (any free) stays.
    """
    found = list(command)
    for at, argument in enumerate(command):
        for flag, replace in ((_PORT_FLAG, _port), (_ENDPOINT_FLAG, _endpoint)):
            match = flag.fullmatch(argument)
            if match and match[2] is not None:
                found[at] = f"{match[1]}={replace(match[2], port)}"
            elif match and at + 1 < len(command):
                found[at + 1] = replace(command[at + 1], port)
    return tuple(found)


def _port(value: str, port: int) -> str:
    return str(port) if value.isdigit() and int(value) else value


def _endpoint(value: str, port: int) -> str:
    host, colon, given = value.rpartition(":")
    host = host if colon else value
    return value if host.strip("[]") not in _HERE or given == "0" else f"{host}:{port}"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expendable(pid: int) -> None:
    """Have the kernel end this process and its children before any other when memory runs out (proc(5), oom_score_adj)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="ascii")

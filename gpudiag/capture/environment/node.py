"""What the machine of a rank is called: by the launcher's number, never by the name of the host."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping

_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")
"""Number of the machine: torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html), Slurm (srun(1)).

Not Open MPI's OMPI_COMM_WORLD_NODE_RANK: that counts the processes of a machine.
"""


def node(world_size: int, environ: Mapping[str, str] | None = None) -> str:
    """Return what tells this machine from the others of a run: 'node 3' as the launcher counts, else a digest of the host's name.

    '' for a run of one process, which has no other machine to be told from, and where the host has no name.
    """
    if world_size < 2:
        return ""
    env = os.environ if environ is None else environ
    for name in _NUMBERS:
        number = env.get(name, "")
        if number.isascii() and number.isdigit() and len(number) < 8:
            return f"node {int(number)}"
    host = platform.node()
    return f"host {hashlib.sha256(host.encode()).hexdigest()[:6]}" if host else ""

"""kill -9 at two hundred random moments: `make kill`. Prints what was left, and fails where something was lost (tests/kills.py).

Recordings, reports with the cache that they write, and experiments: the command, an arm, or the guard.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kills
from dashclient import small_bundle

from gpudiag.experiment.isolation import LOCKS_VARIABLE

SHARES = {"recordings": 0.45, "reports": 0.3, "experiments": 0.25}


def recordings(folder: Path, count: int, seed: int) -> Counter[str]:
    """Return what was seen of killed recordings."""
    return kills.recordings(folder, count, seed)


def reports(folder: Path, count: int, seed: int) -> Counter[str]:
    """Return what was seen of killed reports on a small bundle."""
    return kills.reports(folder, small_bundle(folder / "run"), count, seed)


def experiments(folder: Path, count: int, seed: int) -> Counter[str]:
    """Return what was seen of killed experiments."""
    os.environ[LOCKS_VARIABLE] = str(folder)  # another experiment on this machine costs time alone
    made = kills.places(folder)
    return kills.experiments(lambda: next(made), count, seed)


KINDS: dict[str, Callable[[Path, int, int], Counter[str]]] = {"recordings": recordings, "reports": reports, "experiments": experiments}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=time.time_ns() % 10_000)
    options.add_argument("--only", choices=KINDS)
    chosen = options.parse_args()
    print(f"seed {chosen.seed}\n\n| killed | what was seen |\n|---|---|", flush=True)
    for name, share in SHARES.items():
        if chosen.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="gpudiag-kills-") as folder:
                seen = KINDS[name](Path(folder), max(1, round(share * chosen.kills)), chosen.seed)
            print(f"| {name} | {', '.join(f'{what} {number}' for what, number in seen.items())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a coverage-guided fuzzer (atheris) on the targets, a process for each: `python -m fuzz.run [--seconds N] [TARGET ...]` in tests/.

New inputs and those that fail are kept below runs/fuzz. `make fuzz` calls it; the tests do for a few seconds a target.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fuzz.targets.registry import TARGETS
from fuzz.targets.target import CORPUS, Target

RUNS = Path(__file__).resolve().parents[2] / "runs" / "fuzz"
STUCK_AFTER_S = 120
"""Wall time for one input, beside the CPU time that one.py allows: what waits for ever takes none."""
MEMORY_MB = 1024
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
NO_ATHERIS = "atheris is not installed: pip install 'gpudiag[fuzz]' (it has wheels for Linux on x86-64)"


class Ran(NamedTuple):
    """How a target fared."""

    name: str
    executions: int
    failed: bool
    tail: str
    """The last lines that the fuzzer wrote."""


def has_atheris() -> bool:
    """Return whether the fuzzer is installed."""
    return find_spec("atheris") is not None


def fuzz(target: Target, seconds: int, place: Path = RUNS) -> Ran:
    """Return how `target` fared in `seconds`; new inputs are kept in `place`/<target>, those that fail beside it."""
    found = place / target.name
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [found, _seeds(target, Path(scratch)), *([CORPUS / target.name] if (CORPUS / target.name).is_dir() else [])]
        options = [
            f"-max_total_time={seconds}", f"-timeout={STUCK_AFTER_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={target.longest}",
            f"-artifact_prefix={place / target.name}-", "-print_final_stats=1", *_dictionary(target, Path(scratch)),
        ]  # fmt: skip
        return _ran(target, [*options, *map(str, folders)], Path(scratch), place / f"{target.name}.log")


def keep(target: Target, place: Path = RUNS) -> Ran:
    """Return how it went to copy into the kept inputs what was found in `place` and reaches lines that those do not reach."""
    kept = CORPUS / target.name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-merge=1", "-use_counters=0", f"-max_len={target.longest}", str(kept), str(place / target.name)]
        return _ran(target, options, Path(scratch), place / f"{target.name}-kept.log")


def _ran(target: Target, options: list[str], scratch: Path, log: Path) -> Ran:
    """Run the process of a target and return how it went; what it writes goes to `log`."""
    environ = os.environ | {"TMPDIR": str(scratch), "GPUDIAG_NO_CACHE": "1", "POLARS_MAX_THREADS": "1"}
    command = [sys.executable, "-m", "fuzz.one", target.run.__module__, target.name, ",".join(target.covers), *options]
    with log.open("w") as file:
        code = subprocess.run(command, cwd=CORPUS.parents[1], env=environ, stdout=file, stderr=file, check=False).returncode
    text = log.read_text(errors="replace")
    executed = _EXECUTED.search(text)
    return Ran(target.name, int(executed[1]) if executed else 0, code != 0, text[-3000:])


def _seeds(target: Target, scratch: Path) -> Path:
    """Return a folder with the target's own first inputs."""
    folder = scratch / "seeds"
    folder.mkdir()
    for number, seed in enumerate(target.seeds()):
        (folder / f"{number:04}").write_bytes(seed[: target.longest])
    return folder


def _dictionary(target: Target, scratch: Path) -> list[str]:
    """Return the option that names a file with the target's words, in libFuzzer's form."""
    path = scratch / "words"
    lines = ("".join(f"\\x{byte:02x}" for byte in (word if isinstance(word, bytes) else word.encode())) for word in target.words)
    path.write_text("".join(f'"{line}"\n' for line in lines))
    return [f"-dict={path}"] if target.words else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where no target failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: 600)")
    parser.add_argument("--keep", action="store_true", help="run nothing; add what was found and reaches new code to tests/fuzz/corpus")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    given = parser.parse_args(arguments)
    if not has_atheris():
        print(NO_ATHERIS, file=sys.stderr)
        return 2
    unknown = [name for name in given.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]!r}")
    failed = 0
    for name in given.targets or TARGETS:
        ran = keep(TARGETS[name]) if given.keep else fuzz(TARGETS[name], given.seconds)
        print(f"{ran.name:12} {ran.executions:>12,} executions{'  FAILED' if ran.failed else ''}", flush=True)
        if ran.failed:
            failed += 1
            print(ran.tail, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Experiments on live programs, named beforehand: `python tests/benchmarks/bench_live.py FOLDER [NAME...] [--at-once 2]`.

Each experiment runs once; what FOLDER holds already is not measured again, and a later call goes on. The table lists all of them. The A/A
experiments compare a program with itself: three raw claims among twenty are what chance allows (a claim a look has p* = 0.0174, together
5 %), none may be left after Holm. The others have a known answer. Each keeps to one core, so that --at-once N fills N cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from gpudiag.report.experiment.results import apply_holm

ROOT = Path(__file__).resolve().parents[2]
TARGETS, SAMPLES = ROOT / "tests" / "benchmarks" / "targets", ROOT / "samples"
PLAIN, HUGGINGFACE, LIGHTNING = (str(TARGETS / f"{name}.py") for name in ("plain", "huggingface", "lightning_fit"))
AA = ("--aa", "--pairs", "4..6")
LONG = ("--steps", "1000000")
"""A sample trains for some seconds by default: over before its trial is."""


class Named(NamedTuple):
    """An experiment and the answer that is known beforehand."""

    name: str
    arguments: tuple[str, ...]
    expected: str
    planted: bool = False


def _same(name: str, script: str, count: int) -> list[Named]:
    """Return `count` A/A experiments; every other one keeps host memory, which makes pairs differ less."""
    ways = ((), ("--steady-malloc",))
    return [Named(f"aa-{name}-{number}", (*AA, *ways[number % 2], script), "no claim") for number in range(count)]


EXPERIMENTS = [
    *_same("plain", PLAIN, 7),
    *_same("huggingface", HUGGINGFACE, 7),
    *_same("lightning", LIGHTNING, 6),
    Named("useless-variant", ("--variant", "useless=env:NOBODY_READS_THIS=1", "--no-parity", "--pairs", "4..6", PLAIN), "not faster"),
    Named("useless-fix", ("useless",), "not faster", planted=True),
    Named("harmful-variant", ("--variant", "harmful=args:--pause-ms 3", "--no-parity", PLAIN), "slower"),
    Named("harmful-fix", ("harmful",), "slower", planted=True),
    Named("wrong-variant", ("--variant", "wrong:rounding=args:--rate 0.0011", "--parity-only", PLAIN), "parity differs"),
    Named("wrong-fix", ("wrong",), "parity differs", planted=True),
    Named("channels-last", ("--fix", "channels-last", str(SAMPLES / "nchw_convolution" / "train.py"), *LONG), "faster"),
    Named("bf16", ("--fix", "bf16", str(SAMPLES / "fp32_matmul" / "train.py"), *LONG), "faster"),
    Named("compile", ("--fix", "compile", str(SAMPLES / "pointwise_chain" / "train.py"), *LONG), "faster"),
    Named("compile-torch-class-root", ("--fix", "compile", PLAIN), "compiled or not_applied"),
]


def command(named: Named, folder: Path, shared: bool) -> list[str]:
    """Return the command of one experiment; it writes its result to `folder`. `shared`: others run beside it."""
    result, bundle = folder / f"{named.name}.json", folder / "bundles" / named.name
    if named.planted:
        return [sys.executable, str(TARGETS / "planted_fixes.py"), *named.arguments, str(result), str(bundle)]
    options = ["--json", str(result), "--output", str(bundle), *(["--shared-ok"] if shared else [])]
    return [sys.executable, "-m", "gpudiag", "ab", *options, *named.arguments]


def measure(named: Named, folder: Path, core: int, shared: bool) -> None:
    """Run one experiment on one core (`shared`: beside others); what it printed is kept beside its result."""
    work = folder / "work" / named.name
    work.mkdir(parents=True, exist_ok=True)
    begun, load = time.time(), os.getloadavg()[0]
    with open(folder / f"{named.name}.log", "w", encoding="utf-8") as log:
        code = subprocess.run(
            command(named, folder, shared),
            cwd=work,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            check=False,
        ).returncode
    left = sorted(path.relative_to(work).as_posix() for path in work.rglob("*"))
    told = {"code": code, "wall_s": time.time() - begun, "load": [load, os.getloadavg()[0]], "left": left}
    (folder / f"{named.name}.run.json").write_text(json.dumps(told))
    print(f"{named.name}: exit code {code} after {told['wall_s']:.0f} s", flush=True)


def measure_all(experiments: list[Named], folder: Path, at_once: int) -> None:
    """Run what has not run yet, in the order of the list."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:at_once]:
        cores.put(core)

    def one(named: Named) -> None:
        core = cores.get()
        try:
            measure(named, folder, core, at_once > 1)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [named for named in experiments if not (folder / f"{named.name}.run.json").exists()]))


# -- the table ------------------------------------------------------------------------------------------------------------


def outcome(named: Named, folder: Path) -> dict[str, Any]:
    """Return the outcome of an experiment as `gpudiag ab --json` has it; empty where there is none."""
    path = folder / f"{named.name}.json"
    found = json.loads(path.read_text())["experiments"] if path.exists() else []
    return dict(found[0]) if found else {}


def as_expected(named: Named, found: dict[str, Any]) -> bool:
    """Return whether the answer is the one that was known beforehand."""
    verdict, parity = found.get("verdict"), (found.get("parity") or {}).get("verdict")
    return {
        "no claim": verdict not in (None, "faster", "slower", "failed"),
        "not faster": verdict not in (None, "faster", "failed"),
        "parity differs": parity == "differs",
        "compiled or not_applied": verdict == "not_applied" or any("graph" in text for text in found.get("evidence", ())),
    }.get(named.expected, verdict == named.expected)


def row(named: Named, folder: Path) -> str:
    """Return the line of the table for one experiment."""
    found, run = outcome(named, folder), json.loads((folder / f"{named.name}.run.json").read_text())
    ratio, interval = found.get("ratio"), found.get("interval")
    measured = "" if ratio is None or interval is None else f"x{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    p = "" if found.get("p") is None else f"{found['p']:.4f}"
    parity = (found.get("parity") or {}).get("verdict", "")
    right = "yes" if as_expected(named, found) else "**NO**"
    judged = (found.get("verdict", "none"), measured, p, str(found.get("pairs", "")), parity, right)
    return f"| {named.name} | {named.expected} | {' | '.join(judged)} | {run['wall_s']:.0f} | {max(run['load']):.1f} |"


def claims(folder: Path) -> str:
    """Return how many A/A experiments claimed something, before and after Holm."""
    same = [outcome(named, folder) for named in EXPERIMENTS if named.expected == "no claim"]
    done = [found for found in same if found.get("p") is not None]
    raw = sum(found["verdict"] in ("faster", "slower") for found in done)
    left = sum(apply_holm([found["p"] for found in done]))
    return f"A/A: {len(done)} of {len(same)} measured, {raw} raw false claims, {left} after Holm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="the first letters of the experiments wanted (default: all)")
    parser.add_argument("--at-once", type=int, default=1)
    given = parser.parse_args()
    folder = given.folder.resolve()
    wanted = [named for named in EXPERIMENTS if named.name.startswith(tuple(given.names) or "")]
    measure_all(wanted, folder, given.at_once)
    print("\n| experiment | expected | verdict | ratio | p | pairs | parity | as expected | wall s | load |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(row(named, folder) for named in EXPERIMENTS if (folder / f"{named.name}.run.json").exists()))
    print(claims(folder))


if __name__ == "__main__":
    main()

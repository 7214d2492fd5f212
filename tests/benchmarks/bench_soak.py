"""Trains 100,000 steps under gpudiag.profile with hundreds of windows, and says what grew: `make soak` (exit code 1 where something did).

Memory, open files, threads, objects and shared memory are looked at every thousandth part of the run; what is judged is the slope over
its second half (flat.py). The same training with torch.profiler alone in the same windows, and without any, tells whose growth it is. Then
the bundle is read back: every step, every window, and what a report and the dashboard's pages take.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from flat import Trend, trend
from measuring import measure

WARM, RECORD, EXPORT = 2, 6, 1
"""Steps of a window: the defaults of gpudiag.profile."""

LOOKS = 100

LIMITS = {
    "rss_mb": 16.0,  # a tenth of a process that has imported torch; a run of ten million steps would grow by 1.6 GB
    "objects": 5_000.0,  # 12 for each window: its entry in the manifest, its name, its place in the schedule
    "files": 0.5,
    "threads": 0.5,
    "shm": 0.5,
}
"""Growth per 100,000 steps with 400 windows from which something is kept that nobody will ask for. Half of one file is none."""


def look(bundle: Path) -> dict[str, float]:
    """Return what this process holds now."""
    gc.collect()
    held = [path for path in bundle.rglob("*") if path.is_file()] if bundle.is_dir() else []
    return {
        "rss_mb": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "objects": len(gc.get_objects()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shm": len(os.listdir("/dev/shm")),  # noqa: S108 - looked at
        "bundle_mb": sum(path.stat().st_size for path in held if path.exists()) / 1e6,
        "bundle_files": len(held),
    }


class Plan(NamedTuple):
    """How long, and how often a window is recorded."""

    steps: int
    windows: int

    @property
    def wait(self) -> int:
        """Return the plain steps between two windows."""
        return max(1, self.steps // self.windows - WARM - RECORD - EXPORT - 2)


# -- the child: it trains --------------------------------------------------------------------------------------------------


def training() -> tuple[Any, Callable[[Any], None]]:
    """Return a loader of 1,000 batches, and what trains one of them: tiny, for the steps are to be many."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(2000, 8))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    return torch.utils.data.DataLoader(data, batch_size=2), step


def counted(batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Yield `steps` of `batches`, and ask for one more: with that the last step ends."""
    for number, batch in enumerate(batches):
        if number == steps:
            return
        yield batch


def under_gpudiag(loader: Any, path: Path, plan: Plan) -> Iterator[Any]:
    """Yield the batches of one epoch after the other, inside a session with the windows of `plan`."""
    import gpudiag

    options = {"warm": WARM, "record": RECORD, "repeat": plan.windows, "max_windows": plan.windows, "wait": plan.wait}
    with gpudiag.profile(path, **options) as prof:
        yield from counted((batch for _ in count() for batch in prof.steps(loader)), plan.steps)


def under_torch(loader: Any, path: Path, plan: Plan) -> Iterator[Any]:
    """Yield the same batches with torch.profiler alone in as many windows; traces are written and removed."""
    import torch

    def written(prof: Any) -> None:
        prof.export_chrome_trace(str(path))
        path.unlink()

    schedule = torch.profiler.schedule(wait=plan.wait, warmup=WARM, active=RECORD)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, schedule=schedule, on_trace_ready=written
    ) as prof:
        for batch in counted((batch for _ in count() for batch in loader), plan.steps):
            yield batch
            prof.step()


def bare(loader: Any, _path: Path, plan: Plan) -> Iterator[Any]:
    """Yield the same batches, with nothing around them."""
    return counted((batch for _ in count() for batch in loader), plan.steps)


ARMS = {"gpudiag": under_gpudiag, "torch.profiler": under_torch, "bare": bare}


def train(arm: str, path: Path, plan: Plan) -> dict[str, Any]:
    """Return what was seen in a run of `plan.steps` steps, and how long it took."""
    loader, step = training()
    seen, every = [], max(1, plan.steps // LOOKS)
    began, cpu = time.perf_counter(), time.process_time()
    for number, batch in enumerate(ARMS[arm](loader, path, plan)):
        step(batch)
        if number % every == every - 1:
            seen.append({"step": number + 1, **look(path)})
    return {"seen": seen, "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def run(arm: str, path: Path, plan: Plan) -> dict[str, Any]:
    """Return what train() says in a process of its own. Raises SystemExit where that fails."""
    command = [sys.executable, __file__, "--child", arm, "--bundle", str(path), "--steps", str(plan.steps), "--windows", str(plan.windows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- the parent: it judges ----------------------------------------------------------------------------------------------------


def judged(found: dict[str, Any]) -> dict[str, Trend]:
    """Return the trend of each figure."""
    seen = found["seen"]
    steps = [one["step"] for one in seen]
    return {name: trend(steps, [one[name] for one in seen], per=100_000, limit=limit) for name, limit in LIMITS.items()}


def tell(arm: str, found: dict[str, Any], plan: Plan) -> bool:
    """Print the trends of an arm; return whether none grows for certain."""
    trends, first, last = judged(found), found["seen"][0], found["seen"][-1]
    print(f"\n{arm}: {plan.steps:,} steps in {found['wall_s']:.0f} s ({found['cpu_s']:.0f} s of CPU time)\n")
    print(
        "| figure | after the first part | at the end | growth per 100,000 steps | 99 % interval | limit | |\n|---|---|---|---|---|---|---|"
    )
    for name, one in trends.items():
        print(
            f"| {name} | {first[name]:,.1f} | {last[name]:,.1f} | {one.growth:+,.2f} | {one.low:+,.2f} to {one.high:+,.2f} "
            f"| {one.limit:g} | {one.verdict} |"
        )
    return all(one.verdict != "grows" for one in trends.values())


def faults(path: Path, plan: Plan) -> list[str]:
    """Return what a bundle lacks of a run of `plan`: steps, windows, a clean end."""
    from gpudiag.bundle.reader import open_bundle
    from gpudiag.model.notices import format_notice
    from gpudiag.trace import read_trace

    bundle = open_bundle(path)
    found = [format_notice(notice) for notice in bundle.notices]
    if bundle.step_records["step"].to_list() != list(range(plan.steps)):
        found.append(f"{bundle.step_records.height} of {plan.steps} steps")
    recorded = bundle.recorded()
    if len(recorded) != plan.windows + 1 or len(bundle.windows()) != len(recorded):
        found.append(f"{len(recorded)} of {plan.windows + 1} windows")
    for window, file in zip(recorded.values(), bundle.windows(), strict=False):
        trace = read_trace(file)
        if trace.ops.is_empty() or window.steps != window.planned:
            found.append(f"window {window.index}: {trace.ops.height} ops, {window.steps} steps")
    left = [str(one.relative_to(path)) for one in path.rglob(".*") if one.parent.name != "cache"]  # whose marks stay
    return [*found, *(f"{name} was left" for name in left)]


def show(path: str) -> None:
    """Open the pages of a recording in a dashboard without a browser: for a process of its own."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from dashclient import Client, analysed
    from gpudiag_dashboard.app import create_app

    client, name = Client(create_app(Path(path).parent)), Path(path).name
    analysed(client, name)
    for page in ("/overview", "/findings", "/ops"):
        client.content(page, f"?bundle={name}")
    client.written("telemetry-state.children", {"address.search": f"?bundle={name}", "address.pathname": "/telemetry"})


def tell_reading(path: Path, folder: Path) -> bool:
    """Print what a report and the dashboard's overview of a bundle take; return whether both are made."""
    pages = f"from bench_soak import show; show({str(path)!r})"
    commands = {
        "gpudiag report -o html, json, md": [
            "-m", "gpudiag", "report", str(path), *(word for kind in ("html", "json", "md") for word in ("-o", str(folder / f"r.{kind}")))
        ],
        "gpudiag report --watch": ["-m", "gpudiag", "report", str(path), "--watch"],
        "pages of the dashboard": ["-c", pages],
    }  # fmt: skip
    print("\n| reading it | time s | CPU s | peak MB |\n|---|---|---|---|")
    environ = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    runs = {name: measure([sys.executable, *words], environ) for name, words in commands.items()}
    for name, one in runs.items():
        print(f"| {name} | " + ("failed | | |" if one is None else f"{one.wall_s:.1f} | {one.cpu_s:.1f} | {one.peak_mb:.0f} |"))
    return None not in runs.values()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--windows", type=int, default=400)
    options.add_argument("--alone", action="store_true", help="without the runs that tell whose growth it is")
    options.add_argument("--bundle", type=Path, help="where the bundle is kept (default: nowhere)")
    options.add_argument("--child", choices=ARMS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    plan = Plan(chosen.steps, chosen.windows)
    if chosen.child:
        print(json.dumps(train(chosen.child, chosen.bundle, plan)))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpudiag-soak-") as name:
        folder = Path(name)
        path = chosen.bundle or folder / "run"
        found = run("gpudiag", path, plan)
        kept = [tell("gpudiag", found, plan)]
        for arm in () if chosen.alone else ("torch.profiler", "bare"):
            tell(arm, run(arm, folder / "trace.json", plan), plan)
        wrong, last = faults(path, plan), found["seen"][-1]
        print(f"\nbundle: {last['bundle_mb']:.1f} MB in {last['bundle_files']:.0f} files; " + ("; ".join(wrong) or "every step and window"))
        kept += [not wrong, tell_reading(path, folder)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Causes planted in real training on this CPU: does the what-if on the recorded bad run give the step of the good one?

`python tests/benchmarks/bench_planted_pairs.py [PAIR...]` records the bad run with gpudiag.profile, times the good one in the same process
and prints a Markdown table, one row a pair. Both train on one thread. The causes keep the core at work: one that sleeps lets it go cold,
and the ops after a sleep of 50 ms took 10 to 20 % longer than without it, unprofiled too; that part no replay of recorded times can know.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from replayed import study

import gpudiag
from gpudiag.bundle.reader import open_bundle
from gpudiag.timeline.whatif.registry import parse_settings
from gpudiag.timeline.whatif.study import Study
from gpudiag.trace import read_trace

STEPS, SETTLED = 20, 5
WIDTH, BATCH = 768, 1024

ON_CORE = 0.93
"""Share of the time in which the training thread held a core; below, other programs did, and the row says so."""

HEAD = "| cause | what-if | bad step ms | what-if ms | good step ms | error | thread held a core |"


class Training:
    """A small network whose step takes some tens of milliseconds, with room for a fault before and after the work."""

    def __init__(self, folder: Path, *, decoded_bytes: int = 0, batch: int = BATCH, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.folder, self.batch, self._decoded_bytes = folder, batch, decoded_bytes
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        self.call = torch.compile(self.model, backend="eager") if compiled else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(batch, WIDTH)
        self.on_core = 0.0

    def loader(self) -> Any:
        text, inputs = bytes(self._decoded_bytes), self.inputs

        class Batches(torch.utils.data.IterableDataset):
            def __iter__(self) -> Iterator[Any]:
                for _ in range(STEPS):
                    zlib.compress(text)
                    yield inputs

        return torch.utils.data.DataLoader(Batches(), batch_size=None)

    def run(self, batches: Any, fault: Callable[[Training], None]) -> None:
        """Train one epoch; `on_core` becomes the share of it in which this thread held a core."""
        begun, worked = time.perf_counter(), time.thread_time()
        for x in batches:
            fault(self)
            loss = self.call(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.on_core = (time.thread_time() - worked) / (time.perf_counter() - begun)


def _nothing(_: Training) -> None:
    pass


def _collect(_: Training) -> None:
    gc.collect()


def _checkpoint(training: Training) -> None:
    torch.save([training.model.state_dict()] * 8, training.folder / "checkpoint.pt")


def _log(training: Training) -> None:
    with open(training.folder / "log.txt", "w") as file:
        for number in range(120_000):
            file.write(f"{number} {number * 0.5}\n")


def _think(_: Training) -> None:
    sum(number * number for number in range(800_000))


def _recompile(_: Training) -> None:
    torch._dynamo.reset()


def _timed(training: Training) -> float:
    """Return the median step of a healthy run in ns, with the time of asking for the batch."""
    marks: list[int] = []

    def marked() -> Iterator[Any]:
        for x in training.loader():
            yield x
            marks.append(time.perf_counter_ns())

    training.run(marked(), _nothing)
    return statistics.median(after - before for before, after in pairwise(marks[SETTLED:]))


def _recorded(training: Training, fault: Callable[[Training], None]) -> Study:
    path = training.folder / "bundle"
    with gpudiag.profile(path) as prof:
        training.run(prof.steps(training.loader()), fault)
    bundle = open_bundle(path, None)
    timing = bundle.window("timing")
    assert timing is not None
    return study(read_trace(timing), bundle.host_marks, training.batch)


PAIRS: dict[str, tuple[Callable[[Training], None], dict[str, Any], dict[str, Any], str]] = {
    "loader at work": (_nothing, {"decoded_bytes": 20_000_000}, {}, "loader=0"),
    "garbage collection": (_collect, {}, {}, "gc=0"),
    "checkpoint": (_checkpoint, {}, {}, "io=0"),
    "log file": (_log, {}, {}, "io=0"),
    "Python at work in the loop": (_think, {}, {}, "host=0"),
    "recompiles": (_recompile, {"compiled": True}, {"compiled": True}, "compile=0"),
    "twice the batch": (_nothing, {}, {"batch": 2 * BATCH}, "batch=2"),
}


def _row(name: str, folder: Path) -> str:
    """Return the row of one pair; the what-if is that of the middle representative step: the slowest is slow for reasons of others."""
    fault, bad, good, change = PAIRS[name]
    ballast = [[number] for number in range(1_500_000)] if change == "gc=0" else []  # what a collection has to look at
    slow, fast = Training(folder, **bad), Training(folder, **good)
    what_if = _recorded(slow, fault).what_if(parse_settings([change]))
    after = _timed(fast)
    ballast.clear()
    before, changed = (statistics.median(step[place] for step in what_if.per_step_ns) for place in (1, 2))
    held = min(slow.on_core, fast.on_core)
    return (
        f"| {name} | {change} | {before / 1e6:.1f} | {changed / 1e6:.1f} | {after / 1e6:.1f} | {changed / after - 1:+.1%} "
        f"| {held:.0%}{'' if held >= ON_CORE else ' (too little: run again on a quiet machine)'} |"
    )


def main(names: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)  # threads that wait for each other on a shared machine make times of no use
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n")
    for name in names or PAIRS:
        with tempfile.TemporaryDirectory() as folder:
            print(_row(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A dask.distributed cluster of processes on this machine, for tests: a scheduler and its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

START_S = 60.0


class DaskCluster:
    """A scheduler that waits for workers; `address` is tcp://..., `file` its scheduler file."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.file = folder / "scheduler.json"
        self._environ = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(self.file), "--no-dashboard")
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.address: str = msgspec.json.decode(self.file.read_bytes())["address"]
                return
            except (OSError, msgspec.DecodeError):
                assert time.monotonic() < deadline, "the scheduler did not start"
                time.sleep(0.05)

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{what}-{len(self._processes)}.log").open("wb")
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ, cwd=self._folder, start_new_session=True)
        log.close()
        self._processes.append(process)
        return process

    def worker(self, *, nanny: bool = False) -> subprocess.Popen[bytes]:
        """Start a worker with one thread; with a `nanny`, a dead one is started again."""
        kind = "--nanny" if nanny else "--no-nanny"
        return self._start("worker", self.address, "--nthreads", "1", kind, "--no-dashboard", "--memory-limit", "0")

    def end_scheduler(self) -> None:
        """Kill the scheduler."""
        self._processes[0].kill()

    def close(self) -> None:
        """Kill all processes of the cluster, also those that nannies started."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def dask_cluster(folder: Path, workers: int = 2, *, nanny: bool = False, **settings: str) -> Iterator[DaskCluster]:
    """Yield a cluster; `settings`: environment variables of its processes."""
    cluster = DaskCluster(folder, **settings)
    try:
        for _ in range(workers):
            cluster.worker(nanny=nanny)
        yield cluster
    finally:
        cluster.close()

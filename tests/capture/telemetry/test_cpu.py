"""What psutil tells of this process, its children and the machine."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from gpudiag.capture.telemetry.readings import SECOND, CpuSource


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.slow
def test_a_busy_thread_is_about_one_core_and_a_sleeping_one_none() -> None:
    source = CpuSource(psutil)
    assert "cpu_util_pct" not in source.sample(0)  # a rate needs two readings
    begun = time.perf_counter()
    spin(0.2)
    busy, share = source.sample(10 * SECOND)["cpu_util_pct"], 0.2 / (time.perf_counter() - begun)
    assert abs(busy - 100 * share) < 25
    time.sleep(0.2)
    assert source.sample(20 * SECOND)["cpu_util_pct"] < 50


def test_memory_and_time_of_children_count() -> None:
    code = "x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); print('up', flush=True); [0 for _ in iter(int, 1)]"
    source = CpuSource(psutil)
    before = source.sample(0)["rss_bytes"]
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.read(2) == b"up"
        source.sample(10**6 * SECOND)  # however long the first scan took and put the next one off
        assert source._children_pct > 0  # what it computed since it began: a worker may live for less than the time between two scans
        busy, began = psutil.Process(child.pid).cpu_times(), time.perf_counter()
        time.sleep(0.4)
        spun = sum(psutil.Process(child.pid).cpu_times()[:2]) - sum(busy[:2])
        share = spun / (time.perf_counter() - began)  # of a core: less than one where other programs run
        found = source.sample(2 * 10**6 * SECOND)
    finally:
        child.kill()
        child.communicate()
    assert found["rss_bytes"] - before > 180 << 20
    assert found["cpu_util_pct"] > 50 * share > 0  # it spins, and this process sleeps
    assert "rss_bytes" in source.notes()


@pytest.mark.slow
def test_the_threads_that_compute_in_a_child_are_counted() -> None:
    code = (
        "import hashlib, threading; data = bytes(1 << 24)\n"
        "def work():\n    while True: hashlib.sha256(data)\n"  # without the lock of the interpreter
        "[threading.Thread(target=work).start() for _ in range(2)]; threading.Event().wait()"
    )
    source = CpuSource(psutil)
    earlier = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 5: pass\ntime.sleep(600)"])
    child = None
    try:
        while sum(psutil.Process(earlier.pid).cpu_times()[:2]) < 4.5:  # the system counts in ticks
            time.sleep(0.1)
        source.sample(0)  # what computed before the last look does not hide who computes now
        child = subprocess.Popen([sys.executable, "-c", code])
        end = time.monotonic() + 60
        while time.monotonic() < end:  # both have had their turns, also where the cores are busy
            spent = sorted(thread.user_time + thread.system_time for thread in psutil.Process(child.pid).threads())
            if len(spent) == 3 and spent[1] >= max(1.0, 0.5 * spent[2]):
                break
            time.sleep(0.1)
        assert source.sample(10**6 * SECOND)["child_threads"] == 2  # the third thread waits
    finally:
        for process in filter(None, (earlier, child)):
            process.kill()
            process.communicate()


def test_the_users_own_cpu_percent_is_not_disturbed(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def forbidden(*_: object, **__: object) -> float:
        raise AssertionError("psutil keeps the time of the last call for the whole process")

    monkeypatch.setattr(psutil, "cpu_percent", forbidden)
    monkeypatch.setattr(psutil.Process, "cpu_percent", forbidden)
    source = CpuSource(psutil)
    source.sample(0)
    time.sleep(0.05)
    assert 0 <= source.sample(10 * SECOND)["system_cpu_util_pct"] <= 100
    assert "system_cpu_util_pct" not in source.missing()


def test_a_machine_that_does_not_tell_its_frequency_says_so(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    source = CpuSource(psutil)
    assert "cpu_freq_mhz" not in source.sample(0)
    assert source.missing()["cpu_freq_mhz"] == "the system does not tell its frequency"
    assert source.limits()["host_memory_bytes"] > 0

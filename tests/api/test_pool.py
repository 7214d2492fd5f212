"""Work on many ranks in processes of this machine: how many, what comes back, and what becomes of one that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpudiag.workers import UnreadRank, choose_process_count, run_in_processes

MB, GB = 1 << 20, 1 << 30


def answers(name: str, requests: list[bytes], processes: int = 2) -> list[bytes | UnreadRank]:
    found = dict(run_in_processes(f"rankwork:{name}", requests, processes))
    return [found[place] for place in range(len(requests))]


@pytest.mark.parametrize(
    ("sizes", "cores", "spare", "expected"),
    [
        ([50_000] * 4, 64, 64 * GB, 0),  # 4 x 0.4 s: sooner done here than processes have begun
        ([50_000] * 512, 16, 64 * GB, 16),
        ([50 * MB] * 3, 16, 64 * GB, 3),
        ([50 * MB] * 64, 16, 2 * GB, 3),  # each takes 200 MB + half of 15 x 50 MB
        ([50 * MB] * 64, 16, GB // 4, 0),  # not even two fit
        ([50 * MB] * 64, 1, 64 * GB, 0),
    ],
)
def test_how_many_processes(sizes: list[int], cores: int, spare: int, expected: int) -> None:
    assert choose_process_count(sizes, cores=cores, spare=spare) == expected


def test_each_request_gets_its_own_answer() -> None:
    requests = [b"%d" % number for number in range(20)]
    assert answers("twice", requests) == [request * 2 for request in requests]
    assert [found for _, found in run_in_processes("rankwork:twice", requests, 0)] == [request * 2 for request in requests]


def test_a_large_answer_and_an_empty_one() -> None:
    assert answers("twice", [b"x" * 3_000_000, b""]) == [b"x" * 6_000_000, b""]


def test_what_a_library_prints_stands_not_among_the_answers() -> None:
    assert answers("prints", [b"one", b"two"], 1) == [b"one", b"two"]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failure_costs_its_own_rank_alone(processes: int) -> None:
    requests = [b"first", b"input", b"bug", b"last"]
    alone = [answer for _, answer in run_in_processes("rankwork:fails", requests, 0)]
    found = answers("fails", requests, processes) if processes else alone
    assert (found[0], found[3]) == (b"first", b"last")
    assert found[1] == UnreadRank("t.json is empty", "record again")
    assert isinstance(found[2], UnreadRank)
    assert found[2].bug
    assert "KeyError" in found[2].message


def test_a_process_that_was_killed_is_replaced_and_its_rank_tried_again(tmp_path: Path) -> None:
    memory = tmp_path / "died"
    assert answers("dies_once", [b"", str(memory).encode(), b"", b""]) == [b"alive"] * 4
    assert memory.exists()


def test_a_rank_that_kills_its_process_twice_is_given_up_and_the_others_are_not() -> None:
    found = answers("dies", [b"1", b"kill", b"2", b"leave", b"3"])
    assert [found[place] for place in (0, 2, 4)] == [b"1", b"2", b"3"]
    assert isinstance(found[1], UnreadRank)
    assert isinstance(found[3], UnreadRank)
    assert "was killed by signal 9 (out of memory?), and again" in found[1].message
    assert "ended with exit code 7: no more room" in found[3].message


def test_a_process_has_one_thread_for_its_core() -> None:
    assert answers("threads_of_polars", [b""], 1) == [b"1"]


def test_no_process_is_left_when_the_answers_are_no_longer_wanted(tmp_path: Path) -> None:
    found = run_in_processes("rankwork:waits", [str(tmp_path).encode()] * 4, 2)
    timer = time.monotonic()
    (tmp_path / "go").touch()
    first = int(next(found)[1])
    (tmp_path / "go").unlink()
    while len(list(tmp_path.glob("pid-*"))) < 2:
        assert time.monotonic() - timer < 30
        time.sleep(0.05)
    found.close()
    pids = {first, *(int(path.name[4:]) for path in tmp_path.glob("pid-*"))}
    assert not [pid for pid in pids if alive(pid)]


PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
from gpudiag.workers import run_in_processes
print([len(found) for _, found in run_in_processes("rankwork:waits", [sys.argv[1].encode()] * 2, 2)])  # no `if __name__ == "__main__"`
"""


def begun(folder: Path) -> tuple[subprocess.Popen[bytes], set[int]]:
    """Start a program with two processes that wait; return it and their numbers."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    waiting = folder / "waiting"
    waiting.mkdir()
    path = os.pathsep.join(folder for folder in sys.path if folder)
    program = subprocess.Popen(
        [sys.executable, str(script), str(waiting)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(found := list(waiting.glob("pid-*"))) < 2:
        assert time.monotonic() < deadline, program.stderr
        time.sleep(0.05)
    return program, {int(path.name[4:]) for path in found}


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    program, _ = begun(tmp_path)
    (tmp_path / "waiting" / "go").touch()
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, b"")
    assert out.startswith(b"[")  # once: no process ran the script again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_end_with_the_one_that_asked(tmp_path: Path, number: signal.Signals) -> None:
    program, pids = begun(tmp_path)
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as a terminal does: to all of them
    else:
        os.kill(program.pid, number)
    _, err = program.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]
    assert err.count(b"Traceback") <= 1  # the program's own KeyboardInterrupt; none of the processes

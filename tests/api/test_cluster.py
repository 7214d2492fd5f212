"""Ranks read by the workers of a dask.distributed cluster: a real scheduler and real workers, some of which are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from daskcluster import DaskCluster, dask_cluster

from gpudiag import api
from gpudiag import cluster as module
from gpudiag import ranks as jobs
from gpudiag.cluster import Cluster
from gpudiag.errors import InputError, MissingDependencyError, UsageError
from gpudiag.job.rank_summary import decode_summary
from gpudiag.recordings.paths import RankInput, find_ranks
from gpudiag.workers import UnreadRank

pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install 'gpudiag[cluster]'")


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    with dask_cluster(tmp_path_factory.mktemp("dask")) as found:
        yield found


def ranks_in(folder: Path, count: int) -> list[RankInput]:
    return [RankInput(rank, str(folder)) for rank in range(count)]


def asked(folder: Path, count: int) -> list[bytes]:
    return [str(folder).encode()] * count


def pids(folder: Path, count: int) -> list[int]:
    """Return the numbers of the processes that wait in `folder`, when there are `count`."""
    deadline = time.monotonic() + 60
    while len(found := sorted(folder.glob("pid-*"))) < count:
        assert time.monotonic() < deadline, "no worker began"
        time.sleep(0.05)
    return [int(path.name[4:]) for path in found]


# -- without a cluster --------------------------------------------------------------------------------------------------------


def test_what_is_no_address(tmp_path: Path) -> None:
    for text in ("localhost", str(tmp_path / "missing.json"), str(tmp_path)):
        with pytest.raises(UsageError, match="neither an address nor a scheduler file"):
            Cluster(text)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with pytest.raises(InputError, match="no dask scheduler answers") as failed:
        Cluster("tcp://127.0.0.1:9")
    assert len(str(failed.value).splitlines()) == 1


def test_dask_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gpudiag\[cluster\]'"):
        Cluster("tcp://127.0.0.1:9")


def test_what_workers_tell_of_their_gpudiag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_version", lambda _: "1.2.0")
    told: dict[str, str | Exception] = {"a": "1.2.0"}
    cluster = object.__new__(Cluster)
    cluster._address = "tcp://here"
    cluster._client = SimpleNamespace(wait_for_workers=lambda *_, **__: None, run=lambda *_, **__: told)
    cluster._check()
    told |= {"b": "1.1.0", "c": ModuleNotFoundError("No module named 'gpudiag'"), "d": OSError("libpolars.so")}
    with pytest.raises(InputError) as found:
        cluster._check()
    assert "gpudiag 1.1.0 on b; no gpudiag that could do the work (No module named 'gpudiag') on c" in found.value.message
    assert "gpudiag does not start (OSError) on d" in found.value.message


# -- with one -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_summaries_are_those_made_here_and_small(dask: DaskCluster, traces: Path) -> None:
    recording = find_ranks([str(traces / "v100_dlrm_train_8ranks")])
    requests = [msgspec.json.encode(item) for item in recording.ranks[:3]]
    with Cluster(dask.address) as cluster:
        found = dict(cluster.answers(jobs.SUMMARISE, recording.ranks[:3], requests))
    here = dict(jobs.map_on_this_machine(jobs.SUMMARISE, recording.ranks[:3], requests))
    for place in range(3):
        there, own = found[place], here[place]
        assert isinstance(there, bytes)
        assert isinstance(own, bytes)
        assert len(there) < recording.ranks[place].size / 2  # and the trace is 15 times as large uncompressed
        assert (decode_summary(there).rank, decode_summary(there).wall_ns) == (place, decode_summary(own).wall_ns)
        assert decode_summary(there).messages.equals(decode_summary(own).messages)


@pytest.mark.slow
def test_the_report_made_by_a_cluster_is_that_made_here(dask: DaskCluster, traces: Path) -> None:
    paths = [traces / "v100_dlrm_train_8ranks" / f"rank{rank}.json.gz" for rank in (0, 3)]
    said: list[str] = []
    there = api.diagnose(paths, scheduler=dask.address, planned_steps=9, progress=said.append)
    assert there.json() == api.diagnose(paths, planned_steps=9).json()
    assert said[:4] == ["looking for workers", "ranks 0/2", "ranks 1/2", "ranks 2/2"]
    assert api.diagnose(paths, rank=3, scheduler=str(dask.file)).json() == api.diagnose(paths, rank=3).json()


@pytest.mark.slow
def test_workers_read_urls_themselves(dask: DaskCluster, traces: Path) -> None:
    folder = traces / "v100_dlrm_train_8ranks"
    there = api.diagnose(f"{folder.as_uri()}/rank[67].json.gz", scheduler=dask.address).data
    here = api.diagnose(str(folder / "rank[67].json.gz")).data
    assert there.job is not None
    assert here.job is not None
    assert (there.job.wall, there.breakdown) == (here.job.wall, here.breakdown)
    with pytest.raises(InputError, match=r"rank0\.json cannot be opened: FileNotFoundError"):
        api.diagnose([f"{folder.as_uri()}/rank0.json", f"{folder.as_uri()}/rank1.json"], scheduler=dask.address)


@pytest.mark.slow
def test_the_scheduler_file_and_a_path_that_workers_do_not_see(dask: DaskCluster, tmp_path: Path) -> None:
    with Cluster(str(dask.file)) as cluster:
        ((_, found),) = cluster.answers(jobs.SUMMARISE, ranks_in(tmp_path / "elsewhere", 1), [b""])
    assert isinstance(found, UnreadRank)
    assert "elsewhere: not on worker tcp://127.0.0.1" in found.message


@pytest.mark.slow
def test_what_fails_on_a_worker_costs_its_own_rank_alone(dask: DaskCluster, tmp_path: Path) -> None:
    with Cluster(dask.address) as cluster:
        found = dict(cluster.answers("rankwork:fails", ranks_in(tmp_path, 3), [b"fine", b"input", b"bug"]))
        url = [RankInput(0, "http://127.0.0.1:9/rank0.json")]
        ((_, remote),) = cluster.answers("rankwork:fails", url, [b"input"])  # dask tries it three times
    assert found[0] == b"fine"
    assert found[1] == remote == UnreadRank("t.json is empty", "record again")
    assert isinstance(found[2], UnreadRank)
    assert found[2].bug


@pytest.mark.slow
def test_another_version_is_refused_in_one_line(dask: DaskCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_version", lambda _: "99.0")
    with pytest.raises(InputError, match=r"gpudiag .* on tcp://127.0.0.1.* \(install gpudiag 99.0") as failed:
        Cluster(dask.address)
    assert len(str(failed.value).splitlines()) == 1


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with dask_cluster(tmp_path) as dask, Cluster(dask.address) as cluster:
        found = cluster.answers("rankwork:waits", ranks_in(tmp_path / "work", 4), asked(tmp_path / "work", 4))
        answers: dict[int, object] = {}
        reading = threading.Thread(target=lambda: answers.update(found))
        reading.start()
        killed, left = pids(tmp_path / "work", 2)
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "work" / "go").touch()
        reading.join(60)
    assert answers == dict.fromkeys(range(4), str(left).encode())


@pytest.mark.slow
def test_a_rank_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    work, deadly = tmp_path / "work", tmp_path / "worse"
    work.mkdir()
    deadly.mkdir()
    (work / "go").touch()
    (deadly / "deadly").touch()  # the ranks that wait for the same worker are not to blame
    settings = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    with dask_cluster(tmp_path, workers=1, nanny=True, **settings) as dask, Cluster(dask.address) as cluster:
        ranks = [*ranks_in(deadly, 1), RankInput(1, str(work))]
        found = dict(cluster.answers("rankwork:waits_or_dies", ranks, [*asked(deadly, 1), *asked(work, 1)]))
    assert isinstance(found[0], UnreadRank)
    assert found[0].message.startswith("2 workers died while they read it, the last was tcp://127.0.0.1")
    assert isinstance(found[1], bytes)


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["workers", "scheduler"])
def test_nobody_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    monkeypatch.setattr(module, "WORKERLESS_S", 1.0)
    (tmp_path / "work").mkdir()
    with dask_cluster(tmp_path) as dask, Cluster(dask.address) as cluster:
        found = cluster.answers("rankwork:waits", ranks_in(tmp_path / "work", 2), asked(tmp_path / "work", 2))

        def end() -> None:
            numbers = pids(tmp_path / "work", 2)
            if ended == "scheduler":
                dask.end_scheduler()
            for number in numbers:
                os.kill(number, signal.SIGKILL)

        ending = threading.Thread(target=end)
        ending.start()
        what = "no worker is left, 2 ranks are not read" if ended == "workers" else "the scheduler went away"
        with pytest.raises(InputError, match=what):
            list(found)
        ending.join()


@pytest.mark.slow
def test_a_scheduler_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 2.0)
    with dask_cluster(tmp_path, workers=0) as dask, pytest.raises(InputError, match="the scheduler has no workers"):
        Cluster(dask.address)

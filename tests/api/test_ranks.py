"""Which ranks paths name: files, patterns, folders, bundles, URLs; and what is said where the names do not tell."""

from __future__ import annotations

import functools
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from noticewords import format_notices

from gpudiag.errors import InputError, UsageError
from gpudiag.inputs import resolve_input, select_rank
from gpudiag.model.bundle import Manifest, Window
from gpudiag.model.report import Source
from gpudiag.recordings.paths import Recording, find_ranks, format_ranks


def trace(path: Path, rank: int | None = None) -> Path:
    """Write a trace of no event that says which rank it is of."""
    document: dict[str, Any] = {"schemaVersion": 1} | ({} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 8}})
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document | {"traceEvents": []}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def found(recording: Recording) -> dict[int, str]:
    return {item.rank: item.path.replace("\\", "/").rsplit("/", 1)[-1] for item in recording.ranks}


# -- paths --------------------------------------------------------------------------------------------------------------------


def test_a_folder_a_pattern_and_several_files_are_the_same_job(tmp_path: Path) -> None:
    files = [str(trace(tmp_path / f"r{rank}.json.gz")) for rank in (0, 2, 10)]
    expected = {0: "r0.json.gz", 2: "r2.json.gz", 10: "r10.json.gz"}
    for paths in ([str(tmp_path)], [str(tmp_path / "*.json.gz")], files[::-1], [str(tmp_path / "**" / "r*")]):
        recording = find_ranks(paths)
        assert found(recording) == expected
        assert (recording.source.kind, recording.source.ranks, format_notices(recording.notices)) == ("folder", (0, 2, 10), ())
        assert all(item.size > 0 and Path(item.path).is_absolute() for item in recording.ranks)
    assert find_ranks(files).source.path == f"{files[0]} and 2 more"


def test_one_trace_is_no_job(tmp_path: Path) -> None:
    path = str(trace(tmp_path / "rank3.json"))
    recording = find_ranks([path])
    assert recording.source == Source(path, "trace")
    with pytest.raises(UsageError, match="--rank"):
        recording.one(3)
    assert resolve_input(path, None).source == Source(path, "trace")
    assert find_ranks([str(tmp_path)]).source == Source(str(tmp_path), "folder", (3,))


def test_a_name_with_brackets_is_a_name_where_such_a_file_exists(tmp_path: Path) -> None:
    path = str(trace(tmp_path / "run[1].json"))
    assert found(find_ranks([path])) == {0: "run[1].json"}


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nor does it match"):
        find_ranks([str(tmp_path / "*.json")])
    with pytest.raises(InputError, match="no trace in this folder"):
        find_ranks([str(tmp_path)])
    one = str(trace(tmp_path / "rank0.json"))
    with pytest.raises(InputError, match=r"rank1\.json does not exist"):
        find_ranks([one, str(tmp_path / "rank1.json")])


def test_the_rank_may_stand_in_the_name_of_a_folder(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path / f"rank{rank}" / "trace.json")
    recording = find_ranks([str(tmp_path / "rank*" / "*.json")])
    assert [(item.rank, Path(item.path).parent.name) for item in recording.ranks] == [(0, "rank0"), (1, "rank1")]


# -- names that do not tell, or tell too much ---------------------------------------------------------------------------------


def test_traces_tell_their_rank_where_their_names_do_not(tmp_path: Path) -> None:
    names = ["node1_500.1712345678901234567.json", "node1_501.1712345678901234999.json", "node2_7.1712345678901230000.json"]
    for name, rank in zip(names, (4, 2, 0), strict=True):
        trace(tmp_path / name, rank)
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: names[2], 2: names[1], 4: names[0]}
    assert format_notices(recording.notices) == ()


def test_neither_tells(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        trace(tmp_path / name)
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: "a.json", 1: "b.json"}
    assert "numbered in the order of their names" in format_notices(recording.notices)[0]


def test_local_ranks_of_two_machines_are_told_apart_by_the_traces(tmp_path: Path) -> None:
    for node in (0, 1):
        for local in (0, 1):
            trace(tmp_path / f"node{node}_rank{local}.json", node * 2 + local)
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: "node0_rank0.json", 1: "node0_rank1.json", 2: "node1_rank0.json", 3: "node1_rank1.json"}


def test_steps_of_one_rank_are_no_ranks(tmp_path: Path) -> None:
    for step in (10, 20):
        trace(tmp_path / f"step_{step}.json", 0)
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: "step_10.json"}
    assert format_notices(recording.notices) == ("rank 0 is there more than once: step_10.json is read, step_20.json is not",)


def test_two_files_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        for window in (0, 2):
            trace(tmp_path / f"rank{rank}-w{window}.json", rank)
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: "rank0-w0.json", 1: "rank1-w0.json"}
    assert format_notices(recording.notices)[0].startswith(
        "ranks 0, 1 are there more than once: rank0-w0.json is read, rank0-w2.json is not"
    )


def test_what_has_no_rank_among_files_that_have_is_left_out(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path / f"rank{rank}.json")
    trace(tmp_path / "report.json")
    recording = find_ranks([str(tmp_path)])
    assert found(recording) == {0: "rank0.json", 1: "rank1.json"}
    assert format_notices(recording.notices) == ("left out, their names tell no rank: report.json",)


def test_many_are_not_named_one_by_one() -> None:
    assert format_ranks(range(40)).endswith("15 and 24 more")
    assert (format_ranks([]), format_ranks([3])) == ("", "rank 3")


# -- bundles ------------------------------------------------------------------------------------------------------------------


def bundle(folder: Path, windows: dict[int, dict[int, int]], planned: int = 6) -> Path:
    """Write a bundle by hand: rank -> window -> its steps; window 1 is the one with stacks."""
    for rank, kept in windows.items():
        told = []
        for index, steps in kept.items():
            name = f"trace/rank{rank}-w{index}.json.gz"
            trace(folder / name, rank)
            kind = "sites" if index == 1 else "timing"
            told.append(Window(rank, index, kind, name, 0, steps, True, index == 1, planned=planned))  # type: ignore[arg-type]
        manifest = Manifest(finished=True, windows=tuple(told), steps=20, rank=rank, world_size=len(windows))
        name = "manifest.json" if rank == 0 else f"manifest-rank{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(msgspec.json.encode(manifest))
    return folder


@pytest.mark.parametrize(
    ("windows", "index"),
    [
        ({0: {0: 6, 1: 2, 2: 6}, 1: {0: 6, 1: 2, 2: 6}}, 0),
        ({0: {0: 6, 2: 6}, 1: {0: 3, 2: 6}, 2: {0: 4, 2: 6}}, 2),  # window 0 was cut short on two ranks of three
        ({0: {0: 3}, 1: {0: 4}}, 0),  # no window is complete
        ({0: {1: 2}, 1: {1: 2}}, 1),  # only that with stacks
    ],
)
def test_the_same_window_of_all_ranks(tmp_path: Path, windows: dict[int, dict[int, int]], index: int) -> None:
    recording = find_ranks([str(bundle(tmp_path / "b", windows))])
    assert {item.window for item in recording.ranks} == {index}
    assert (recording.source.kind, recording.numbers, recording.unread) == ("bundle", tuple(windows), {})


def test_a_rank_without_that_window_is_said_and_can_be_read_alone(tmp_path: Path) -> None:
    path = str(bundle(tmp_path / "b", {0: {0: 6}, 1: {0: 6}, 2: {2: 6}, 3: {}}))
    recording = find_ranks([path])
    assert [item.rank for item in recording.ranks] == [0, 1]
    assert recording.unread == {
        2: "window 0, which is read of the other ranks, was not recorded", 3: "window 0, which is read of the other ranks, was not recorded"
    }  # fmt: skip
    assert recording.source.ranks == (0, 1, 2, 3)
    assert Path(select_rank(recording, 2).trace).name == "rank2-w2.json.gz"
    with pytest.raises(InputError, match="no window was recorded"):
        select_rank(recording, 3)


def test_a_window_that_is_asked_for(tmp_path: Path) -> None:
    path = str(bundle(tmp_path / "b", {0: {0: 6, 2: 6}, 1: {0: 6}}))
    assert {item.rank: item.window for item in find_ranks([path], 2).ranks} == {0: 2}
    with pytest.raises(InputError, match="no window 7"):
        find_ranks([path], 7)
    with pytest.raises(UsageError, match="--window"):
        find_ranks([str(trace(tmp_path / "t.json"))], 0)


def test_bundles_of_two_machines_are_one_job(tmp_path: Path) -> None:
    first = bundle(tmp_path / "a", {0: {0: 6}, 1: {0: 6}})
    second = bundle(tmp_path / "b", {2: {0: 6}, 3: {0: 6}})
    recording = find_ranks([str(first), str(second)])
    assert {item.rank: Path(item.path).name for item in recording.ranks} == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert recording.source == Source(f"{first} and 1 more", "bundle", (0, 1, 2, 3))


def test_a_manifest_that_cannot_be_read_costs_its_rank(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", {0: {0: 6}, 1: {0: 6}, 2: {0: 6}})
    (path / "manifest-rank1.json").write_text("{")
    recording = find_ranks([str(path)])
    assert [item.rank for item in recording.ranks] == [0, 2]
    assert "not the manifest of a bundle" in recording.unread[1]


# -- URLs ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    """Yield a URL in memory with three ranks and a text below it."""
    system = fsspec.filesystem("memory")
    for rank in range(3):
        system.pipe(f"/scale/run/rank{rank}.json", b'{"traceEvents": []}')
    system.pipe("/scale/run/readme.md", b"text")
    yield "memory://scale/run"
    system.rm("/scale", recursive=True)


def test_urls_of_a_folder_a_pattern_and_files(memory: str) -> None:
    expected = {rank: f"rank{rank}.json" for rank in range(3)}
    for paths in ([memory], [f"{memory}/"], [f"{memory}/rank*.json"], [f"{memory}/rank{rank}.json" for rank in range(3)]):
        recording = find_ranks(paths)
        assert found(recording) == expected
        assert all(fsspec.open(item.path).open().read() for item in recording.ranks)
    assert [item.size for item in find_ranks([memory]).ranks] == [19] * 3
    assert find_ranks([f"{memory}/rank1.json"]).source.kind == "trace"
    with pytest.raises(InputError, match="no trace matches this pattern"):
        find_ranks([f"{memory}/*.csv"])


def test_file_urls(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path / f"rank{rank}.json.gz")
    recording = find_ranks([f"{tmp_path.as_uri()}/*.gz"])
    assert found(recording) == {0: "rank0.json.gz", 1: "rank1.json.gz"}
    assert all("://" in item.path for item in recording.ranks)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def test_a_folder_of_a_web_server(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http by aiohttp")
    for rank in (0, 1, 2):
        trace(tmp_path / "run" / f"worker{rank}.json.gz")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/run/"
            for path in (url, f"{url}*.json.gz"):
                assert found(find_ranks([path])) == {rank: f"worker{rank}.json.gz" for rank in (0, 1, 2)}
            with pytest.raises(InputError, match="no trace in this folder"):
                find_ranks([f"http://127.0.0.1:{server.server_port}/"])
        finally:
            server.shutdown()


def test_a_bundle_behind_a_url_says_how_to_read_it(memory: str) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/scale/bundle/manifest.json", b"{}")
    system.pipe("/scale/bundle/trace/rank0-w0.json.gz", b"")
    with pytest.raises(InputError, match=r"is a bundle.*memory://scale/bundle/trace"):
        find_ranks(["memory://scale/bundle"])
    assert found(find_ranks(["memory://scale/bundle/trace"])) == {0: "rank0-w0.json.gz"}


def test_a_file_system_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cannot be listed: \w+" if find_spec("aiohttp") else "needs a package that is not installed"):
        find_ranks(["http://127.0.0.1:9/run/"])
    with pytest.raises(InputError, match=r"not installed|cannot be listed"):
        find_ranks(["nosuchthing://run/"])

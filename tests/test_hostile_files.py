"""Files that are none, that grow into gigabytes, or lead elsewhere: no command waits, fills the memory or overwrites what it must not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzz.documents import gpu_training
from test_hostile import RECORDED, Result, Run, bundle

from gpudiag.cli import main
from gpudiag.trace import kineto
from gpudiag.trace.decompression import watch_reading, zstd

WAITING_S = 120
"""A command that waits for the writer of a pipe waits for ever; none of these takes more than some seconds."""

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("the command waits for something")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WAITING_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def gpudiag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["gpudiag", *map(str, arguments)])
        code = main()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.json")
    return tmp_path / "pipe.json"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "trace.json").write_bytes(RECORDED)
    return tmp_path / "trace.json"


# -- pipes, sockets and devices


def test_a_pipe_in_place_of_a_file_is_refused(gpudiag: Run, pipe: Path, trace: Path, tmp_path: Path) -> None:
    for arguments in (
        ("report", pipe), ("ops", pipe), ("memory", pipe), ("compare", pipe, trace), ("check", trace, "--budget", pipe),
        ("check", trace, "--baseline", pipe), ("run", "--recipe", pipe, trace), ("report", "/dev/zero"),
    ):  # fmt: skip
        gpudiag(*arguments).refuses("no file")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(tmp_path)  # names of sockets are short
        listening.bind("socket.json")
        gpudiag("report", tmp_path / "socket.json").refuses("cannot be opened")


def test_pipes_in_a_bundle_cost_what_they_stand_for(gpudiag: Run, tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    pipes = ("steps/rank0/000000.json", "experiments/1.json", "inductor/rank0.json", "memory/rank0-owners.json", "manifest-rank1.json")
    for name in pipes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)
    result = gpudiag("report", folder)
    assert result.code == 0, result.err
    assert "000000.json could not be read" in " ".join(result.out.split())


def test_a_pipe_among_the_ranks_is_none_of_them(gpudiag: Run, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_bytes(RECORDED)
    os.mkfifo(tmp_path / "rank2.json")
    gpudiag("report", tmp_path, "--rank", 2).refuses("no rank 2", "ranks 0, 1")


# -- links


def test_links_in_a_bundle_tell_nothing_of_where_they_lead(gpudiag: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0:hidden words")
    folder = bundle(tmp_path / "bundle")
    for name in ("steps/rank0/000000.json", "experiments/1.json", "trace/rank0-w1.json.gz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(secret)
    (folder / "telemetry").symlink_to("telemetry")
    result = gpudiag("report", folder)
    assert result.code == 0, result.err
    assert "hidden" not in result.out + result.err
    (folder / "manifest.json").unlink()
    for target in (secret, "manifest.json", "/dev/zero"):
        (folder / "manifest.json").symlink_to(target)
        result = gpudiag("report", folder)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "hidden" not in result.err
        (folder / "manifest.json").unlink()


def test_names_in_a_manifest_lead_nowhere(gpudiag: Run, tmp_path: Path, trace: Path) -> None:
    """Traces are found by listing their folder, whatever file the manifest names."""
    for name in ("../../trace.json", str(trace), "trace/\0", "C:\\trace.json"):
        window = {
            "rank": 0,
            "index": 0,
            "kind": "timing",
            "file": name,
            "first_step": 7,
            "steps": 4,
            "record_shapes": True,
            "with_stack": False,
        }
        gpudiag("report", bundle(tmp_path / "bundle", None, windows=[window])).refuses("no window was recorded")
        shutil.rmtree(tmp_path / "bundle")


def test_a_report_takes_the_place_of_a_file_only(gpudiag: Run, trace: Path, pipe: Path) -> None:
    gpudiag("report", trace, "-o", pipe).refuses("cannot write", "a folder, pipe, socket or device stands there")
    assert pipe.is_fifo()


# -- files that change while they are read


def _grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(path.read_bytes()[:1_000_000])


def _cut(path: Path) -> None:
    os.truncate(path, 5_000_000)


def _garbled(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5_000_000)
        file.write(bytes(range(256)) * 1000)


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"PNG" * 1000)
    other.replace(path)


@pytest.mark.parametrize(("change", "loses"), [(_grown, False), (_cut, True), (_garbled, True), (_replaced, False), (Path.unlink, False)])
def test_a_trace_that_changes_while_it_is_read_is_read_as_far_as_it_goes(
    tmp_path: Path, change: Callable[[Path], None], loses: bool
) -> None:  # fmt: skip
    """The change comes when the first of four blocks has been read."""
    path = tmp_path / "trace.json"
    document = gpu_training()
    padding = {"ph": "M", "args": {"a": "x" * 900}}
    path.write_text(json.dumps(document | {"traceEvents": [*document["traceEvents"], *([padding] * 8_000)]}))
    changes = [change]
    with watch_reading(lambda _: changes.pop()(path) if changes else None):
        trace = kineto.read_kineto(path)
    assert not changes
    assert trace.ops.height > 0
    assert (trace.meta.truncated or trace.meta.dropped != {}) is loses


# -- names


@pytest.mark.parametrize("name", ["n\u00e4me\n\x1b[31m\u202e q'\"`$(x)<i>", "-o" + "w" * 240])
def test_odd_names_of_files_are_only_names(gpudiag: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    path.write_bytes(RECORDED)
    result = gpudiag("report", path, "-o", path.with_suffix(".md"), "-o", path.with_suffix(".html"))
    assert result.code == 0, result.err
    assert result.err.count("\n") == 2
    assert "\x1b" not in result.out + result.err + path.with_suffix(".md").read_text()
    assert "<i>" not in path.with_suffix(".html").read_text().replace("\\u003ci", "")


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 there")
def test_a_name_that_is_no_text_is_refused(gpudiag: Run, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/rank0\xff.json")
    Path(path).write_bytes(RECORDED)
    for arguments in (("report", path), ("ops", path), ("report", tmp_path)):
        gpudiag(*arguments).refuses("no valid UTF-8", "rename it")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xfe"))
    gpudiag("report", bundle(folder)).refuses("no valid UTF-8")


# -- bombs: a few kB that stand for gigabytes


def _packed(path: Path, head: bytes, unit: bytes, mebibytes: int) -> Path:
    """Write `head` and then `unit` again and again, until that is `mebibytes` of text."""
    packer = zstd.ZstdCompressor(level=1)
    piece = unit * ((1 << 20) // len(unit))
    path.write_bytes(packer.compress(head) + b"".join(packer.compress(piece) for _ in range(mebibytes)) + packer.flush())
    return path


BOMBS = {
    "zeros": (b"", b"\0", "not a JSON trace"),
    "a string": (b'{"a": "', b"x", "no complete JSON"),
    "white space": (b'{"traceEvents": ', b" ", "over 500 times its size"),
    "a name": (b'[{"ph": "X", "name": "', b"x", "an event of more than 64 MiB"),
    "a header": (b'{"deviceProperties": [', b'{"id": 1}, ', "a header value of more than 64 MiB"),
    "members": (b"{", b'"a":1,', "more than 100,000 top-level keys"),
    "no events": (b"[", b"{},", "are no events"),
    "events": (b"[", b'{"ph": "M", "args": {"a": "' + b"x" * 900 + b'"}},', "over 500 times its size"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("head", "unit", "words"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_given_up(gpudiag: Run, tmp_path: Path, head: bytes, unit: bytes, words: str) -> None:
    path = _packed(tmp_path / "trace.json.zst", head, unit, 600)
    assert path.stat().st_size < 400_000
    gpudiag("report", path).refuses(str(path), words)


def test_a_string_is_read_in_time_that_grows_with_it() -> None:
    """A header that is skipped may be long: each block of it is looked at once, not again with every block that follows."""
    from gpudiag.trace.events import EventDecoder
    from gpudiag.trace.json_framing import Document, HeaderValue

    text = json.dumps({"a": 'x\\"' * 100_000, **gpu_training(1), "record_shapes": "y\\" * 50_000}).encode()
    blocks = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    moved = 0

    class Counting(Document):
        def _more(self, wanted: int = 1) -> bool:
            nonlocal moved
            grown = super()._more(wanted)
            moved += len(self._data)
            return grown

    parts = list(Counting(iter(blocks), EventDecoder(), 1000).parts())
    values = {part.key: part.text for part in parts if isinstance(part, HeaderValue)}
    assert json.loads(values["record_shapes"]) == "y\\" * 50_000
    assert moved < 8 * len(text)


@pytest.mark.parametrize("rows", [3_000_000, 10**12])
def test_a_segment_that_promises_more_than_it_can_hold_is_left_out(gpudiag: Run, tmp_path: Path, rows: int) -> None:
    folder = bundle(tmp_path / "bundle")
    (folder / "steps" / "rank0").mkdir(parents=True)
    path = folder / "steps" / "rank0" / "000000.json"
    path.write_bytes(b'{"table":"step_records","rows":%d,"columns":{"step":[1],"start_unix_ns":[1],"wall_ns":[1]}}' % rows)
    result = gpudiag("report", folder)
    assert result.code == 0, result.err
    assert "000000.json could not be read" in " ".join(result.out.split())

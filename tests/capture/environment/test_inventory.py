"""What a recorded program brought along stands in the manifest; taking stock neither stops nor slows the loop."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import sample
from torch import nn
from torch.utils import checkpoint as checkpoint_module
from torch.utils.checkpoint import checkpoint

from gpudiag.bundle.reader import open_bundle
from gpudiag.bundle.writer import compress_trace
from gpudiag.capture.environment import inventory as module
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.hooks import Patches
from gpudiag.capture.recording import BackgroundWriter
from gpudiag.capture.session import Session
from gpudiag.capture.telemetry.sampler import Telemetry
from gpudiag.model.bundle import Code, Manifest, Program

COMMIT = Code("a" * 40, dirty=True)


@pytest.fixture(autouse=True)
def _known_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_code", lambda *_: COMMIT)


class Context:
    rank, world_size = 0, 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.patches = Patches()


def recorded(path: Path, loop: Any, **options: Any) -> Manifest:
    with Session(path, parts=[Inventory()], skip=1, warm=1, record=2, sites=0, **options) as prof:
        loop.epoch(prof.steps(loop.loader()))
    return open_bundle(prof.path).manifest


def test_a_bundle_holds_the_program(tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTED")
    manifest = recorded(tmp_path / "run", make_loop(batches=8))
    program = manifest.program
    assert program is not None
    assert program.code == COMMIT
    assert program.packages["torch"] == torch.__version__
    assert program.variables["OMP_NUM_THREADS"] == "3"
    assert program.wrappers is not None
    assert manifest.machine.cpu
    assert b"PLANTED" not in (tmp_path / "run" / "manifest.json").read_bytes()


def test_the_loader_and_the_optimizer_are_described_in_the_settings(tmp_path: Path, make_loop: type) -> None:
    settings = recorded(tmp_path / "run", make_loop(batches=8)).settings
    assert settings.loader is not None
    assert (settings.loader.sampler, settings.loader.dataset, settings.loader.drop_last) == ("RandomSampler", "map", False)
    assert [optimizer.implementation for optimizer in settings.optimizers] == ["for-loop"]  # fused=False: torch then takes the loop


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_heard_of(reentrant: bool) -> None:
    part, context = Inventory(), Context()
    originals = [getattr(checkpoint_module, name, None) for name in module._CHECKPOINT]
    part.start(context)  # type: ignore[arg-type]
    assert part.manifest()["program"].activation_checkpointing is None
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    context.patches.restore()
    assert part.manifest()["program"].activation_checkpointing is True
    assert x.grad is not None
    assert [getattr(checkpoint_module, name, None) for name in module._CHECKPOINT] == originals


def test_without_checkpointing_the_end_says_so() -> None:
    part, context = Inventory(), Context()
    part.start(context)  # type: ignore[arg-type]
    part.close()
    context.patches.restore()
    assert part.manifest()["program"].activation_checkpointing is False


def test_only_the_first_rank_asks_git() -> None:
    part, context = Inventory(), Context(rank=3)
    part.start(context)  # type: ignore[arg-type]
    part.close()
    context.patches.restore()
    assert part.manifest()["program"].code is None


@pytest.mark.slow
def test_a_git_that_hangs_delays_the_end_by_little_and_the_loop_by_nothing(
    tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "JOIN_S", 0.2)
    monkeypatch.setattr(module, "read_code", lambda *_: release.wait(60) and None)
    begun = time.monotonic()
    manifest = recorded(tmp_path / "run", make_loop(batches=8))
    assert time.monotonic() - begun < 30
    release.set()
    assert manifest.finished
    assert manifest.program is not None
    assert manifest.program.code is None


@pytest.mark.parametrize(
    "name", sample(["find_live_objects", "read_wrappers", "read_compiled", "read_packages", "read_code", "read_variables"])
)
def test_whatever_fails_the_losses_are_the_same(tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    plain, loop = make_loop(batches=8), make_loop(batches=8)
    torch.manual_seed(1)
    plain.epoch(plain.loader())
    monkeypatch.setattr(module, name, fail)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manifest = recorded(tmp_path / "run", loop)
    assert loop.losses == plain.losses
    assert manifest.finished
    assert sum("gpudiag" in str(item.message) for item in caught) <= 1


@pytest.mark.slow
def test_the_training_thread_gives_little_time_to_it() -> None:
    """With 2,000 modules and 4,000 tensors; 5 ms on an idle machine, here the fastest of several looks against ten times that."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2_000)))
    part, context = Inventory(), Context()
    times = []
    part.start(context)  # type: ignore[arg-type]
    for index in range(5):
        begun = time.perf_counter()
        part.window_ended(index, "timing")
        part.manifest()
        times.append(time.perf_counter() - begun)
    context.patches.restore()
    assert len(list(model.modules())) == 2_001
    assert min(times) < 0.05


def test_a_run_that_was_killed_says_what_is_not_known() -> None:
    part, context = Inventory(), Context()
    part.start(context)  # type: ignore[arg-type]
    program: Program = part.manifest()["program"]
    context.patches.restore()
    assert (program.wrappers, program.activation_checkpointing) == (None, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_the_thread_works_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "read_code", lambda *_: release.wait(30) and COMMIT)
    part, context = Inventory(), Context()
    part.start(context)  # type: ignore[arg-type]
    child = os.fork()
    if child == 0:
        os._exit(0 if part.manifest()["program"].code is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    release.set()
    part.close()
    context.patches.restore()
    assert part.manifest()["program"].code == COMMIT


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def child_ends(work: Callable[[], object], within_s: float = 20.0) -> bool:
    """Return whether a forked child does `work` and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@needs_fork
def test_a_worker_that_is_forked_meanwhile_can_use_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tempfile holds a lock of its own while it tries folders out; a child that finds it locked waits for ever."""
    parent, asked, real = os.getpid(), threading.Event(), module.read_code

    def slow() -> str:
        time.sleep(2.0 if os.getpid() == parent else 0)
        return str(tmp_path)

    def noted(*given: Any) -> Code | None:
        asked.set()
        return real(*given)

    monkeypatch.setattr(module, "read_code", noted)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", slow)
    part, context = Inventory(), Context()
    part.start(context)  # type: ignore[arg-type]
    asked.wait(10)
    time.sleep(0.2)
    ended = child_ends(tempfile.gettempdir, within_s=5)
    part.close()
    context.patches.restore()
    assert ended


def _as_a_worker() -> None:
    """Use what holds locks."""
    import colorsys  # noqa: F401 - nobody else has imported it
    import email.parser  # noqa: F401

    tempfile.TemporaryFile().close()
    subprocess.run(["true"], check=True)
    logging.getLogger("worker").warning("a line")


@pytest.mark.slow
@needs_fork
def test_children_forked_at_any_moment_are_free_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, background, stop = tmp_path / "trace", BackgroundWriter(), threading.Event()
    chance, sampler = random.Random(3), Telemetry(100)

    def inventory() -> None:
        while not stop.is_set():
            tempfile.tempdir = None  # as in a fresh process
            module.read_packages()
            module.read_code(Path(__file__).parent)

    def pack() -> int:
        trace.write_bytes(b"x" * 100_000)
        return compress_trace(trace, tmp_path / "trace.gz")

    monkeypatch.setattr(tempfile, "tempdir", None)
    thread = threading.Thread(target=inventory, daemon=True)
    thread.start()
    sampler.start(Context())  # type: ignore[arg-type]
    try:
        until, ended = time.monotonic() + 2.5, True
        while ended and time.monotonic() < until:
            background.submit(pack)
            time.sleep(chance.random() * 0.01)
            ended = child_ends(_as_a_worker)
    finally:
        stop.set()
        sampler.drop()
        thread.join(20)
        background.join(20)
    assert ended
    assert background.error is None


@pytest.mark.slow
def test_no_thread_imports(tmp_path: Path) -> None:
    """In a process of its own: here everything has been imported already."""
    program = """
import sys, threading
import torch
from gpudiag.capture.environment import process
from gpudiag.capture.standard_parts import make_standard_parts
from gpudiag.capture.session import Session
found = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread(): found.append(name)
sys.meta_path.insert(0, Spy())
process.KNOWN_PACKAGES["struct"] = "numpy"  # a module that does not tell its version
layer = torch.nn.Linear(2, 2)
with Session(sys.argv[1], parts=make_standard_parts(memory=True), skip=1, warm=1, record=1, sites=1) as prof:
    for _ in prof.steps(range(8)):
        layer(torch.ones(1, 2)).sum().backward()
assert prof.warnings == [], prof.warnings
assert found == [], found
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

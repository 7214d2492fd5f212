"""Memory of a real loop on the CPU, to the byte; and the allocator's history with a fake of torch.cuda."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from snapshots import training
from torch import nn

from gpudiag.bundle.reader import read_memory_files
from gpudiag.capture import memory as owners_module
from gpudiag.capture import memory as part_module
from gpudiag.capture.hooks import Patches
from gpudiag.capture.memory import MAX_ENTRIES, Memory, find_live_modules, find_owners, list_module_tensors, pack_snapshot
from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import make_standard_parts
from gpudiag.memory_report import memory
from gpudiag.model.memory import MemoryReport, Owners
from gpudiag.model.notices import NoticeCode
from gpudiag.trace.memory_snapshot import decode_snapshot

WIDE, DEEP, OUT, BATCH = 64, 128, 32, 16
PARAMETERS = 4 * (WIDE * DEEP + DEEP + DEEP * OUT + OUT)
STEPS_OF_ADAM = 4 * 4
"""One float32 for each of the four parameters."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, DEEP), nn.Linear(DEEP, OUT)
        self.register_buffer("scale", torch.ones(OUT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def train(folder: Path, *, backward: bool = True) -> Path:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batches = [torch.randn(BATCH, WIDE) for _ in range(22)]
    with Session(folder, parts=[Memory()]) as prof:
        for x in prof.steps(batches):
            loss = model(x).square().mean()
            if backward:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert prof.warnings == []
    return prof.path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is the only one: models that other tests left alive hold memory of this process too."""
    earlier = find_live_modules()
    left_alone = {id(module) for module in earlier}  # no id is used again while `earlier` lives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            owners_module, "find_live_modules", lambda: [module for module in find_live_modules() if id(module) not in left_alone]
        )
        return train(tmp_path_factory.mktemp("memory") / "run")


def test_a_model_that_is_not_trained_holds_memory_too(tmp_path: Path) -> None:
    other = nn.Linear(300, 7, bias=False)
    owners = read_memory_files(train(tmp_path / "run"), 0).owners
    assert owners is not None
    assert (other.weight.data_ptr(), 4 * 300 * 7) in [(owner.address, owner.bytes) for owner in owners.owners]


@pytest.mark.slow
def test_a_bundle_says_what_its_memory_was_for(trained: Path) -> None:
    """At the peak, in the optimizer: parameters, as much gradient, twice as much state and Adam's steps; one buffer; its temporaries."""
    found: MemoryReport = memory(str(trained)).memory
    kinds = found.by_category
    assert kinds["parameters"] == kinds["gradients"] == PARAMETERS
    assert kinds["optimizer_state"] == 2 * PARAMETERS + STEPS_OF_ADAM
    assert kinds["buffers"] == 4 * OUT
    assert sum(kinds.values()) == found.peak_bytes
    assert (found.device, found.peak_phase, found.provenance) == ("cpu", "optimizer", "owners")
    weight = 4 * WIDE * DEEP
    assert 2 * weight <= kinds["temporary"] <= 2 * weight + 64  # sqrt(v) and its quotient for the largest weight, and scalars
    assert kinds.get("unknown", 0) + kinds.get("activations", 0) <= 64  # scalars: the loss, which the loop's variable still holds


def test_activations_are_those_that_the_backward_pass_needs(trained: Path) -> None:
    """Kept for backward are tanh's result, which the second layer needs too, and what `* scale` and square() keep of the output."""
    rows = memory(str(trained)).memory
    assert rows.peak_step is not None
    from gpudiag.attribution.links import link_kernels
    from gpudiag.attribution.steps import find_steps
    from gpudiag.timeline.memory_blocks import build_lives, classify_uses, find_moments
    from gpudiag.trace import read_trace

    trace = read_trace(trained / "trace" / "rank0-w1.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=True)[0]
    blocks = build_lives(trace.allocations["bytes"].to_numpy(), trace.allocations["address"].to_numpy())
    kinds = classify_uses(trace, blocks, find_moments(trace, trace.allocations))
    kept = blocks.size[kinds == "activations"]
    assert {4 * BATCH * DEEP, 4 * BATCH * OUT} <= set(kept.tolist())


def test_a_report_shows_the_memory_beside_the_times(trained: Path) -> None:
    from gpudiag.api import diagnose

    report = diagnose(trained)
    assert report.data.memory is not None
    assert report.data.memory.by_category["parameters"] == PARAMETERS
    assert "Peak memory" in report.text()
    assert "## Peak memory" in report.markdown()
    assert 'id="memory-title"' in report.html()


def test_without_the_option_no_memory_is_recorded(tmp_path: Path, loop: Any) -> None:
    with Session(tmp_path / "run", parts=make_standard_parts()) as prof:
        loop.epoch(prof.steps(loop.loader()))
    assert read_memory_files(prof.path, 0).owners is None
    assert not (prof.path / "memory").exists()


def test_the_losses_are_those_of_the_plain_loop(tmp_path: Path, make_loop: Any) -> None:
    plain = make_loop()
    plain.epoch(plain.loader())
    recorded = make_loop()  # seeds anew
    with Session(tmp_path / "run", parts=[Memory()]) as prof:
        recorded.epoch(prof.steps(recorded.loader()))
    assert read_memory_files(prof.path, 0).owners is not None
    assert recorded.losses == plain.losses


def test_no_site_window_is_said(tmp_path: Path, loop: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Session(tmp_path / "run", sites=0, parts=[Memory()]) as prof:
            loop.epoch(prof.steps(loop.loader()))
    assert any("no memory was recorded" in warning for warning in prof.warnings)


# -- owners -------------------------------------------------------------------------------------------------------------------


def test_owners_have_the_names_of_the_model() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    mine = {owner.address: owner for owner in find_owners([optimizer])}
    weight = mine[model.first.weight.data_ptr()]
    assert (weight.kind, weight.bytes, weight.device) == ("parameters", 4 * WIDE * DEEP, "cpu")
    assert weight.name.endswith("first.weight")
    gradient = model.first.weight.grad
    assert gradient is not None
    assert mine[gradient.data_ptr()].kind == "gradients"
    state = mine[optimizer.state[model.first.weight]["momentum_buffer"].data_ptr()]
    assert (state.kind, state.name) == ("optimizer_state", "first.weight.momentum_buffer")
    assert mine[model.scale.data_ptr()].kind == "buffers"


def test_shared_weights_are_one_owner() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [owner.address for owner in find_owners([])].count(model[0].weight.data_ptr()) == 1


def test_tensors_without_memory_have_no_owner_and_lazy_copies_stay_lazy() -> None:
    model = nn.Linear(4, 4, device="meta")
    lazy = torch._lazy_clone(torch.zeros(1000))
    holder = nn.Module()
    holder.register_buffer("lazy", lazy)
    names = [owner.name for owner in find_owners([])]
    assert "lazy" not in names
    assert torch._C._is_cow_tensor(lazy)
    assert model.weight.is_meta


def test_modules_are_found_without_running_code_of_the_user() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("a proxy was looked at")

    class Odd(nn.Module):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("an attribute was asked for")

    proxy, odd, unborn = Proxy(), Odd(), nn.Module.__new__(nn.Module)
    roots = find_live_modules()
    assert any(module is odd for module in roots)
    assert list_module_tensors([odd, unborn]) == []
    assert proxy is not None


@pytest.mark.slow
def test_the_part_keeps_nothing_alive(tmp_path: Path) -> None:
    import gc
    import weakref

    part = Memory()
    part.start(FakeContext(tmp_path))  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part.optimizer_ended(0, optimizer)
    part.window_ended(1, "sites")
    gone = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# -- the history of the CUDA caching allocator, with a fake ---------------------------------------------------------------------


class FakeContext:
    def __init__(self, path: Path) -> None:
        self.path, self.rank, self.patches = path, 3, Patches()
        self.notes: list[str] = []

    def note(self, message: str, error: BaseException | None) -> None:
        self.notes.append(message)

    def submit(self, target: Path, encode: Any) -> None:
        target.write_bytes(encode())


class FakeCuda:
    """What the part asks of torch.cuda, on a device that is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enabled = False
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.snapshot: dict[str, Any] = training()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 2, "allocated_bytes.all.peak": 77})
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.enabled, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: self.snapshot)
        monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", lambda include_traces: self.snapshot["segments"])

    def record(self, enabled: Any = "all", **options: Any) -> None:
        self.calls.append((enabled, options))
        self.enabled = enabled is not None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def started(tmp_path: Path, cuda: FakeCuda) -> Any:
    context = FakeContext(tmp_path)
    part = Memory()
    part.start(context)  # type: ignore[arg-type]
    yield part, context
    part.drop()
    context.patches.restore()


def owners(context: FakeContext) -> Owners:
    return msgspec.json.decode((context.path / "memory" / "rank3-owners.json").read_bytes(), type=Owners)


def test_the_history_is_on_in_the_site_window_alone(started: Any, cuda: FakeCuda) -> None:
    part, context = started
    part.window_began(0, "timing")
    part.window_ended(0, "timing")
    assert cuda.calls == []
    part.window_began(1, "sites")
    assert cuda.calls == [("all", {"context": "all", "stacks": "python", "max_entries": MAX_ENTRIES})]
    part.window_ended(1, "sites")
    assert not cuda.enabled
    found = owners(context)
    assert (found.device, found.snapshot, found.notes) == ("cuda:0", True, ())
    assert found.stats is not None
    assert (found.stats.alloc_retries, found.stats.allocated_peak_bytes, found.stats.ooms) == (2, 77, None)
    files = read_memory_files(context.path, 3)
    assert files.snapshot is not None
    assert len(decode_snapshot(files.snapshot.read_bytes(), "x").segments) == 2


def test_the_program_s_own_history_is_left_alone(started: Any, cuda: FakeCuda) -> None:
    part, context = started
    cuda.enabled = True
    part.window_began(1, "sites")
    part.window_ended(1, "sites")
    part.drop()
    assert cuda.calls == []
    assert cuda.enabled
    assert "records the allocator's history itself" in owners(context).notes[0]
    assert decode_snapshot((context.path / "memory" / "rank3.pickle").read_bytes(), "x").device_traces == ()


def test_a_history_that_the_program_begins_in_the_window_stays_on(started: Any, cuda: FakeCuda) -> None:
    part, _ = started
    part.window_began(1, "sites")
    torch.cuda.memory._record_memory_history("all", max_entries=7)
    part.window_ended(1, "sites")
    part.drop()
    assert cuda.enabled
    assert [call[0] for call in cuda.calls] == ["all", "all"]


def test_a_history_is_switched_off_when_the_session_breaks(started: Any, cuda: FakeCuda) -> None:
    part, _ = started
    part.window_began(1, "sites")
    part.drop()
    assert not cuda.enabled
    part.drop()
    assert len(cuda.calls) == 2


def test_an_allocator_without_history_costs_the_snapshot_alone(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part, context = started

    def unsupported(*args: Any, **options: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", unsupported)
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", unsupported)
    part.window_began(1, "sites")
    part.window_ended(1, "sites")
    found = owners(context)
    assert (found.snapshot, found.stats is not None) == (False, True)
    assert set(found.notes) == {"the allocator's history could not be recorded (RuntimeError)"}


def test_a_snapshot_that_is_too_large_is_not_kept(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part, context = started
    monkeypatch.setattr(part_module, "MAX_SNAPSHOT_BYTES", 100)
    part.window_began(1, "sites")
    part.window_ended(1, "sites")
    assert not owners(context).snapshot
    assert not (context.path / "memory" / "rank3.pickle").exists()


def test_a_snapshot_is_packed_as_torch_dumps_it() -> None:
    data = pack_snapshot(training(), 1 << 20)
    assert data is not None
    assert pickle.loads(data) == training()  # noqa: S301 - made here
    assert pack_snapshot(training(), len(data) - 1) is None


def test_damaged_owners_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    path = tmp_path / "memory" / "rank0-owners.json"
    for text in (b"{", b'{"window":1,"device":"cpu","version":99}', b"\xff", b"[" * 100_000):
        path.write_bytes(text)
        found = read_memory_files(tmp_path, 0)
        assert found.owners is None
        assert found.notice is not None
        assert found.notice.code == NoticeCode.MEMORY_OWNERS_UNREADABLE

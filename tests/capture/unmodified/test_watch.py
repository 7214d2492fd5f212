"""The nine awkward loops of tests/awkward, run unchanged in this process beside a watch: each step is found and is what it is."""

from __future__ import annotations

import atexit
import copy
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.capture import run_script, session
from gpudiag.capture.run_script import watch as unmodified
from gpudiag.capture.run_script.driver import Driver
from gpudiag.capture.run_script.plan import Plan, read_journal
from gpudiag.capture.run_script.step_boundary import REPEATS

AWKWARD = Path(__file__).parents[2] / "awkward"
SHORT = {"skip": 2, "warm": 1, "record": 3, "sites": 1}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Watched:
    """A process of `gpudiag run`, as far as this process can be one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.watch = unmodified.Watch(Plan(str(folder / "run"), ("train.py",), SHORT, str(self.journal)))

    def start(self) -> None:
        unmodified._watch = self.watch
        self.watch.install()

    def end(self) -> OpenedBundle:
        self.watch.finish()
        return open_bundle(self.folder / "run")

    def script(self, name: str, *arguments: str) -> OpenedBundle:
        before, sys.argv = sys.argv, [name, *arguments]
        try:
            runpy.run_path(str(AWKWARD / name), run_name="__main__")
        finally:
            sys.argv = before
        return self.end()

    def told(self) -> list[str]:
        return [entry.what for entry in read_journal(self.journal)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    threads = torch.get_num_threads()
    found = Watched(tmp_path)
    found.start()
    yield found
    found.watch.finish()
    found.watch._begun = True
    found.watch._patches.restore()
    if found.watch._hook is not None:
        found.watch._hook.remove()
    atexit.unregister(found.watch.finish)
    unmodified._watch = None
    torch.set_num_threads(threads)
    assert session._active is None


def column(bundle: OpenedBundle, name: str) -> list[Any]:
    return bundle.step_records[name].to_list()


def of_each(bundle: OpenedBundle, *names: str) -> set[tuple[Any, ...]]:
    return set(zip(*(column(bundle, name) for name in names), strict=True))


@pytest.mark.parametrize(
    ("script", "arguments", "counts"),
    [
        ("plain.py", ("--steps", "30"), (1, 1, 4)),
        ("plain.py", ("--steps", "20", "--accumulation", "4"), (4, 1, 16)),
        ("gan.py", ("30",), (3, 3, 32)),
        ("in_backward.py", ("30",), (1, 4, None)),
        ("steps_while_built.py", ("30",), (3, 1, None)),
        ("by_hand.py", ("30",), (1, 0, None)),
    ],
)
def test_the_steps_of_awkward_loops_are_found(watched: Watched, script: str, arguments: tuple[str, ...], counts: tuple[Any, ...]) -> None:
    bundle = watched.script(script, *arguments)
    steps = 20 if "--accumulation" in arguments else 30
    assert of_each(bundle, "backwards", "optimizer_steps", "samples") == {counts}
    assert steps - bundle.step_records.height <= REPEATS + 4
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 3), ("sites", 1)]
    assert bundle.manifest.finished
    assert bundle.manifest.command == ("train.py",)
    assert bundle.manifest.warnings == ()


def test_updates_before_the_first_step_of_an_optimizer_is_over_are_no_steps(watched: Watched) -> None:
    assert watched.script("lbfgs.py", "30", "20").step_records.height == 30 - REPEATS - 1


def test_a_step_with_closures_is_one_step(watched: Watched) -> None:
    bundle = watched.script("lbfgs.py", "30")
    assert bundle.step_records.height == 30 - REPEATS - 1
    assert of_each(bundle, "optimizer_steps") == {(1,)}
    assert min(column(bundle, "backwards")) >= 1
    assert max(column(bundle, "backwards")) > 1


@pytest.mark.slow
def test_the_trainer_of_transformers(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bundle = watched.script("huggingface.py", "40", str(watched.folder / "out"))
    assert of_each(bundle, "backwards", "optimizer_steps") == {(2, 1)}
    assert 33 <= bundle.step_records.height <= 36  # of 40, without those before the rule knew and the one with the evaluation
    assert sum(column(bundle, "samples")) == pytest.approx(8 * bundle.step_records.height, abs=8)  # it draws a batch ahead
    assert len(bundle.manifest.windows) == 2


@pytest.mark.slow
def test_the_trainer_of_lightning(watched: Watched) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    bundle = watched.script("lightning_fit.py", "60", str(watched.folder / "out"))
    assert of_each(bundle, "backwards", "optimizer_steps", "samples") == {(1, 1, 8)}
    assert 50 <= bundle.step_records.height <= 57
    assert len(bundle.manifest.windows) == 2


# -- validation, and what else lies between steps -------------------------------------------------------------------------


def test_validation_without_gradients_belongs_to_no_step(watched: Watched) -> None:
    bundle = watched.script("plain.py", "--steps", "48", "--validate")
    assert set(column(bundle, "samples")) == {4}
    assert bundle.step_records.height >= 48 - REPEATS - 1 - 6  # one step for each of six validations
    assert [window.kind for window in bundle.manifest.windows] == ["timing", "sites"]


def _train(steps: int, model: nn.Module, optimizer: Any, batches: Any = None) -> None:
    for _ in range(steps):
        x = torch.randn(4, 8) if batches is None else next(batches)[0]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_validation_with_gradients_on_is_told_by_its_batches(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(64, 8))
    for _ in range(3):
        _train(15, model, optimizer, iter(DataLoader(data, batch_size=4)))
        model.eval()
        for (x,) in DataLoader(data, batch_size=8):
            model(x).sum().item()
        model.train()
    bundle = watched.end()
    assert set(column(bundle, "samples")) == {4}
    assert bundle.step_records.height >= 45 - REPEATS - 1 - 3


def test_a_loop_that_draws_batches_without_gradients_in_each_step_is_recorded(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(400, 8))
    labelled, unlabelled = (iter(DataLoader(data, batch_size=4)) for _ in range(2))
    for number in range(40):
        if number > 10:
            with torch.no_grad():
                next(unlabelled)
        _train(1, model, optimizer, labelled)
    bundle = watched.end()
    assert bundle.step_records.height >= 40 - 10
    assert set(column(bundle, "samples")[-10:]) == {8}


# -- marks by hand --------------------------------------------------------------------------------------------------------


def test_steps_marked_by_hand(watched: Watched) -> None:
    x = torch.randn(8, 8)
    for _ in range(20):  # inference: neither a backward pass nor an optimizer
        (x @ x).sum()
        run_script.step(samples=8)
    bundle = watched.end()
    assert bundle.step_records.height == 19
    assert set(column(bundle, "samples")) == {8}
    assert [window.kind for window in bundle.manifest.windows] == ["timing", "sites"]


def test_marks_by_hand_come_before_the_rule(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(12):
        _train(2, model, optimizer)
        run_script.step()
    bundle = watched.end()
    assert of_each(bundle, "backwards", "optimizer_steps") == {(2, 2)}
    assert bundle.step_records.height == 11


def test_a_mark_by_hand_outside_of_a_run_does_nothing() -> None:
    import gpudiag

    assert unmodified._watch is None
    gpudiag.step()
    gpudiag.step(samples=3)


# -- training comes first ---------------------------------------------------------------------------------------------------


def test_the_script_s_own_session_wins(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _train(8, model, optimizer)
    with session.Session(watched.folder / "own", **SHORT) as prof:
        for _ in prof.steps(range(12)):
            _train(1, model, optimizer)
    assert open_bundle(prof.path).step_records.height == 12
    bundle = watched.end()
    assert bundle.manifest.finished
    assert bundle.step_records.height < 8
    assert watched.told()[-1] == "aside"


def test_a_session_that_began_before_training_is_left_alone(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with session.Session(watched.folder / "own", **SHORT) as prof:
        for _ in prof.steps(range(12)):
            _train(1, model, optimizer)
    assert open_bundle(prof.path).step_records.height == 12
    assert not (watched.folder / "run").exists()
    assert "aside" in watched.told()


def test_too_few_steps_leave_a_bundle_that_says_why(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    _train(2, model, torch.optim.SGD(model.parameters(), 0.1))
    bundle = watched.end()
    assert bundle.manifest.finished
    assert bundle.step_records.height == 0
    assert any("2 backward passes, 2 optimizer steps" in text and "gpudiag.step()" in text for text in bundle.manifest.warnings)


def test_a_folder_that_cannot_be_written_is_told_in_the_journal_alone(watched: Watched) -> None:
    (watched.folder / "file").write_text("")
    watched.watch.plan = Plan(str(watched.folder / "file" / "run"), None, SHORT, str(watched.journal))
    model = nn.Linear(8, 1)
    with warnings.catch_warnings():  # the script's warnings are its own
        warnings.simplefilter("error", RuntimeWarning)
        _train(12, model, torch.optim.SGD(model.parameters(), 0.1))
    assert watched.told()[-2:] == ["warned", "failed"]
    assert "training goes on" in read_journal(watched.journal)[-2].text
    assert torch.Tensor.backward.__name__ == "backward"


def test_a_failure_inside_the_optimizer_s_hooks_does_not_reach_the_training(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends there takes its hooks away while torch goes through them."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _train(6, model, optimizer)
    called = []
    other = register_optimizer_step_post_hook(lambda *_: called.append(1))  # behind ours
    recorder = watched.watch.driver.session
    monkeypatch.setattr(recorder._loop, "_mark", lambda: 1 / 0)
    _train(3, model, optimizer)
    assert any(entry.what == "warned" and "ZeroDivisionError" in entry.text for entry in read_journal(watched.journal))
    other.remove()
    assert len(called) == 3
    assert not recorder.recording


def test_losses_and_random_numbers_are_the_same(tmp_path: Path) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        found = []
        for (x,) in DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=4, shuffle=True):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return [*found, torch.rand(1).item()]

    bare = losses()
    watched = Watched(tmp_path)
    watched.start()
    try:
        assert losses() == bare
        assert watched.end().step_records.height > 10
    finally:
        watched.watch.finish()
        atexit.unregister(watched.watch.finish)
        unmodified._watch = None


def test_a_patched_backward_is_called_once_each(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may wrap Tensor.backward itself, on top of the watch."""
    calls = []
    ours = torch.Tensor.backward

    def theirs(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", theirs)
    model = nn.Linear(8, 1)
    _train(12, model, torch.optim.SGD(model.parameters(), 0.1))
    assert len(calls) == 12
    assert watched.end().step_records.height >= 12 - REPEATS - 2  # seen from the first optimizer step on


def test_updates_through_data_are_seen_by_the_gradients(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    data = iter(DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=4))
    for (x,) in data:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad.zero_()
    bundle = watched.end()
    assert of_each(bundle, "backwards", "samples") == {(1, 4)}
    assert bundle.step_records.height >= 40 - REPEATS - 4


def test_optimizers_without_tensor_backward(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        gradients = torch.autograd.grad(model(torch.randn(4, 8)).square().mean(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert watched.end().step_records.height >= 20


def test_living_optimizers_never_share_a_number(tmp_path: Path) -> None:
    """The number of one that is gone goes to the next of its kind; later its parameter has an optimizer again."""
    driver = Driver(Plan(str(tmp_path), ("train.py",), SHORT, ""))
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    def make(parameter: nn.Parameter) -> torch.optim.SGD:
        return torch.optim.SGD([parameter], lr=0.1)

    gone = make(first)
    assert driver.number(gone) == 0
    del gone
    heir, anew = make(second), make(first)
    numbers = [driver.number(heir), driver.number(anew)]
    assert numbers == [0, 1]
    assert [driver.number(heir), driver.number(anew)] == numbers
    for _ in range(3):  # made anew in each step, for the same parameter: the number stays
        del anew
        anew = make(first)
        assert driver.number(anew) == 1


def test_a_learner_that_is_made_anew_for_each_task_is_part_of_a_step(watched: Watched) -> None:
    """MAML: a copy of the model and an optimizer of its own for each task; the update of the model ends the step."""
    model = nn.Linear(8, 1)
    outer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        outer.zero_grad()
        for _ in range(3):
            learner = copy.deepcopy(model)
            inner = torch.optim.Adam(learner.parameters())
            learner(torch.randn(4, 8)).square().mean().backward()
            inner.step()
            model(torch.randn(4, 8)).square().mean().backward()
        outer.step()
    bundle = watched.end()
    assert of_each(bundle, "optimizer_steps", "backwards") == {(4, 6)}
    assert bundle.step_records.height >= 30 - REPEATS - 4


def test_an_update_that_a_scaler_leaves_out_ends_a_step_all_the_same(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(30):
        loss = model(torch.randn(4, 8)).square().mean() * (float("inf") if number % 7 == 6 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    bundle = watched.end()
    assert of_each(bundle, "backwards") == {(1,)}
    assert column(bundle, "optimizer_steps").count(0) == 4
    assert bundle.step_records.height == 30 - REPEATS - 1


def test_a_scaler_of_one_s_own_that_skips_updates_joins_two_iterations(watched: Watched) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(40):
        model(torch.randn(4, 8)).square().mean().backward()
        if number % 10 != 9:  # what torch's does inside its step(), where it is seen
            optimizer.step()
        optimizer.zero_grad()
    bundle = watched.end()
    assert column(bundle, "backwards").count(2) == 3
    assert set(column(bundle, "backwards")) == {1, 2}
    assert set(column(bundle, "optimizer_steps")) == {1}


def test_a_forked_child_ends_without_touching_the_bundle(watched: Watched, fork: Callable[[Callable[[], None]], int]) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _train(6, model, optimizer)
    assert fork(lambda: (watched.watch.finish(), _train(2, model, optimizer), run_script.step())) == 0
    _train(10, model, optimizer)
    assert watched.end().step_records.height == 16 - REPEATS - 1


@pytest.fixture
def fork() -> Callable[[Callable[[], None]], int]:
    def run(action: Callable[[], None]) -> int:
        child = os.fork()
        if child == 0:
            try:
                action()
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run

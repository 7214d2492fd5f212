"""Steps of traces without ProfilerStep marks, by each source; and that none is invented where nothing tells them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from handmade import call, kernel, mark, op, trace
from noticewords import format_notices

from gpudiag.attribution.steps import FROM_MARKS, WHOLE_TRACE, Steps, find_steps
from gpudiag.trace import read_trace

Event = dict[str, Any]

OPTIMIZER = "Optimizer.step#AdamW.step"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def found(*events: Event) -> Steps:
    return find_steps(trace(*events))


def bounds(steps: Steps) -> list[tuple[float, float]]:
    return [(start / 1000, end / 1000) for start, end in steps.table.select("start_ns", "end_ns").iter_rows()]


def iteration(at: float, *, optimizer: str | None = OPTIMIZER, loader: bool = True) -> list[Event]:
    """Return 100 us of training: loader wait, forward, backward, update, logging."""
    events = [
        op("aten::linear", at + 20, at + 40, seq=1),
        op("autograd::engine::evaluate_function: AddmmBackward0", at + 40, at + 60, tid=2),
        op("aten::add_", at + 65, at + 70),
        op("aten::item", at + 80, at + 90),
    ]
    events += [mark(optimizer, at + 60, at + 75)] if optimizer else []
    return events + ([mark(LOADER, at, at + 15)] if loader else [])


def run(count: int, **kinds: Any) -> list[Event]:
    return [event for row in range(count) for event in iteration(100 * row, **kinds)]


def test_a_step_reaches_from_update_to_update_and_holds_the_wait_for_its_batch() -> None:
    steps = found(*run(4))
    assert steps.source == "optimizer steps"
    assert bounds(steps) == [(75, 175), (175, 275), (275, 375)]
    assert steps.table["name"].to_list() == ["#0", "#1", "#2"]


def test_marks_of_the_profiler_come_first() -> None:
    steps = found(*run(4), mark("ProfilerStep#1", 0, 100), mark("ProfilerStep#2", 100, 200))
    assert (steps.source, bounds(steps)) == (FROM_MARKS, [(0, 100), (100, 200)])


def test_the_incomplete_first_and_last_stretch_are_no_steps_and_the_report_says_how_much_they_are() -> None:
    steps = found(op("aten::empty", 0, 1), *(event for row in range(3) for event in iteration(900 + 100 * row)))
    assert bounds(steps) == [(975, 1075), (1075, 1175)]
    assert (
        "83 % of the recording lies before the first and after the last complete one" in format_notices(steps.notices)[-1]
    )  # 1 - 200 / 1190


def test_a_wrapper_of_the_optimizer_is_no_second_one() -> None:
    wrapped = [mark("Optimizer.step#AcceleratedOptimizer.step", 100 * row + 59, 100 * row + 76) for row in range(4)]
    assert bounds(found(*run(4), *wrapped)) == [(76, 176), (176, 276), (276, 376)]


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 2)])
def test_two_optimizers_in_a_row_make_one_step(rows: tuple[int, ...]) -> None:
    """Also where one of them updates every second time, and the recording is too short to show that cycle."""
    second = [mark("Optimizer.step#Adam.step", 100 * row + 76, 100 * row + 79) for row in rows]
    steps = found(*run(rows[-1] + 1, optimizer="Optimizer.step#SGD.step"), *second)
    assert steps.source == "optimizer steps"
    ends = [100 * row + (79 if row in rows else 75) for row in range(rows[-1] + 1)]
    assert bounds(steps) == list(itertools.pairwise(ends))


def test_one_update_for_several_batches_is_one_step() -> None:
    events = [event for row in range(12) for event in iteration(100 * row, optimizer=OPTIMIZER if row % 4 == 3 else None)]
    assert bounds(found(*events)) == [(375, 775), (775, 1175)]


def test_without_an_optimizer_a_step_begins_where_its_batch_is_asked_for() -> None:
    steps = found(*run(4, optimizer=None))
    assert (steps.source, bounds(steps)) == ("loader iterations", [(0, 100), (100, 200), (200, 300)])


def test_a_loader_on_another_thread_tells_no_steps() -> None:
    prefetched = [mark(LOADER, 100 * row, 100 * row + 90, tid=5) for row in range(4)]
    assert "loader" not in found(*run(4, optimizer=None, loader=False), *prefetched).source


def test_optimizer_ops_where_nothing_is_marked() -> None:
    fused = [op("aten::_fused_adamw_", 100 * row + 76, 100 * row + 79) for row in range(4)]
    steps = found(*run(4, optimizer=None, loader=False), *fused)
    assert (steps.source, bounds(steps)[0]) == ("optimizer ops", (79, 179))


def test_a_recurring_annotation() -> None:
    names = [mark(f"execute_context_{row % 3}({row})", 100 * row + 5, 100 * row + 95) for row in range(5)]
    steps = found(*names, *(op("aten::mm", 100 * row + 20, 100 * row + 40) for row in range(5)))
    assert steps.source == "annotations 'execute_context_N(N)'"
    assert bounds(steps) == [(5, 105), (105, 205), (205, 305), (305, 405), (405, 495)]  # the last ends with its annotation
    assert steps.table["name"][1] == "execute_context_1(1)"


def test_of_parts_of_a_step_the_first_one_marks_it() -> None:
    parts = [
        mark(f"## {name} ##", 100 * row + start, 100 * row + end)
        for row in range(4)
        for name, start, end in (("zero_grad", 2, 9), ("forward", 10, 40), ("attention", 15, 30), ("backward", 40, 90))
    ]
    steps = found(*parts, *run(4, optimizer=None, loader=False))
    assert (steps.source, bounds(steps)) == ("annotations '## zero_grad ##'", [(2, 102), (102, 202), (202, 302)])


def test_numbers_that_begin_anew_make_one_step() -> None:
    tasks = [mark(f"task {row % 3}", 100 * row, 100 * row + 95) for row in range(12)]
    steps = found(*tasks, *(op("aten::mm", 100 * row + 20, 100 * row + 40) for row in range(12)))
    assert bounds(steps) == [(0, 300), (300, 600), (600, 900)]


@pytest.mark.parametrize(
    "name", ["layer {}", "decoder block {}", "nccl:all_reduce", "DistributedDataParallel.forward", "Torch-Compiled Region"]
)
def test_parts_of_a_model_and_torchs_own_annotations_are_no_steps(name: str) -> None:
    marks = [mark(name.format(row), 100 * row, 100 * row + 99) for row in range(12)]
    assert found(*marks, *(op("aten::mm", 100 * row + 20, 100 * row + 40) for row in range(12))).source == WHOLE_TRACE


def test_annotations_of_different_work_are_phases_of_a_script() -> None:
    work = [op(f"aten::a{row}{k}", 100 * row + k, 100 * row + k + 1) for k in range(9) for row in range(4)]
    marks = [mark(f"phase {row}", 100 * row, 100 * row + 99) for row in range(4)]
    assert found(*marks, *work).source == WHOLE_TRACE


def test_a_name_of_a_file_is_short_and_printable_in_the_source() -> None:
    marks = [mark("x\x1b[31m" + "y" * 1000, 100 * row, 100 * row + 99) for row in range(4)]
    steps = found(*marks, *(op("aten::mm", 100 * row + 20, 100 * row + 40) for row in range(4)))
    assert steps.source.isprintable()
    assert len(steps.source) < 120


def launched(sequence: list[str], pause: int | None = None) -> list[Event]:
    """Return kernels 10 us apart in the order of `sequence`; after each `pause` of them the host waits 50 us."""
    events: list[Event] = [mark("zero", 0, 0)]
    at = 10.0
    for row, name in enumerate(sequence):
        at += 60 if pause and row and row % pause == 0 else 10
        events += [call(at, row + 1, end=at + 2), kernel(at + 3, at + 9, row + 1, name)]
    return events


FORWARD = [f"layer_{part}" for part in ("norm", "qkv", "attention", "proj", "mlp_up", "gelu", "mlp_down")]
STEP = ["embedding", *FORWARD * 3, "head", "loss", "loss_backward", *[f"{name}_backward" for name in FORWARD] * 3, "multi_tensor_apply"]


def test_training_kernels_alone_have_the_period_of_a_step() -> None:
    steps = found(*launched(STEP * 6, pause=len(STEP)))
    assert steps.source == f"period of the kernel sequence ({len(STEP)} kernels, 5 repetitions, 100 % equal)"
    # a step begins when the last launch before is over, so the pause before its first kernel belongs to it
    lengths = {round(end - start) for start, end in bounds(steps)[1:]}
    assert lengths == {10 * len(STEP) + 50}


def test_the_equal_layers_of_one_forward_pass_are_no_steps() -> None:
    assert found(*launched(["embedding", *FORWARD * 24, "head", "sample"])).source == WHOLE_TRACE


def test_forward_passes_of_layers_are_steps_by_the_layers_in_them() -> None:
    once = ["embedding", "rotary", "mask", *FORWARD * 12, "final_norm", "head", "softmax", "sample", "gather"]
    assert found(*launched(once * 5)).source.startswith(f"period of the kernel sequence ({len(once)} kernels")


def test_work_that_the_host_feeds_and_reads_is_a_step() -> None:
    once = ["Memcpy HtoD (Pinned -> Device)", "conv_a", "conv_b", "pool", "head", "Memcpy DtoH (Device -> Pageable)"]
    assert found(*launched(once * 5)).source.startswith("period of the kernel sequence (6 kernels")
    assert found(*launched(once[1:5] * 5)).source == WHOLE_TRACE  # a layer looks like that too


@pytest.mark.slow
def test_many_kinds_of_annotations_take_no_time() -> None:
    marks = [mark(f"{chr(97 + row % 26)}{chr(97 + row // 26 % 26)}{chr(97 + row // 676)} {row}", row, row + 0.5) for row in range(30_000)]
    made = trace(*marks, op("aten::mm", 0, 30_000))
    before = time.perf_counter()
    find_steps(made)
    assert time.perf_counter() - before < 3


def _gan(count: int) -> None:
    import torch
    from torch import nn

    generator, critic = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(), nn.Linear(64, 1))
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    for _ in range(count):
        for _ in range(2):
            first.zero_grad()
            (critic(torch.randn(16, 32)).mean() - critic(generator(torch.randn(16, 8)).detach()).mean()).backward()
            first.step()
        second.zero_grad()
        (-critic(generator(torch.randn(16, 8))).mean()).backward()
        second.step()


def _own_update(count: int) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    for _ in range(count):
        model(torch.randn(8, 16)).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def _inference(count: int) -> None:
    import torch
    from torch import nn

    model = nn.Linear(16, 4)
    with torch.inference_mode():
        for batch in torch.utils.data.DataLoader(torch.randn(count * 4, 16), batch_size=4):
            model(batch)


@pytest.mark.parametrize(
    ("work", "source"),
    [(_gan, "optimizer steps, 3 updates in each"), (_own_update, "period of the op sequence"), (_inference, "loader iterations")],
)
@pytest.mark.needs("torch")
def test_recordings_of_torch(work: Any, source: str, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    work(2)
    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        work(9)
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    steps = find_steps(read_trace(tmp_path / "trace.json"))
    assert steps.source.startswith(source)
    assert steps.table.height in (8, 9)

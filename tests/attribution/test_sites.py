"""Call sites: the user's line behind each op, from frames of the same window or of another."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from handmade import op, steps, trace

from gpudiag.attribution.call_sites import Sites, find_loop_lines, find_own_paths, find_sites
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace


def frame(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": {}}


def window(*events: dict[str, Any]) -> Trace:
    made = trace(*events)
    return link_kernels(made, find_steps(made).table, on_cpu=True)[0]


def sites(timing: Trace, other: Trace | None = None) -> Sites:
    return find_sites(timing, find_steps(timing).table, None if other is None else (other, find_steps(other).table))


FRAMES = [
    frame("train.py(40): main", 0, 100),
    frame("model.py(7): forward", 10, 50),
    frame("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py(125): forward", 12, 45),
    frame("nn.Module: Linear_0", 11, 48),
    frame("<built-in function linear>", 14, 40),
]
OPS = [op("aten::linear", 20, 35, seq=4), op("aten::mm", 22, 30), op("aten::add", 60, 65), op("aten::mul", 150, 160)]
BACKWARD = [op("autograd::engine::evaluate_function: LinearBackward0", 110, 140, tid=2, seq=4), op("aten::mm", 115, 120, tid=2)]


def test_the_nearest_frame_that_is_the_users_own() -> None:
    found = sites(window(*steps(0, 200), *FRAMES, *OPS))
    assert found.site.to_list() == ["model.py(7): forward", "model.py(7): forward", "train.py(40): main", None]
    assert found.match_share == pytest.approx(20 / 30)  # time of top-level ops


def test_the_lines_that_an_op_ran_under() -> None:
    found = find_own_paths(window(*steps(0, 200), *FRAMES, *OPS))
    assert found.to_list() == [*["train.py(40): main\nmodel.py(7): forward"] * 2, "train.py(40): main", None]


def test_the_line_of_a_loop_is_that_of_the_function_in_which_the_calls_come_again() -> None:
    """A solver of a package calls the program's forward() once a round: the loop is the solver's, whatever line the op stands at."""
    rounds = [frame("ode/solver.py(34): integrate", 2 + 30 * i, 28 + 30 * i) for i in range(20)]
    rounds += [frame("train.py(33): forward", 4 + 30 * i, 26 + 30 * i) for i in range(20)]
    ops = [op("aten::mm", 6 + 30 * i, 20 + 30 * i) for i in range(20)]
    outside = [frame("train.py(40): main", 0, 700), frame("ode/solver.py(20): integrate", 1, 650), op("aten::mm", 660, 670)]
    made = window(*steps(0, 800), *outside, *rounds, *ops)
    assert find_loop_lines(made, 20).to_list() == [*["ode/solver.py(34): integrate"] * 20, None]
    assert find_loop_lines(made, 21).null_count() == 21


def test_what_a_trainer_of_a_package_calls_stands_there_where_the_programs_own_line_is_not_known() -> None:
    calls = [frame("transformers/trainer.py(2529): training_step", 10, 50), frame("model.py(7): forward", 12, 19)]
    made = window(*steps(0, 200), frame("train.py(?): <module>", 0, 100), *calls, op("aten::mm", 14, 18), *OPS[:1], op("aten::neg", 90, 95))
    assert sites(made).site.to_list() == ["model.py(7): forward", "transformers/trainer.py(2529): training_step", "train.py(?): <module>"]


def test_a_backward_op_has_the_site_of_its_forward_op() -> None:
    made = window(*steps(0, 200), *FRAMES, *OPS, *BACKWARD)
    assert sites(made).site.to_list()[4:] == ["model.py(7): forward"] * 2


def test_a_missing_site_of_a_backward_op_is_that_of_the_node_above() -> None:
    inner = [op("aten::expand", 118, 119, tid=2)]
    made = window(*steps(0, 200), *FRAMES, *OPS, *BACKWARD, *inner, op("aten::rand", 150, 155, tid=3))
    assert dict(zip(made.ops["name"].cast(pl.String), sites(made).site, strict=True)) == {
        "aten::linear": "model.py(7): forward",
        "aten::mm": "model.py(7): forward",
        "aten::add": "train.py(40): main",
        "aten::mul": None,
        "autograd::engine::evaluate_function: LinearBackward0": "model.py(7): forward",
        "aten::expand": "model.py(7): forward",
        "aten::rand": None,
    }


@pytest.mark.parametrize("root", ["", "/home/me/env/lib/python3.12/site-packages/"])
def test_the_loop_of_the_demo_is_the_users_and_the_rest_of_gpudiag_is_not(root: str) -> None:
    frames = [
        frame(f"{root}gpudiag/cli/machine.py(25): demo", 0, 100),
        frame(f"{root}gpudiag/api.py(140): demo", 1, 99),
        frame(f"{root}gpudiag/capture/demo.py(180): _train", 2, 60),
        frame(f"{root}gpudiag/capture/loop.py(40): __next__", 12, 30),
        frame(f"{root}gpudiag/capture/session.py(90): _mark", 27, 29),
        frame(f"{root}gpudiag/fixes/forward_pass.py(60): forward", 39, 48),
        frame(f"{root}gpudiag/bundle/writer.py(30): write_atomic", 69, 76),
    ]
    ops = [op("aten::mm", 20, 25), op("aten::sum", 28, 28.5), op("aten::add", 40, 45), op("aten::mul", 70, 75)]
    loop = f"{root}gpudiag/capture/demo.py(180): _train"
    assert sites(window(*steps(0, 200), *frames, *ops)).site.to_list() == [loop, None, loop, None]  # what a mark does is nobody's line


def test_what_was_open_when_stacks_began_has_no_line() -> None:
    open_before = [
        frame("train.py(90): <module>", 0, 300),
        frame("train.py(48): train", 1, 299),  # where prof.step() stands
        frame("torch/profiler/profiler.py(860): step", 2, 20),
        frame("torch/autograd/profiler.py(414): _start_trace", 3, 19),
        frame("<built-in function perf_counter_ns>", 4, 5),
    ]
    inside = [frame("model.py(7): forward", 30, 50), frame("train.py(44): train", 60, 80), frame("<built-in method mse_loss>", 61, 79)]
    ops = [op("aten::linear", 35, 40), op("aten::sub", 52, 55), op("aten::mse_loss", 62, 70)]
    found = sites(window(*steps(25, 200), *open_before, *inside, *ops)).site.to_list()
    assert found == ["model.py(7): forward", "train.py(?): train", "train.py(44): train"]
    entered = [frame("train.py(40): train", 0, 100), frame("model.py(7): forward", 10, 50)]  # no profiler is seen to start: entered there
    assert sites(window(*steps(0, 200), *entered, op("aten::sub", 60, 70))).site.to_list() == ["train.py(40): train"]


def test_what_our_own_work_calls_in_a_package_is_nobodys_line() -> None:
    """numpy under gpudiag's count of the padding, below a loop whose line is not known."""
    frames = [frame("train.py(?): train", 0, 99), frame("gpudiag/capture/loop.py(?): __next__", 1, 60)]
    counted = [frame("gpudiag/capture/padding.py(65): count", 10, 20), frame("numpy/_core/_methods.py(45): _amin", 12, 16)]
    loaded = frame("torchvision/transforms.py(9): crop", 30, 40)
    ops = [op("aten::mm", 13, 14), op("aten::add", 32, 33)]
    made = window(*steps(0, 200), *frames, *counted, loaded, *ops)
    assert sites(made).site.to_list() == [None, "torchvision/transforms.py(9): crop"]


def test_a_users_own_folder_called_gpudiag_is_the_users() -> None:
    made = window(*steps(0, 100), frame("/home/me/gpudiag/train.py(3): main", 0, 90), op("aten::mm", 20, 25))
    assert sites(made).site.to_list() == ["/home/me/gpudiag/train.py(3): main"]


def test_on_the_calling_thread_a_backward_op_has_the_site_of_its_forward_op_too() -> None:
    backward = [op("autograd::engine::evaluate_function: LinearBackward0", 70, 90, seq=4), op("aten::mm", 72, 80)]
    found = sites(window(*steps(0, 200), *FRAMES, *OPS, *backward)).site.to_list()
    assert found == ["model.py(7): forward", "model.py(7): forward", "train.py(40): main", *["model.py(7): forward"] * 2, None]


def test_forward_threads_that_count_alike_are_told_apart() -> None:
    # two replicas run at once, each with autograd numbers of its own (nn.DataParallel)
    frames = [frame("left.py(1): f", 0, 60), frame("right.py(2): g", 0, 60, tid=2)]
    forward = [op("aten::mul", 10, 20, seq=0), op("aten::sin", 30, 40, seq=1)]
    forward += [op("aten::exp", 12, 22, tid=2, seq=0), op("aten::cos", 32, 42, tid=2, seq=1)]
    names = {"SinBackward0": (1, 1), "CosBackward0": (2, 1), "MulBackward0": (1, 0), "ExpBackward0": (2, 0)}
    nodes = [op(name, 100 + 10 * row, 105 + 10 * row, tid=3, seq=seq) for row, (name, (_, seq)) in enumerate(names.items())]
    for node, (thread, _) in zip(nodes, names.values(), strict=True):
        node["args"]["Fwd thread id"] = thread
    made = window(*steps(0, 200), *frames, *forward, *nodes)
    found = dict(zip(made.ops["name"].cast(pl.String), sites(made).site, strict=True))
    left, right = "left.py(1): f", "right.py(2): g"
    assert {name: found[name] for name in names} == {
        "SinBackward0": left,
        "CosBackward0": right,
        "MulBackward0": left,
        "ExpBackward0": right,
    }


def test_python_that_runs_inside_a_backward_node_keeps_its_own_site() -> None:
    backward = [
        op("autograd::engine::evaluate_function: MyFunctionBackward", 70, 90, seq=4),
        frame("mine.py(9): backward", 74, 88),
        op("aten::sum", 72, 73),
        op("aten::mm", 75, 80),
    ]
    found = sites(window(*steps(0, 200), *FRAMES, *OPS[:2], *backward)).site.to_list()
    assert found[2:] == ["model.py(7): forward", "model.py(7): forward", "mine.py(9): backward"]


def test_sites_are_carried_over_by_step_name_and_order() -> None:
    loop = [frame("a.py(1): f", 0, 20), frame("b.py(2): g", 30, 50)]
    other = window(*steps(0, 100), *loop, op("aten::mm", 5, 10), op("aten::mm", 35, 40))
    timing = window(
        *steps(0, 100, 200, first=5),
        op("aten::mm", 5, 9),
        op("aten::mm", 20, 24),
        op("aten::mm", 105, 109),
        op("aten::mm", 120, 124),
        op("aten::mm", 130, 134),
    )
    found = sites(timing, other)
    assert found.site.to_list() == ["a.py(1): f", "b.py(2): g", "a.py(1): f", "b.py(2): g", None]
    assert found.match_share == pytest.approx(0.8)


def test_a_script_with_the_name_of_a_standard_module_is_the_users_only_where_it_runs() -> None:
    frames = [frame("data.py(8): __getitem__", 0, 100), frame("random.py(480): choices", 10, 90)]
    assert sites(window(*frames, op("aten::ones", 20, 30))).site.to_list() == ["data.py(8): __getitem__"]
    script = [frame("random.py(1): <module>", 0, 100), frame("random.py(9): walk", 10, 90)]
    assert sites(window(*script, op("aten::ones", 20, 30))).site.to_list() == ["random.py(9): walk"]


def test_without_frames_nothing_is_known() -> None:
    found = sites(window(*steps(0, 100), op("aten::mm", 5, 9)))
    assert found.site.to_list() == [None]
    assert found.match_share is None


def test_schemas_that_write_frames_on_thread_0() -> None:
    made = window(*steps(0, 200), *(event | {"tid": 0} for event in FRAMES), *OPS, *BACKWARD)
    assert sites(made).site.to_list()[:3] == ["model.py(7): forward", "model.py(7): forward", "train.py(40): main"]


def test_a_line_of_an_installed_package_is_the_users_only_where_no_other_is_above() -> None:
    nested = [
        frame("train.py(40): main", 0, 90),
        frame("numpy/_core/numeric.py(170): ones", 10, 20),
        frame("transformers/trainer.py(2100): train", 30, 80),
        frame("transformers/models/bert/modeling_bert.py(500): forward", 40, 60),
        frame("transformers/pytorch_utils.py(186): apply_chunking_to_forward", 45, 55),
        frame("transformers/trainer.py(2100): train", 100, 120),
    ]
    ops = [op("aten::a", 12, 15), op("aten::b", 46, 50), op("aten::c", 70, 75), op("aten::d", 105, 110)]
    assert sites(window(*steps(0, 200), *nested, *ops)).site.to_list() == [
        "train.py(40): main",  # numpy called by the script
        "transformers/models/bert/modeling_bert.py(500): forward",  # a model's line says more than the call of it
        "train.py(40): main",
        "transformers/trainer.py(2100): train",  # all that the stack holds
    ]


@pytest.mark.parametrize("own", ["numpy_tools/io.py(3): save", "data/numpy.py(3): save", "timm.py(3): save", "rays/a.py(3): save"])
def test_files_whose_names_only_resemble_a_package_are_the_users(own: str) -> None:
    nested = [frame("train.py(40): main", 0, 90), frame(own, 10, 30)]
    assert sites(window(*steps(0, 200), *nested, op("aten::a", 12, 15))).site.to_list() == [own]

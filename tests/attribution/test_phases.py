"""Phases of ops from autograd nodes, sequence numbers and torch's own marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
from handmade import call, kernel, linked, mark, op, steps

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.trace import read_trace


def test_phases() -> None:
    events = [
        mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10), op("aten::stack", 2, 8),
        op("aten::linear", 20, 30, seq=5), op("aten::addmm", 22, 28), op("aten::empty", 31, 32),
        op("autograd::engine::evaluate_function: AddmmBackward0", 40, 60, tid=2, seq=5), op("AddmmBackward0", 42, 58, tid=2, seq=5),
        op("aten::mm", 44, 50, tid=2),
        mark("Optimizer.step#SGD.step", 70, 90), op("aten::_foreach_add_", 72, 88), op("aten::item", 75, 80, tid=2),
        mark("Optimizer.zero_grad#SGD.zero_grad", 91, 95), op("aten::zero_", 92, 94),
    ]  # fmt: skip
    found = linked(*events, on_cpu=True).ops
    phases = dict(found.select(pl.col("name").cast(pl.String), "phase").iter_rows())
    assert phases == {
        "aten::stack": "data", "aten::linear": "forward", "aten::addmm": "forward", "aten::empty": "other",
        "autograd::engine::evaluate_function: AddmmBackward0": "backward", "AddmmBackward0": "backward", "aten::mm": "backward",
        "aten::_foreach_add_": "optimizer", "aten::item": "backward", "aten::zero_": "optimizer",
    }  # fmt: skip


def test_recomputation_inside_the_backward_pass_counts_as_backward() -> None:
    events = [op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 0, 50, seq=1), op("aten::mm", 10, 20, seq=9)]
    assert linked(*events, on_cpu=True).ops["phase"].to_list() == ["backward", "backward"]


def named(*events: dict[str, Any], on_cpu: bool = True) -> dict[str, str | None]:
    found = linked(*steps(0, 1000), *events, on_cpu=on_cpu).ops
    return dict(found.select(pl.col("name").cast(pl.String), "phase").iter_rows())


NODE = op("autograd::engine::evaluate_function: MmBackward0", 40, 60, tid=2, seq=5)


def test_a_trace_without_training_is_forward() -> None:
    assert named(op("aten::mm", 0, 10), op("aten::add", 12, 14)) == {"aten::mm": "forward", "aten::add": "forward"}


def test_reducers_on_the_thread_of_the_engine_are_backward() -> None:
    found = named(op("aten::mm", 0, 5, seq=5), NODE, op("c10d::allreduce_", 70, 80, tid=2), op("aten::sum", 70, 80))
    assert (found["c10d::allreduce_"], found["aten::sum"]) == ("backward", "other")


def test_compiled_code() -> None:
    events = [
        op("CompiledFunction", 0, 30, seq=3), op("triton_poi_fused_add_0", 5, 9), op("Torch-Compiled Region: 1/0", 31, 39),
        op("aten::mm", 33, 35),        op("CompiledFunctionBackward", 50, 90), op("triton_red_fused_sum_1", 60, 65),
    ]  # fmt: skip
    assert list(named(*events).values()) == ["forward"] * 4 + ["backward"] * 2


@pytest.mark.parametrize("name", ["aten::_fused_adamw_", "aten::_foreach_addcdiv_"])
def test_ops_of_an_optimizer_that_marks_nothing(name: str) -> None:
    assert named(op("aten::mm", 0, 5, seq=5), NODE, op(name, 70, 80)) == {
        "aten::mm": "forward", NODE["name"]: "backward", name: "optimizer",
    }  # fmt: skip
    # where the optimizer marks its step, foreach ops outside it clip or average
    assert (
        named(op("aten::mm", 0, 5, seq=5), NODE, op(name, 70, 80), mark("Optimizer.step#X.step", 90, 99), op("x::x", 91, 92))[name]
        == "other"
    )


def test_frames_of_an_optimizer_that_marks_nothing() -> None:
    frame = {"ph": "X", "cat": "python_function", "name": "apex/optimizers/fused_sgd.py(9): step", "pid": 1, "tid": 1, "ts": 70, "dur": 20}
    assert named(op("aten::mm", 0, 5, seq=5), NODE, frame, op("apex::sgd", 75, 80))["apex::sgd"] == "optimizer"


def test_a_batch_that_is_copied_to_the_device_is_data_and_a_constant_of_the_model_is_not() -> None:
    def copied(at: float, correlation: int, size: int) -> list[dict[str, Any]]:
        copy = kernel(at + 3, at + 4, correlation, "Memcpy HtoD (Pageable -> Device)", bytes=size)
        return [
            op("aten::to", at, at + 9, seq=1),
            op("aten::copy_", at + 1, at + 8),
            call(at + 2, correlation, api="cudaMemcpyAsync"),
            copy,
        ]

    events = [*copied(10, 1, 1 << 24), *copied(110, 2, 8), op("aten::index", 200, 220, seq=1), NODE]
    ops = linked(*steps(0, 1000), *events).ops.filter(pl.col("thread") == 0)["phase"].to_list()
    assert ops == ["data", "data", "forward", "forward", "forward"]


@pytest.mark.parametrize(
    ("text", "phase"),
    [("## forward ##", "forward"), ("## backward ##", "backward"), ("## optimizer ##", "optimizer"), ("## zero_grad ##", "optimizer"),
     ("## copy_batch_to_gpu ##", "data"), ("## metrics ##", "other"), ("forward_pass", "forward"), ("model/ForwardPass 3", "forward"),
     ("loss_backward", "backward"), ("bprop", "backward"), ("opt_step", "optimizer"), ("update weights", "optimizer"),
     ("looking_forwards", "other")],
)  # fmt: skip
def test_words_of_the_users_annotations_tell_what_nothing_else_does(text: str, phase: str) -> None:
    events = [op("aten::mm", 0, 5, seq=5), NODE, mark(text, 100, 200), op("fbgemm::permute", 110, 120)]
    assert named(*events)["fbgemm::permute"] == phase


def shares(path: Path) -> dict[str | None, float]:
    trace = kept.tables(path)
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    phase = trace.ops.select(pl.col("id").alias("op"), "phase")
    work = trace.kernels.filter(~pl.col("collective") & pl.col("op").is_not_null()).join(phase, on="op")
    sums = work.group_by("phase").agg(pl.col("busy_ns").sum() / work["busy_ns"].sum())
    return dict(sums.iter_rows())


@pytest.mark.parametrize(
    "name",
    ["v100_resnet50_train_2021_memory_callstack", "rtx2080ti_resnet18_train_noshapes", "v100_ddp2_inductor_train_rank1",
     "mi300x_resnet18_ddp8_actckpt_train_rank0", "a100_dlrm_train_rank3of8"],
)  # fmt: skip
def test_backward_takes_about_twice_as_long_as_forward(traces: Path, name: str) -> None:
    """Two products for each of the forward pass; with checkpointing up to three."""
    found = shares(traces / f"{name}.json.gz")
    assert 1.7 < found["backward"] / found["forward"] < 3
    assert None not in found
    assert found.get("other", 0) < 0.03


@pytest.mark.parametrize("name", ["h100_bert-small", "h100_qwen1.5-0.5b_prefill", "mi300x_flux1_xdit_compiled"])
def test_inference_is_forward_and_a_little_data(traces: Path, name: str) -> None:
    found = shares(traces / f"{name}.json.gz")
    assert found["forward"] > 0.97
    assert set(found) <= {"forward", "data"}


def test_a_closure_within_an_update_is_forward_and_backward() -> None:
    events = [
        mark("Optimizer.step#LBFGS.step", 0, 100), op("aten::dot", 1, 2),
        mark("Optimizer.zero_grad#LBFGS.zero_grad", 5, 9), op("aten::zero_", 6, 8, seq=4),
        op("aten::mm", 10, 20, seq=5), op("autograd::engine::evaluate_function: MmBackward0", 40, 60, seq=5), op("aten::bmm", 45, 50),
        op("aten::lerp", 90, 95),
    ]  # fmt: skip
    assert named(*events) == {
        "aten::dot": "optimizer", "aten::zero_": "optimizer", "aten::mm": "forward",
        "autograd::engine::evaluate_function: MmBackward0": "backward", "aten::bmm": "backward", "aten::lerp": "optimizer",
    }  # fmt: skip


def test_an_update_in_a_hook_of_the_backward_pass_is_the_optimizers() -> None:
    events = [
        op("aten::mm", 10, 20, seq=5),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 40, 90),
        mark("Optimizer.step#SGD.step", 50, 80), op("aten::_foreach_add_", 55, 60),
    ]  # fmt: skip
    assert named(*events)["aten::_foreach_add_"] == "optimizer"


def test_an_update_that_was_written_without_no_grad_is_the_optimizers() -> None:
    assert named(NODE, mark("Optimizer.step#Mine.step", 70, 90), op("aten::mul_", 72, 80, seq=9))["aten::mul_"] == "optimizer"


@pytest.mark.needs("torch")
def test_lbfgs_as_torch_records_it(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        for _ in range(3):
            optimizer.step(closure)
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    made = read_trace(tmp_path / "trace.json")
    ops = link_kernels(made, find_steps(made).table, on_cpu=True)[0].ops.with_columns(pl.col("name").cast(pl.String))
    found = {name: set(rows["phase"]) for (name,), rows in ops.group_by("name")}
    assert (found["aten::linear"], found["AddmmBackward0"]) == ({"forward"}, {"backward"})
    assert set(ops["phase"]) >= {"forward", "backward", "optimizer"}

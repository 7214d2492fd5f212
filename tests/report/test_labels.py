"""Names as people read them: call sites, kernels, collectives."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.report import CollectiveRow
from gpudiag.report import labels

MS = sample.MS


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("/home/me/project/models/resnet.py(89): forward", "models/resnet.py:89 forward"),
        ("train.py(3): <module>", "train.py:3 <module>"),
        (r"C:\work\train.py(3): main", "work/train.py:3 main"),
        ("no site at all", "no site at all"),
        (None, ""),
    ],
)
def test_a_site_keeps_the_end_of_its_path(where: str | None, text: str) -> None:
    assert labels.format_site(where) == text


@given(st.text())
def test_any_text_can_stand_as_a_site_or_kernel(text: str) -> None:
    assert isinstance(labels.format_site(text), str)
    assert labels.format_kernel_name(text) or not text


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "AllReduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "SendRecv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "generic NCCL kernel"),
        ("allreduce", "allreduce"),
    ],
)
def test_collectives_are_named_by_what_they_do(kernel: str, collective: str) -> None:
    assert labels.name_collective(kernel) == collective


def test_kernel_names_begin_with_what_differs() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
    assert labels.format_kernel_name(name) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>"


def test_communication_records_are_named_by_the_collective_they_sum() -> None:
    known = CollectiveRow(name="allreduce", count=16, kernel_ns=20 * MS, size=8, bytes=17_600_000)
    other = CollectiveRow(name="broadcast", count=3, kernel_ns=MS)
    rows = (
        sample.op("record_param_comms", 20, count=16),
        sample.op("record_param_comms", 7, count=16),
        sample.op("ncclDevKernel_AllGather_RING_LL(x)", 1),
    )
    name = labels.build_op_namer(sample.report(ops=rows, collectives=(known, other)))
    assert [name(row) for row in rows] == [
        "allreduce 17.6 MB over 8 ranks",
        "allreduce or broadcast",  # not known which of the two
        "AllGather",
    ]
    only = labels.build_op_namer(sample.report(ops=rows, collectives=(known,)))
    assert only(rows[1]) == "allreduce"


def test_three_kinds_of_collectives_are_not_listed() -> None:
    kinds = tuple(CollectiveRow(name=name, count=1, kernel_ns=1) for name in ("allreduce", "broadcast", "allgather"))
    row = sample.op("record_param_comms", 7)
    assert labels.build_op_namer(sample.report(collectives=kinds))(row) == "collective"
    assert labels.build_op_namer(sample.report(collectives=()))(row) == "collective"


def test_work_from_before_the_recording_is_said_in_plain_words() -> None:
    assert labels.format_phase(sample.op("kernel", 1, phase="before the window")) == "launched before the recording"
    assert labels.format_phase(sample.op("kernel", 1)) == ""


def test_collectives_of_a_real_training_run_have_names(traces: Path) -> None:

    report = kept.report(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    largest = max((row for row in report.ops if row.name == "record_param_comms"), key=lambda row: row.kernel_ns)
    assert labels.build_op_namer(report)(largest) == "allreduce 17.6 MB over 8 ranks"
    assert largest.signature == "1 tensor"

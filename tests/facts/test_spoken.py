"""Names that traces write for machines, as people say them."""

from __future__ import annotations

import pytest

from gpudiag.model.event_labels import describe_event, read_evidence
from gpudiag.model.notices import format_notice


@pytest.mark.parametrize(
    ("coded", "written", "said"),
    [
        (None, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "next batch, made by a DataLoader without workers"),
        (None, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "next batch, from the workers of a DataLoader"),
        (("of_site_window", "step() of adam.py", None), "step() of adam.py (by the site window)", "step() of adam.py"),
        (
            ("call_waited", "Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync"),
            "cudaMemcpyAsync waited for Memcpy DtoH (Device -> Pageable)",
            "cudaMemcpyAsync waited for Memcpy DtoH (Device -> Pageable)",
        ),
        (
            ("call_waited", "void at::native::reduce_kernel<512, 1, at::na", "hipDeviceSynchronize"),
            "hipDeviceSynchronize waited for void at::native::reduce_kernel<512, 1, at::na",
            "hipDeviceSynchronize waited for reduce_kernel",
        ),
        (
            ("first_launch_loaded", "void at::native::batch_norm_collect_statistics_kernel<at::na", None),
            "first launch of void at::native::batch_norm_collect_statistics_kernel<at::na: its code was loaded",
            "code of batch_norm_collect_statistics_kernel loaded at its first launch",
        ),
        (
            ("first_launch_slow", "void at::native::reduce_kernel<512", "19 ms"),
            "first launch of void at::native::reduce_kernel<512: the call itself took 19 ms (the first use of a kernel loads its code)",
            "first launch of reduce_kernel took 19 ms (the first use of a kernel loads its code)",
        ),
        (("launch_call_slow", None, "3 ms"), "the launch call itself took 3 ms", "the launch call itself took 3 ms"),
        (None, "in aten::mm", "in aten::mm"),
        (None, "", ""),
    ],
)
def test_events_are_said_without_what_only_machines_need(coded: tuple[str, str | None, str | None] | None, written: str, said: str) -> None:
    notice = None if coded is None else read_evidence(*coded)
    assert describe_event(written, notice) == said
    assert notice is None or format_notice(notice) == written

"""Names that traces write for machines, as people say them."""

from __future__ import annotations

import pytest

from gpudiag.facts.event_labels import describe_event


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "next batch, made by a DataLoader without workers"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "next batch, from the workers of a DataLoader"),
        ("step() of adam.py (by the site window)", "step() of adam.py"),
        ("cudaMemcpyAsync waited for Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync waited for Memcpy DtoH (Device -> Pageable)"),
        ("hipDeviceSynchronize waited for void at::native::reduce_kernel<512, 1, at::na", "hipDeviceSynchronize waited for reduce_kernel"),
        (
            "first launch of void at::native::batch_norm_collect_statistics_kernel<at::na: its code was loaded",
            "code of batch_norm_collect_statistics_kernel loaded at its first launch",
        ),
        (
            "first launch of void at::native::reduce_kernel<512: the call itself took 19 ms (the first use of a kernel loads its code)",
            "first launch of reduce_kernel took 19 ms (the first use of a kernel loads its code)",
        ),
        ("in aten::mm", "in aten::mm"),
        ("", ""),
    ],
)
def test_events_are_said_without_what_only_machines_need(written: str, said: str) -> None:
    assert describe_event(written) == said

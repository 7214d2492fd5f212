"""Which device a trace is of."""

from __future__ import annotations

from handmade import A100_PROPERTIES, call, kernel, mark, op, trace

from gpudiag.attribution.device import classify_run, find_busiest_device


def test_kinds_of_runs() -> None:
    assert classify_run(trace(op("aten::mm", 0, 5), call(1, 1), kernel(2, 9, 1))) == "gpu"
    assert classify_run(trace(op("aten::mm", 0, 5), call(1, 1))) == "gpu without events"
    assert classify_run(trace(op("aten::mm", 0, 5), deviceProperties=[A100_PROPERTIES])) == "gpu without events"
    assert classify_run(trace(op("aten::mm", 0, 5))) == "cpu"
    assert classify_run(trace(mark("epoch", 0, 5))) == "cpu without ops"


def test_the_busiest_device_is_that_with_the_most_work_not_the_most_events() -> None:
    made = trace(kernel(0, 50, 1, device=3), *(kernel(n, n + 1, 2 + n, device=1) for n in range(9)), kernel(0, 20, 90, device=0))
    assert find_busiest_device(made.kernels) == (3, (0, 1))
    assert find_busiest_device(trace(op("aten::mm", 0, 5)).kernels) == (None, ())

"""What-ifs on small steps, worked by hand, and the laws that hold for all of them."""

from __future__ import annotations

from unittest import mock

import msgspec
import numpy as np
import polars as pl
import pytest
import smallgraphs as small
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.errors import InputError
from gpudiag.model.graph import Graph
from gpudiag.model.hardware import Device
from gpudiag.timeline.replay import steady_step_ns
from gpudiag.timeline.whatif.base import WhatIfContext, read_times, set_kernel_times
from gpudiag.timeline.whatif.registry import KINDS, parse_settings
from gpudiag.timeline.whatif.study import Study, replay_changed_step

TENTH_OF_A_GB = Device(id="d", name="d", kind="gpu", provenance="datasheet", source="test", bandwidth_byte_per_s=1e9)
"""A device that moves 1,000 bytes in 1 us."""


def study(*graphs: Graph, trace: small.Trace | None = None) -> Study:
    graphs = graphs or (small.launch_bound(),)
    context = WhatIfContext(trace or small.launch_bound_trace(), on_cpu=False, device=TENTH_OF_A_GB, syncs=small.launch_bound_syncs())
    return Study(graphs, {0: "ProfilerStep#1"}, context)


def step_us(*texts: str, of: Study | None = None) -> float:
    return (of or study()).what_if(parse_settings(texts)).changed_ns / 1000


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("loader=0", 230),  # the loader's 100 us go
        ("loader=0.5", 280),
        ("host=0.5", 245),  # 150 us of Python and 20 us of launch calls are halved; what they wait for is not
        ("sync=0", 270),  # the host goes on: nothing but its own time is left
        ("sync=train.py:42", 270),
        ("sync=train.py", 270),
        ("sync=cudaStreamSynchronize", 270),
        ("sync=aten::add", 270),
        ("sync=add", 270),
        # data 100 + Python 50; launches take no time: kernel 0 155..195, 1 us later kernel 1 196..236, then 10 us and 5 us of the wait
        ("launch=0", 251),
        ("launch=0.5", 270),  # 10 + 100 + 10 us of the step's launching are halved, what lies before is not
        ("kernel:k1=0.5", 310),
        ("kernel:aten::mul=0", 290),
        ("kernel:K=0.5", 310),
        ("roof=1", 330),  # kernel 0 is not on the path, kernel 1 is faster than its roof
    ],
)  # fmt: skip
def test_a_change_gives_the_step_that_follows_by_hand(text: str, step: float) -> None:
    assert step_us(text) == pytest.approx(step)


def test_a_fused_chain_is_one_kernel_of_its_outer_bytes_with_one_launch() -> None:
    # 24,000 bytes less 2 x 4,000 between the two: 16,000 at 0.85 GB/s are 18.8 us; op 1 and its launch are gone; its end is waited for
    assert step_us("fused") == pytest.approx(160 + 5 + 16 / 0.85 + 10 + 5, abs=0.01)


def test_what_facts_asked_for_is_not_replayed_again_for_the_table() -> None:
    asked, replayed = study(), mock.Mock(side_effect=steady_step_ns)
    with mock.patch("gpudiag.timeline.whatif.study.steady_step_ns", replayed):
        first = [one for one in asked.standard() if one.name.startswith("sync")]
        count = replayed.call_count
        assert asked.saved_share(parse_settings(["sync=0"])) == pytest.approx(first[0].share)
        assert replayed.call_count == count


def test_several_changes_at_once_give_at_least_as_much_as_the_best_alone() -> None:
    both = step_us("launch=0", "loader=0")
    assert both == pytest.approx(151)
    assert both <= min(step_us("launch=0"), step_us("loader=0"))


def test_the_order_in_which_they_are_named_changes_nothing() -> None:
    one, other = study().what_if(parse_settings(["sync=0", "fused", "roof"])), study().what_if(parse_settings(["roof", "sync=0", "fused"]))
    assert one == other
    assert one.name == "roof, fused, sync=0"


def test_the_result_says_what_was_assumed_step_by_step() -> None:
    found = study().what_if(parse_settings(["loader=0"]))
    assert found.step_ns == 330_000
    assert found.share == pytest.approx(100 / 330)
    assert found.per_step_ns == (("ProfilerStep#1", 330_000.0, 230_000.0),)
    assert "loader" in found.words


def test_a_larger_batch_is_judged_by_time_per_sample() -> None:
    # both kernels work on the batch of 10. k0 (memory) takes 80 us, its queue is free; k1 (overhead) could take its 40 us still, but its
    # roof is 160 us then: it doubles; the loader takes 100 us more: k1 begins at 375 and lasts until 455, then 10 us and 5 us
    found = study().what_if(parse_settings(["batch=2"]))
    assert found.changed_ns == pytest.approx(470_000)
    assert found.share == pytest.approx(1 - 470 / 2 / 330)
    assert found.notes == ("gain per sample: a step has 2 x the samples, and a training then differs",)


def test_kernels_that_leave_sms_empty_take_no_longer_with_twice_the_batch() -> None:
    tables = small.launch_bound_trace()
    half_a_wave = tables.kernels.with_columns(waves=0.5, t_roof_ns=pl.lit(1_000.0), bound=pl.lit("compute"))
    of = study(trace=msgspec.structs.replace(tables, kernels=half_a_wave))
    assert step_us("batch=2", of=of) == pytest.approx(430)  # only the loader takes longer
    assert step_us("batch=4", of=of) == pytest.approx(330 + 300 + 40)  # two waves


def test_work_on_weights_alone_and_of_the_optimizer_does_not_grow() -> None:
    tables = small.launch_bound_trace()
    kinds = tables.kernels.with_columns(bound=pl.lit("memory"), t_roof_ns=pl.lit(1_000.0))
    doubled = msgspec.structs.replace(tables, kernels=kinds)
    assert step_us("batch=2", of=study(trace=doubled)) == pytest.approx(470)
    shapes = tables.signatures.vstack(tables.signatures.with_columns(id=pl.lit(1, pl.Int64), shapes=pl.lit("[[768, 100], [768, 100]]")))
    for phase in ("forward", "optimizer"):
        ops = tables.ops.with_columns(signature=pl.Series([0, 1]), phase=pl.Series(["forward", phase]))
        context = WhatIfContext(msgspec.structs.replace(doubled, ops=ops, signatures=shapes), on_cpu=False, samples=10)
        assert Study([small.launch_bound()], {}, context).what_if(parse_settings(["batch=2"])).changed_ns == pytest.approx(430_000)


def test_where_shapes_are_not_known_nothing_is_said_of_the_batch() -> None:
    tables = small.launch_bound_trace()
    blind = msgspec.structs.replace(tables, ops=tables.ops.with_columns(signature=pl.lit(None, pl.Int64)))
    with pytest.raises(InputError, match="shapes of most of the kernel time are not known"):
        study(trace=blind).what_if(parse_settings(["batch=2"]))


def _with_copy() -> tuple[Graph, small.Trace]:
    """Return a step of 100 us: a copy to the device of 30 us that blocks the host, a kernel of 20, a read of the result."""
    nodes = [
        small.node("launch", 0, 5, launch=0),
        small.node("copy", 5, 35, kernel=0),
        small.node("sync", 35, 40, launch=1),
        small.node("launch", 40, 45, launch=2),
        small.node("kernel", 45, 65, kernel=1),
        small.node("copy", 65, 75, kernel=2),
        small.node("sync", 75, 100, launch=3),
    ]
    edges = [
        small.edge(0, 1), small.edge(1, 2, "launch"), small.edge(1, 3), small.edge(2, 3, "sync"), small.edge(3, 4),
        small.edge(4, 5, "launch"), small.edge(2, 5, "stream"), small.edge(5, 6, "stream"), small.edge(4, 7), small.edge(6, 7, "sync"),
    ]  # fmt: skip
    names = ("Memcpy HtoD (Pageable -> Device)", "gemm", "Memcpy DtoH (Device -> Pinned)")
    return small.graph(nodes, edges, end=100, last_host=7), small.trace(kernels=[{"name": name} for name in names])


@pytest.mark.parametrize("copied", [30, 0])
def test_what_the_host_spends_in_a_pageable_copy_is_part_of_the_copy(copied: float) -> None:
    # the call stages the data for 40 us before the copy, and for its 30 us waits; in a trace of whole us a small copy takes 0
    nodes = [
        small.node("sync", 0, 40, launch=0),
        small.node("copy", 40, 40 + copied, kernel=0),
        small.node("host", 40 + copied, 60 + copied),
    ]
    edges = [small.edge(0, 1), small.edge(1, 2, "launch"), small.edge(1, 3), small.edge(2, 3, "sync")]
    trace = small.trace(kernels=[{"name": "Memcpy HtoD (Pageable -> Device)", "launch": 0}])
    of = study(small.graph(nodes, edges, end=60 + copied, last_host=3), trace=trace)
    assert step_us("host=1", of=of) == pytest.approx(60 + copied)
    assert step_us("copies=overlapped", of=of) == pytest.approx(max(20, copied))


def test_overlapped_copies_do_not_block_but_a_result_that_is_read_is_waited_for() -> None:
    graph, trace = _with_copy()
    # launch 5, sync call 5, launch 5, kernel 20 (after its launch at 15), sync call 25 after the copy of no length
    assert step_us("copies=overlapped", of=study(graph, trace=trace)) == pytest.approx(60)


def test_a_step_is_not_shorter_than_what_was_moved_to_a_lane_of_its_own() -> None:
    nodes = [small.node("launch", 0, 5, launch=0), small.node("communication", 5, 95, kernel=0), small.node("sync", 95, 100, launch=1)]
    edges = [small.edge(0, 1), small.edge(1, 2, "launch"), small.edge(1, 3), small.edge(2, 3, "sync")]
    graph = small.graph(nodes, edges, end=100, last_host=3)
    assert step_us("communication=overlapped", of=study(graph)) == pytest.approx(90)


def test_kernel_times_replays_the_step_with_other_kernels() -> None:
    graph = small.launch_bound()
    measured = np.array([40_000.0, 40_000.0])
    assert replay_changed_step(graph, set_kernel_times(graph, read_times(graph), np.array([np.nan, 10_000.0]), measured)) == 300_000
    assert replay_changed_step(graph, set_kernel_times(graph, read_times(graph), np.array([np.nan, np.nan]), measured)) == 330_000
    assert study().share_with_kernels(np.array([np.nan, 10_000.0])) == pytest.approx(30 / 330)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lunch=0", r"no such what-if; did you mean 'launch'\? \(`gpudiag whatif --list` lists them\)$"),
        ("zzz=0", "no such what-if.*batch=2.*launch=0"),
        ("loader=-1", "from 0 to 10"),
        ("loader=fast", "from 0 to 10"),
        ("loader=nan", "from 0 to 10"),
        ("loader", "from 0 to 10"),
        ("loader:x=0", "no such what-if"),
        ("batch=0.5", "from 1 to 1024"),
        ("roof=0", "from 0.01 to 1"),
        ("copies=1", "the value is 'overlapped'"),
        ("gc=0", "hold no garbage collection.*there are batch=2"),
        ("kernel=0", "needs a name"),
        ("kernel:conv=0", "no kernel or op of that name"),
        ("sync=other.py:42", "no such call waits"),
        ("sync=train.py:4", "no such call waits"),
        ("sync=rain.py:42", "no such call waits"),
        ("communication=overlapped", "hold no collective"),
        ("fused=3", "takes no value"),
        ("\n\x1b[31m=0", "no such what-if"),
    ],
)
def test_what_does_not_exist_or_does_not_apply_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        study().what_if(parse_settings([text]))
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "texts",
    [("launch=0", "launch=0.5"), ("host=0", "host=2"), ("fused", "fused"), ("kernel:gemm=0", "kernel:gemm=2"), ("sync=0", "sync=0")],
)
def test_one_thing_has_one_value(texts: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=r"^\S+ is given more than once"):
        parse_settings(texts)


def test_several_kernels_and_several_places_may_be_changed_at_once() -> None:
    texts = ["kernel:gemm=0.5", "kernel:relu=0.5", "sync=train.py:42", "sync=aten::item"]
    assert [str(setting) for setting in parse_settings(texts)] == texts


def test_the_standard_table_holds_what_applies_largest_gain_first() -> None:
    found = study().standard()
    names = [what_if.name for what_if in found]
    assert set(names) == {"launch=0", "loader=0", "sync=0", "host=0.5", "fused", "roof=0.8", "batch=2"}
    gains = [what_if.share for what_if in found]
    assert gains == sorted(gains, reverse=True)


def test_every_kind_says_its_values_and_what_is_missing_where_it_does_not_apply() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.values
        assert kind.absent


def _random(seed: int, count: int) -> Graph:
    """Return a step of `count` launches of kernels with loader waits, collections and waits between them, replayed to be consistent."""
    random = np.random.default_rng(seed)
    nodes, edges, host, work, t, free = [], [], 0, -1, 0.0, 0.0
    for kernel in range(count):
        kind = str(random.choice(["host", "data", "gc", "io", "compile", "allocation", "profiler"]))
        for word, length in ((kind, random.integers(0, 60)), ("launch", random.integers(1, 10))):
            nodes.append(small.node(word, t, t + length, launch=kernel if word == "launch" else -1))
            edges.append(small.edge(host, len(nodes)))
            host, t = len(nodes), t + length
        wait = float(random.choice([0, 0, 0, 70]))  # nothing explains it
        start = max(t + 5 + wait, free + 2 + wait)
        free = start + random.integers(1, 80)
        work_kind = str(random.choice(["kernel", "copy", "communication"]))
        nodes.append(small.node(work_kind, start, free, kernel=kernel if work_kind == "kernel" and kernel < 2 else -1))
        edges.append(small.edge(host, len(nodes), "launch", 5, wait))
        edges += [small.edge(work, len(nodes), "stream", 2, wait)] if work >= 0 else []
        work = len(nodes)
        if random.random() < 0.3:
            t = max(t, free + 4) + 3
            nodes.append(small.node("sync", t - 3, t, launch=count + kernel))
            edges += [small.edge(host, len(nodes)), small.edge(work, len(nodes), "sync", 4)]
            host = len(nodes)
    made = small.graph(nodes, edges, end=t, last_host=host)
    return msgspec.structs.replace(made, queue_limit=int(random.choice([2, 5, 1024])), alone=bool(random.random() < 0.2))


REMOVALS = (
    "loader=0",
    "gc=0",
    "io=0",
    "launch=0",
    "launch=0.5",
    "host=0.5",
    "sync=0",
    "copies=overlapped",
    "communication=overlapped",
    "roof=1",
    "fused",
    "allocation=0",
    "compile=0",
    "profiler=0",
    "kernel:k0=0.5",
)


@given(
    st.integers(0, 2**32),
    st.integers(2, 12),
    st.lists(st.sampled_from(REMOVALS), min_size=1, max_size=4, unique_by=lambda text: text.split("=")[0]),
)
@settings(max_examples=100, deadline=None)
def test_removing_costs_never_lengthens_and_more_of_it_never_gives_less(seed: int, count: int, texts: list[str]) -> None:
    """Gain >= 0; all at once at least the best alone; a what-if that is about nothing changes nothing."""
    of = study(_random(seed, count))
    before, shares = of.step_ns[0], []
    usable = []
    for text in texts:
        try:
            shares.append(of.what_if(parse_settings([text])).changed_ns)
        except InputError:
            continue
        usable.append(text)
        assert shares[-1] <= before + 1
    if usable:
        assert of.what_if(parse_settings(usable)).changed_ns <= min(shares) + 1


@pytest.mark.parametrize("text", ["launch=0", "fused", "host=0"])
def test_waits_that_nothing_explains_stay(text: str) -> None:
    """The second kernel begins 100 us later than anything tells; only the launch before it and its normal latency may go."""
    plain = small.launch_bound()
    late = plain.dst == 7
    waiting = msgspec.structs.replace(plain, free_ns=np.where(late, 100_000, plain.free_ns))
    assert step_us(text, of=study(waiting)) >= step_us(text) + 90
    assert step_us(text, of=study(waiting)) > 100 + 40


def test_what_changes_of_the_part_of_a_kernel_that_the_next_one_leaves_changes_of_the_whole() -> None:
    """Programmatic dependent launch: of 40 us the next kernel overlaps 8. At half of its time it is 16 us until then, not 20 of 32."""
    graph = small.launch_bound()
    cut = msgspec.structs.replace(graph, duration_ns=np.where(graph.kernel == 1, 32_000, graph.duration_ns))
    times = set_kernel_times(cut, read_times(cut), np.array([np.nan, 20_000.0]), np.array([40_000.0, 40_000.0]))
    assert times.duration_ns[graph.kernel == 1].tolist() == [16_000]
    # twice changed: the second goes on from the first
    again = set_kernel_times(cut, times, np.array([np.nan, 10_000.0]), np.array([40_000.0, 40_000.0]))
    assert again.duration_ns[graph.kernel == 1].tolist() == [8_000]


@pytest.mark.parametrize("roof", [0.0, 1e300, 1.7e308, np.inf])
@pytest.mark.filterwarnings("error")
def test_impossible_peaks_give_no_nonsense(roof: float) -> None:
    tables = small.launch_bound_trace()
    odd = msgspec.structs.replace(tables, kernels=tables.kernels.with_columns(t_roof_ns=pl.lit(roof)))
    assert 330 <= step_us("batch=1024", of=study(trace=odd)) <= 330 * 1024
    of = study(trace=odd)
    if roof < 1:
        assert step_us("roof=0.8", of=of) == pytest.approx(290)
    else:
        with pytest.raises(InputError, match="no kernel has a known roofline"):
            of.what_if(parse_settings(["roof=0.8"]))


def test_a_device_without_peaks_has_no_roofline_although_a_view_has_no_work() -> None:
    tables = small.launch_bound_trace()
    views = msgspec.structs.replace(tables, kernels=tables.kernels.with_columns(t_roof_ns=pl.lit(0.0)))
    unknown = msgspec.structs.replace(TENTH_OF_A_GB, bandwidth_byte_per_s=None, peaks={})
    of = Study((small.launch_bound(),), {0: "ProfilerStep#1"}, WhatIfContext(views, on_cpu=False, device=unknown))
    assert all(found.name != "roof=0.8" for found in of.standard())
    with pytest.raises(InputError, match="no kernel has a known roofline"):
        of.what_if(parse_settings(["roof=0.8"]))


def test_where_nothing_matches_in_one_of_the_steps_that_step_stays() -> None:
    plain = small.launch_bound()
    quiet = msgspec.structs.replace(plain, step=1, kind=np.where(plain.kind == plain.kind[1], 0, plain.kind).astype(np.int8))
    found = study(plain, quiet).what_if(parse_settings(["loader=0"]))
    assert [after for _, _, after in found.per_step_ns] == [230_000.0, 330_000.0]
    assert found.per_step_ns[1][0] == "1"


def test_a_run_of_the_cpu_has_no_launches_to_remove() -> None:
    cpu = small.graph(
        [small.node("host", 0, 50, kernel=0), small.node("host", 50, 60)], [small.edge(0, 1), small.edge(1, 2)], end=60, last_host=2
    )
    of = Study([cpu], {}, WhatIfContext(small.launch_bound_trace(), on_cpu=True))
    with pytest.raises(InputError, match="no launch was recorded"):
        of.what_if(parse_settings(["launch=0"]))
    assert of.what_if(parse_settings(["host=0.5"])).changed_ns == 55_000  # the op is work, not host time
    assert of.what_if(parse_settings(["kernel:aten::add=0.5"])).changed_ns == 35_000
    assert pl.Series(of.step_ns).to_list() == [60_000.0]

"""The host's time without the profiler's part, worked out by hand (times in us)."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel, mark

from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.model.finding import Missing


def starved(slowdown: float | None, idle: float = 400) -> Facts:
    """One step of 1000 us of which the GPU waits `idle` for the host."""
    made = analysis([kernel("aten::mm", 0, 1000 - idle)], idle=[gap(1000 - idle, 1000, cause="idle_launch")], slowdown=slowdown)
    return Facts(made)


def test_what_the_profiler_adds_is_taken_out_of_the_wait_and_of_the_step() -> None:
    # 1000 us are 1.25 x 800 us: of the 400 us of waiting 200 may be the profiler's, and 200 of a plain step of 800 us remain
    facts = starved(1.25)
    assert facts.value("profiler_added_ns") == pytest.approx(200 * US)
    assert facts.value("issuing_ns") == 400 * US
    assert facts.value("host_idle_ns") == pytest.approx(200 * US)
    assert facts.value("host_idle_share") == pytest.approx(200 / 800)
    assert facts.value("profiler_in_host_ns") == pytest.approx(200 * US)
    assert facts.value("without_dispatch_ns") == pytest.approx(250 * US)  # as large a share of the recorded step


@pytest.mark.parametrize("slowdown", [None, 1.0, 0.9])
def test_nothing_is_taken_out_where_the_profiler_adds_nothing_or_nobody_knows(slowdown: float | None) -> None:
    facts = starved(slowdown)
    assert facts.value("host_idle_ns") == 400 * US
    assert facts.value("host_idle_share") == pytest.approx(0.4)
    added = facts.value("profiler_added_ns")
    assert isinstance(added, Missing) if slowdown is None else added == 0


def test_it_is_never_less_than_nothing() -> None:
    assert starved(1.5, idle=100).value("host_idle_ns") == 0


def test_waits_for_the_device_bear_their_part() -> None:
    # 200 us of 400 + 100 us are the profiler's: 40 % of each
    gaps = [gap(500, 900, cause="idle_launch"), gap(900, 1000, cause="idle_sync")]
    facts = Facts(analysis([kernel("aten::mm", 0, 500)], idle=gaps, slowdown=1.25))
    assert facts.value("host_idle_ns") == pytest.approx(240 * US)


def test_tiny_ops_of_a_cpu_are_dispatch_beyond_their_roofline() -> None:
    # 3 calls of 10 us with 1 us of work, one of them interrupted for 300 us; a large product is work
    tiny = [kernel("aten::add", 20 * i, 20 * i + 10, shapes=[[4]], bound="overhead", t_roof=1) for i in range(3)]
    slow = kernel("aten::add", 100, 400, shapes=[[4]], bound="memory", t_roof=1)
    product = kernel("aten::mm", 400, 900, shapes=[[512, 512], [512, 512]], bound="compute", t_roof=400)
    facts = Facts(analysis([*tiny, slow, product], idle=[gap(900, 1000, cause="idle_launch")], device=CPU))
    assert facts.value("issuing_ns") == (100 + 3 * 9 + 299) * US
    on_gpu = Facts(analysis([*tiny, slow, product], idle=[gap(900, 1000, cause="idle_launch")]))
    assert on_gpu.value("issuing_ns") == 100 * US


def test_tiny_ops_that_make_a_batch_are_the_loaders() -> None:
    # two ops of 10 us with 1 us of work, one of them inside the loader's __next__, which is counted whole as waiting for data
    tiny = [kernel("aten::cat", 20 * i, 20 * i + 10, shapes=[[4]], bound="overhead", t_roof=1) for i in range(2)]
    batch = mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 15)
    facts = Facts(analysis(tiny, idle=[gap(900, 1000, cause="idle_launch")], marks=[batch], device=CPU))
    assert facts.value("issuing_ns") == (100 + 9) * US
    assert facts.value("loader_wait_ns") == 15 * US


def test_a_host_that_only_the_profiler_holds_up_is_withheld_not_passed() -> None:
    made = analysis([kernel("aten::mm", 0, 800)], idle=[gap(800, 1000, cause="idle_launch")], slowdown=1.25)
    outcome = next(found for found in judge(made, load_rules()).outcomes if found.id == "OVH-01")
    assert outcome.status == "not_applicable"
    assert outcome.reason.startswith("withheld: a step is 1.25 times as long with the profiler, 200 us more")
    fine = analysis([kernel("aten::mm", 0, 950)], idle=[gap(950, 1000, cause="idle_launch")], slowdown=1.25)
    assert next(found for found in judge(fine, load_rules()).outcomes if found.id == "OVH-01").status == "passed"


def test_own_code_is_the_pause_in_which_nothing_is_issued_and_dispatch_the_rest() -> None:
    # a step of 10 ms: forty ops of 20 us, 80 us apart; then 6 ms in which the host issues nothing
    ops = [kernel("aten::add", 100 * i, 100 * i + 20) for i in range(40)]
    gaps = [gap(100 * i + 20, 100 * i + 100, cause="idle_launch") for i in range(39)]
    pause = gap(3920, 9900, cause="idle_launch")
    facts = Facts(analysis([*ops, kernel("aten::mm", 9900, 10_000)], idle=[*gaps, pause], device=CPU, wall=10_000))
    assert facts.value("own_code_ns") == 5980 * US
    assert facts.value("dispatch_idle_ns") == 39 * 80 * US
    assert facts.value("own_code_share") == pytest.approx(0.598)
    assert facts.value("without_own_code_ns") == pytest.approx(5980 * US)


@pytest.mark.parametrize(("phase", "own"), [("other", 19 * 200), ("forward", 0)])
def test_pauses_between_ops_of_no_pass_are_own_code_from_a_tenth_of_a_millisecond_on(phase: str, own: int) -> None:
    # a backward pass, then texts that are split one by one (200 us each) or layers of a module; after each an op of 20 us
    ops = [kernel("aten::mm", 0, 100, phase="backward")]
    ops += [kernel("aten::add", 120 + 220 * i, 140 + 220 * i, phase=phase) for i in range(20)]
    gaps = [gap(140 + 220 * i, 340 + 220 * i, cause="idle_launch") for i in range(19)]
    facts = Facts(analysis(ops, idle=[gap(100, 120, cause="idle_launch"), *gaps], device=CPU, wall=4320))
    assert facts.value("own_code_ns") == own * US
    assert facts.value("dispatch_idle_ns") == (20 + 19 * 200 - own) * US


@pytest.mark.parametrize(
    ("site", "evidence", "own"),
    [
        (
            "envs.py(12): step",
            "step() of envs.py",
            5 * 80,
        ),  # an environment, between the policy's ops: a tenth of a millisecond would miss it
        ("envs.py(20): act", "act() of envs.py", 0),  # the function that calls the ops
        ("envs.py(12): step", "_call_impl() of module.py", 0),  # what the framework does for it
    ],
)
def test_functions_of_the_program_that_call_no_op_are_its_own_code(site: str, evidence: str, own: int) -> None:
    ops = [kernel("aten::mm", 100 * i, 100 * i + 20, phase="forward") for i in range(10)]
    gaps = [
        gap(100 * i + 20, 100 * i + (100 if i < 5 else 39), cause="idle_launch", site=site, evidence=f"{evidence} (by the site window)",
            evidence_name=evidence) for i in range(10)
    ]  # fmt: skip
    made = analysis(ops, idle=gaps, device=CPU, wall=1000)
    sites = made.sites.clear().extend(pl.Series(["envs.py(20): act"] * made.trace.ops.height))
    facts = Facts(msgspec.structs.replace(made, sites=sites))
    assert facts.value("own_code_ns") == own * US


@pytest.mark.parametrize(
    ("evidence", "waits"),
    [("poll() (by the site window)", 600), ("acquire() of lock", 600), ("wait() of distributed_c10d.py", 0), ("wait() of Work", 0)],
)
def test_a_cpu_that_waits_for_another_program_waits_for_the_loops_own_code(evidence: str, waits: int) -> None:
    # a step of 1 ms that asks another program for 600 us; of another rank the waits are communication
    passes = [kernel("aten::mm", 0, 200, phase="forward"), kernel("aten::mm", 200, 400, phase="backward")]
    asks = gap(400, 1000, cause="idle_sync", site="train.py(9): ask", evidence=evidence, evidence_name=evidence)
    made = analysis(passes, idle=[asks], device=CPU, wall=1000)
    facts = Facts(made)
    assert facts.value("own_code_ns") == facts.value("without_own_code_ns") == waits * US
    told = next(found for found in judge(made, load_rules()).outcomes if found.id == "OVH-08")
    assert told.status == ("fired" if waits else "passed")
    assert Facts(analysis(passes, idle=[asks], wall=1000)).value("own_code_ns") == 0  # a wait for the GPU


def test_the_profiler_has_no_part_in_a_pause_and_its_bound_holds_what_lies_around_it() -> None:
    # of a recorded step of 10 ms the profiler added 0.1 ms: all of it to the ops, none to the 5 ms in which the program made a batch;
    # the tensors of that batch (8 ops of the loop's own code, with 400 us of pauses) go with it
    made = [kernel("aten::copy_", 5000 + 100 * i, 5050 + 100 * i, phase="other") for i in range(8)]
    passes = [kernel("aten::mm", 5800 + 100 * i, 5850 + 100 * i, phase="backward" if i > 20 else "forward") for i in range(42)]
    pauses = [gap(0, 5000, cause="idle_launch"), *(gap(at, at + 50, cause="idle_launch") for at in range(5050, 10_000, 100))]
    facts = Facts(analysis([*made, *passes], idle=pauses, device=CPU, wall=10_000, slowdown=10 / 9.9))
    assert facts.value("own_code_ns") == pytest.approx(5 / 9.9 * 10_000 * US)  # as the bound: at the pace of the recorded step
    assert facts.value("own_code_share") == pytest.approx(5 / 9.9)
    assert facts.value("dispatch_idle_ns") == pytest.approx((50 * 50 - 100) / 9.9 * 10 * US)
    assert facts.value("without_own_code_ns") == pytest.approx(5.8 / 9.9 * 10_000 * US, rel=0.02)
    # no profiler adds 100 us to an op: other programs slowed steps that take twice as long, and their waits with them
    facts = Facts(analysis([*made, *passes], idle=pauses, device=CPU, wall=10_000, slowdown=2))
    assert facts.value("dispatch_idle_ns") == pytest.approx((50 * 50 - 50 * 3) / 9.85 * 10 * US)


@pytest.mark.parametrize("phase", ["other", "forward"])
def test_no_compiler_is_sold_for_waits_around_what_is_of_no_pass(phase: str) -> None:
    # ten ops of a backward pass, then thirty of a metric or of the forward pass, each after 80 us of waiting for the host
    ops = [kernel("aten::add", 100 * i, 100 * i + 20, shapes=[[64]], phase="backward" if i < 10 else phase) for i in range(40)]
    gaps = [gap(100 * i + 20, 100 * i + 100, cause="idle_launch", op=i) for i in range(40)]
    made = analysis(ops, idle=gaps, wall=4000)
    assert Facts(made).value("dispatch_outside_part") == pytest.approx(0.75 if phase == "other" else 0.0)
    assert Facts(made).value("dispatch_optimizer_part") == 0.0
    found = next(finding for finding in judge(made, load_rules()).findings if finding.rule == "OVH-01")
    assert ("around ops outside the model's passes" in found.message) is (phase == "other")
    assert bool({"compile", "cuda-graphs", "batch-size"} & set(found.fixes)) is (phase == "forward")


def test_what_the_optimizer_dispatches_is_told_apart() -> None:
    # ten ops of a backward pass, then thirty of an optimizer that takes parameters one by one, each after 80 us of waiting for the host
    ops = [kernel("aten::add", 100 * i, 100 * i + 20, phase="backward" if i < 10 else "optimizer") for i in range(40)]
    gaps = [gap(100 * i + 20, 100 * i + 100, cause="idle_launch", op=i) for i in range(40)]
    made = analysis(ops, idle=gaps, wall=4000, marks=[mark("Optimizer.step#Adam.step", 1000, 4000)])
    assert Facts(made).value("dispatch_optimizer_part") == pytest.approx(0.75, abs=0.01)
    assert Facts(made).value("dispatch_outside_part") == pytest.approx(0.0)


def test_a_finding_about_own_code_offers_no_compiler() -> None:
    ops = [kernel("aten::mm", 2000 * i, 2000 * i + 500) for i in range(5)]
    gaps = [gap(2000 * i + 500, 2000 * i + 2000, cause="idle_launch") for i in range(5)]
    findings = judge(analysis(ops, idle=gaps, device=CPU, wall=10_000), load_rules()).findings
    assert findings[0].rule == "OVH-08"
    assert not {fix for finding in findings for fix in finding.fixes} & {"compile", "cuda-graphs", "batch-size"}

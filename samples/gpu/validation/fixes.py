"""Fixes on the device through the experiments of `gpudiag ab`: evidence, ratio, parity, memory, energy; frozen contexts; A/A."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gpudiag
from gpudiag.experiment.ab import run_experiment
from gpudiag.experiment.design import Design
from gpudiag.experiment.plan import Options
from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.report.experiment.results import apply_holm
from validation.rows import Job

TARGET = Path(__file__).with_name("target.py")
SAMPLES = TARGET.parents[2]

ONE = Design(looks=(1,), blocks=4, block_steps=6, block_s=0.6, warm_limit_s=12.0, shared_ok=True)
"""A pair a fix: its interval is over blocks, which tells a planted effect and no small one."""

SAME = Design(looks=(4,), blocks=3, block_steps=6, block_s=0.6, warm_limit_s=8.0, shared_ok=True)
"""Of the A/A experiments: an interval over pairs needs some."""

NEEDS_S, SAME_NEEDS_S = 40.0, 70.0
"""A probe, a pair and the parity runs of one fix; four pairs."""


class Group(NamedTuple):
    """Fixes of one program, each by itself (`together`: as one change), and what is known of them beforehand."""

    name: str
    command: tuple[str, ...]
    fixes: dict[str, str]
    """Fix -> faster | applied | less memory."""
    together: bool = False
    variants: tuple[str, ...] = ()


def target(*words: str) -> tuple[str, ...]:
    """Return the command of a training of target.py."""
    return (sys.executable, str(TARGET), *words)


def sample(name: str) -> tuple[str, ...]:
    """Return the command of a planted sample, long enough for a trial."""
    return (sys.executable, str(SAMPLES / name / "train.py"), "--steps", "1000000")


NCHW = sample("nchw_convolution")

ON_A_GPU = (
    Group("narrow", target("narrow"), {"cuda-graphs": "faster", "compile-reduce-overhead": "faster"}),
    Group("copies", target("copies"), {"pin-memory": "applied", "non-blocking": "applied"}, together=True),
    Group("copies-pinned", target("copies", "--pinned"), {"non-blocking": "applied", "device-prefetch": "applied"}),
    Group(
        "text", target("text"),
        {"bf16": "faster", "tf32": "faster", "compile": "faster", "fused-optimizer": "applied", "checkpointing": "less memory",
         "sdpa=efficient": "applied", "alloc-conf": "applied", "batch-size=x2": "applied"},
    ),
    Group("text-blocks", target("text"), {"compile-blocks": "faster"}),
    Group("emptied", target("copies", "--empty-cache"), {"no-empty-cache": "applied"}),
    Group("nchw", NCHW, {"channels-last": "faster"}),
    Group("images", target("images"), {"cudnn-benchmark": "applied"}),
    Group("out-of-memory", target("narrow"), {}, variants=("hold=args:--hold 1.5",)),
)  # fmt: skip

REHEARSED = (
    Group("copies", target("copies", "--tiny"), {"fused-optimizer": "applied"}),
    Group("text", target("text", "--tiny"), {"checkpointing": "applied", "fused-optimizer": "applied"}),
)
"""What a CPU can try out."""


def run(job: Job) -> None:
    """Try the fixes of each program, then compare three programs with themselves."""
    for group in ON_A_GPU if job.on_gpu else REHEARSED:
        guarded(job, f"fixes of {group.name}", NEEDS_S, lambda group=group: tried(job, group))  # type: ignore[misc]
    guarded(job, "accumulation", NEEDS_S, lambda: accumulated(job))
    if job.on_gpu:
        same(job)


def guarded(job: Job, claim: str, need_s: float, work: Callable[[], object]) -> None:
    """Do `work` if there is time for it; an error of its own is kept."""
    if not job.has_time(claim, need_s):
        return
    try:
        work()
    except Exception as error:  # noqa: BLE001 - one experiment that fails must not cost the others
        job.error(claim, error)


def tried(job: Job, group: Group) -> None:
    """Keep a row for each fix of a program, as soon as it is measured."""
    seen: list[str] = []

    def done(outcome: Outcome) -> None:
        seen.append(outcome.fix)
        keep(job, group, outcome)

    options = Options(
        output=str(job.out / "experiments" / group.name), design=ONE, combine=group.together, budget_s=max(job.left_s, 1.0),
        parity=not group.variants, sandbox="off",
    )  # fmt: skip
    data = run_experiment(
        group.command, fixes=list(group.fixes), variants=list(group.variants), options=options, progress=print, done=done
    ).data
    if not seen or not data.complete:
        missing = [fix for fix in group.fixes if not any(fix in one for one in seen)]
        job.not_run(f"{group.name}: {', '.join(missing) or 'all fixes'}", "; ".join(data.notes) or "no time was left")


def keep(job: Job, group: Group, found: Outcome) -> None:
    """Keep what one experiment found."""
    name = f"{group.name}: {found.fix or found.variant}"
    if group.variants:
        out_of_memory = (found.verdict, found.reason) == ("failed", "oom")
        return job.add(f"{name}: out of memory is caught", "failed, oom", f"{found.verdict}, {found.reason}", out_of_memory)
    if (found.verdict, found.reason) == ("failed", "timeout"):
        return job.not_run(name, "; ".join(found.notes) or "no time was left")
    wanted = "faster" if "faster" in [group.fixes.get(fix) for fix in found.fix.split("+")] else group.fixes.get(found.fix, "applied")
    parity = found.parity.verdict if found.parity else "not checked"
    holds = {
        "faster": found.verdict == "faster",
        "less memory": found.memory_ratio is not None and found.memory_ratio < 1,
    }.get(wanted, found.verdict not in ("failed", "not_applied"))
    note = "; ".join([*found.evidence, *found.notes])[:600]
    job.add(name, f"{wanted}; parity does not differ", f"{measured(found)}; parity {parity}", holds and parity != "differs", note)
    if job.on_gpu and found.measured:
        together = all(pair.together for pair in found.measured)
        job.add(f"{name}: two frozen CUDA contexts take turns", "together", "together" if together else "one after the other", together)
    return None


def measured(found: Outcome) -> str:
    """Return verdict, ratio with interval, memory and energy in one line."""
    ratio = "no ratio"
    if found.ratio is not None and found.interval is not None:
        ratio = (
            f"x{found.ratio:.3f} [{found.interval[0]:.3f}, {found.interval[1]:.3f}] per {found.unit.removesuffix('s')}, over {found.over}"
        )
    memory, energy = ("-" if value is None else f"x{value:.2f}" for value in (found.memory_ratio, found.energy_ratio))
    return f"{found.verdict} {found.reason}".strip() + f"; {ratio}; memory {memory}; energy {energy}"


def accumulated(job: Job) -> None:
    """Try accumulation, which turns a knob of a build."""
    group = Group("build", (), {"accumulation=2": "applied"})
    found = gpudiag.ab(
        f"{TARGET}:build", fixes=list(group.fixes), budget=max(job.left_s, 1.0), quiet=True, design=ONE,
        output=str(job.out / "experiments" / "build"),
    )  # fmt: skip
    for outcome in found.data.experiments:
        keep(job, group, outcome)
    if not found.data.experiments:
        job.not_run("accumulation", "; ".join(found.data.notes) or "no time was left")


def same(job: Job) -> None:
    """Keep the A/A experiments: no claim may be left after Holm's correction."""
    kept: list[Outcome] = []
    longest = SAME_NEEDS_S
    for name, command in (("text", target("text")), ("narrow", target("narrow")), ("nchw", NCHW)):
        if not job.has_time(f"A/A of {name}", longest):
            continue
        begun = time.monotonic()
        options = Options(output=str(job.out / "experiments" / f"aa-{name}"), design=SAME, aa=True, budget_s=job.left_s, sandbox="off")
        data: ExperimentData = run_experiment(command, options=options, progress=print).data
        longest = time.monotonic() - begun
        for found in data.experiments:
            job.add(f"A/A of {name}", "-", f"{measured(found)}; p {found.p}", None, "; ".join(data.notes)[:300])
            kept.append(found)
    told = [found for found in kept if found.p is not None]
    if told:
        claims = sum(apply_holm([found.p or 0.0 for found in told]))
        job.add("A/A: claims after Holm", "0", f"{claims} of {len(told)}", claims == 0)

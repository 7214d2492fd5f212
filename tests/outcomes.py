"""Hand-made experiments for the renderers' tests: one outcome of every verdict, and what surrounds them."""

from __future__ import annotations

from typing import Any

import msgspec

from gpudiag.model.experiment import Baseline, ExperimentData, FixCall, Outcome, Pair, Parity, Recipe

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nValueError: sizes do not fit: 32 and 64'
STACK = 'Current thread 0x00007f (most recent call first):\n  File "net.py", line 12 in forward\n  File "train.py", line 30 in <module>'


def pair(ratio: float, blocks: int = 6) -> Pair:
    """Return a pair whose second arm has `ratio` times the throughput, with one disturbed block."""
    first = tuple(900.0 + k for k in range(blocks))
    second = tuple(value * ratio * (0.5 if k == 0 else 1.0) for k, value in enumerate(first))
    return Pair(first, second, "samples", 35_000_000, round(35_000_000 / ratio), 6.2, 9.8, 4_000_000_000, 3_520_000_000)


def outcome(fix: str = "bf16+channels-last", **changes: Any) -> Outcome:
    """Return the line of the design as an outcome; `changes` replaces fields."""
    made = Outcome(
        fix=fix,
        verdict="faster",
        ratio=1.83,
        interval=(1.79, 1.87),
        p=3e-7,
        pairs=6,
        parity=Parity(kind="low_precision", verdict="same", worst_yardsticks=1.6, steps=12),
        memory_ratio=0.88,
        break_even_steps=240.0,
        ceiling_share=0.5,
        evidence=("bfloat16 in the forward pass of Net", "12 of 12 convolution weights in NHWC"),
        measured=tuple(pair(ratio) for ratio in (1.80, 1.82, 1.83, 1.83, 1.84, 1.86)),
        seconds=95.0,
    )
    return msgspec.structs.replace(made, **changes)


def plain(fix: str, **changes: Any) -> Outcome:
    """Return an outcome of which only what `changes` says is known."""
    blank: dict[str, Any] = {
        "ratio": None, "interval": None, "p": None, "pairs": 0, "parity": None, "memory_ratio": None, "break_even_steps": None,
        "ceiling_share": None, "evidence": (), "measured": (), "seconds": None,
    }  # fmt: skip
    return outcome(fix, **(blank | changes))


def every_verdict() -> tuple[Outcome, ...]:
    """Return one outcome of each verdict and of each way in which it proves nothing."""
    wrong = Parity(
        kind="low_precision",
        verdict="differs",
        reason="loss of step 3 differs by 9,400 x the rounding noise (limit 4)",
        worst_yardsticks=9400.0,
    )
    other = Parity(kind="semantics", verdict="not_comparable")
    exact = Parity(kind="exact", verdict="same", worst_yardsticks=0.0, steps=12)
    return (
        outcome(),
        plain("fp16", verdict="faster", ratio=1.9, interval=(1.85, 1.95), p=1e-6, pairs=6, parity=wrong),
        plain("batch-size=x2", verdict="faster", ratio=1.063, interval=(1.038, 1.087), p=0.0004, pairs=6, parity=other, memory_ratio=1.9),
        plain("zero-grad-none", verdict="no_difference", ratio=1.0004, interval=(0.996, 1.005), p=0.8, pairs=12, parity=exact),
        plain("sdpa", verdict="slower", ratio=0.9, interval=(0.88, 0.92), p=0.0002, pairs=4, ceiling_share=0.08, memory_ratio=0.999),
        plain("fused-optimizer", verdict="inconclusive", ratio=1.017, interval=(0.998, 1.036), p=0.07, pairs=8, energy_ratio=0.93),
        plain("loader-workers=4", verdict="too_noisy", ratio=1.1, interval=(0.93, 1.3), p=0.4, pairs=12),
        plain("cudnn-benchmark", verdict="unstable", ratio=1.2, interval=(1.1, 1.3), p=0.001, pairs=4),
        plain("tf32", verdict="faster", ratio=1.31, interval=(1.22, 1.41), pairs=1, over="blocks"),
        plain("pin-memory", verdict="no_difference", ratio=1.001, interval=(0.992, 1.01), pairs=3, over="blocks"),
        plain("malloc", verdict="faster", ratio=1.25, interval=(1.2, 1.3), p=0.001, pairs=4, screening=True),
        plain("compile", verdict="not_applied", notes=("the root is a Sequential, and nothing was compiled",), ceiling_share=0.4),
        plain("checkpointing", verdict="failed", reason="oom", notes=("checkpointing ended with exit code 1", TRACE)),
        plain("foreach-optimizer", verdict="failed", reason="hang", notes=("it gave no sign of life for 60 s", STACK)),
        plain("", variant="lr2", verdict="failed", reason="crash", notes=("lr2 ended with exit code 1", TRACE)),
    )


def baseline(**changes: Any) -> Baseline:
    """Return what a probe may find of a program."""
    made = Baseline(
        command=("python", "train.py", "--name", "a b"),
        step_ns=35_000_000,
        samples_per_step=32.0,
        steps_marked_by="the optimizer AdamW",
        warm_steps=24,
        start_s=6.25,
        peak_bytes=4_000_000_000,
        device="Some CPU",
        side_effects=("torch.save twice (blocked)",),
        noise_share=0.012,
        notes=("4 pairs will show an effect of 2.4 % or more",),
    )
    return msgspec.structs.replace(made, **changes)


def recipe(**changes: Any) -> Recipe:
    """Return a recipe of two fixes that was proved."""
    made = Recipe(
        fixes=(FixCall("bf16"), FixCall("channels-last")),
        ratio=1.83,
        interval=(1.79, 1.87),
        p=3e-7,
        changes=("with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = model(x)", "model = model.to(...)"),
        proved=True,
    )
    return msgspec.structs.replace(made, **changes)


def experiments(**changes: Any) -> ExperimentData:
    """Return all of it."""
    made = ExperimentData(
        baseline=baseline(), experiments=every_verdict(), recipe=recipe(), complete=False, notes=("the budget of 10 min was used up",)
    )
    return msgspec.structs.replace(made, **changes)


def hostile(texts: tuple[str, ...]) -> ExperimentData:
    """Return experiments where every string that a program or a person can give is one of `texts`."""
    text = "".join(texts)
    outcomes = [
        outcome(
            one,
            variant=one,
            verdict=verdict,
            reason=one,
            evidence=(one,),
            notes=(one, f"{one}\n{one}"),
            parity=Parity(kind="exact", verdict="differs", reason=one, settings_changed=(one,)),
        )
        for one in texts
        for verdict in ("faster", "not_applied", "failed")
    ]
    calls = tuple(FixCall(one, one) for one in texts)
    given = baseline(command=texts, device=text, steps_marked_by=text, side_effects=texts, notes=texts)
    made = recipe(fixes=calls, changes=tuple(f"{one}\n  {one}" for one in texts))
    return ExperimentData(baseline=given, experiments=tuple(outcomes), recipe=made, notes=texts)

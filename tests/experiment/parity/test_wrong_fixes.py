"""Planted changes on two small trainings: wrong ones are caught, each for the right reason; right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from examples import sample

torch = pytest.importorskip("torch", reason="torch is not installed")

from parityruns import STEPS, Knobs, Run, conv, gpt, record  # noqa: E402

from gpudiag.experiment.parity import NOISE, ParityKind, judge_parity  # noqa: E402
from gpudiag.experiment.trial.protocol import ParityPlan  # noqa: E402
from gpudiag.model.experiment import Parity  # noqa: E402

TRAININGS = {"conv": conv, "gpt": gpt}
BF16 = torch.bfloat16

Bench = Callable[[str, ParityKind, Knobs, ParityPlan | None], Parity]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Judges a training with some knobs turned; what is known of the training as it is, is recorded once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name: str, knobs: Knobs, plan: ParityPlan) -> Run:
        return record(lambda: TRAININGS[name](knobs), tmp_path_factory.mktemp(name) / "run", plan)

    @cache
    def plain(name: str) -> tuple[Run, Run]:
        return run(name, Knobs(), ParityPlan(STEPS)), run(name, Knobs(), ParityPlan(STEPS))

    @cache
    def noisy(name: str, kind: ParityKind) -> list[Run]:
        return [run(name, Knobs(), ParityPlan(STEPS, perturb=NOISE[kind], perturb_seed=seed)) for seed in (1, 2, 3)]

    def judge(name: str, kind: ParityKind, knobs: Knobs, plan: ParityPlan | None = None) -> Parity:
        reference, repeat = plain(name)
        noise = [] if kind == "exact" else noisy(name, kind)
        return judge_parity(kind, reference, run(name, knobs, plan or ParityPlan(STEPS)), [repeat], noise)

    yield judge  # type: ignore[misc]
    torch.set_num_threads(threads)


WRONG: list[tuple[str, ParityKind, Knobs, str]] = [
    ("both", "rounding", Knobs(rate=3.03e-3), "learning rate of step 1: 0.003 -> 0.00303"),
    ("both", "low_precision", Knobs(rate=3.03e-3), "learning rate of step 1: 0.003 -> 0.00303"),
    ("both", "low_precision", Knobs(rate=3.3e-3), "learning rate of step 1"),
    ("both", "low_precision", Knobs(decay=0.0), "weight_decay of optimizer 1, group 1: 0.01 -> 0"),
    ("both", "low_precision", Knobs(clear=False), "rounding noise"),
    ("conv", "low_precision", Knobs(normalise=False), "layers in eval mode: none -> 2 x BatchNorm2d"),
    ("conv", "low_precision", Knobs(momentum=0.01), "normalisation: "),
    ("both", "low_precision", Knobs(shift=1), "gradient of the first step differs by"),
    ("both", "low_precision", Knobs(clip=None), "clipping of gradients: clip_grad_norm_(max_norm=0.5) -> none"),
    ("both", "low_precision", Knobs(clip=0.6), "clipping of gradients: clip_grad_norm_(max_norm=0.5) -> clip_grad_norm_(max_norm=0.6)"),
    ("both", "low_precision", Knobs(weights=BF16), "types of parameters: "),
    ("both", "low_precision", Knobs(autocast=BF16, loss=BF16), "type of the loss: float32 -> bfloat16"),
    ("both", "low_precision", Knobs(frozen=True), "parameters that learn: "),
    ("both", "low_precision", Knobs(rows=16), "gradient of the first step differs by"),
    ("both", "rounding", Knobs(autocast=BF16), "rounding noise"),
    ("both", "exact", Knobs(rate=3.03e-3), "learning rate of step 1"),
]


def _cases(changes: list[tuple[str, ParityKind, Knobs, str]]) -> list[Any]:
    found = []
    for name, kind, knobs, said in changes:
        turned = "+".join(f"{field}={getattr(knobs, field)}" for field in knobs._fields if getattr(knobs, field) != getattr(Knobs(), field))
        for one in ("conv", "gpt") if name == "both" else (name,):
            marks = [pytest.mark.slow] if (one, name) == ("gpt", "both") else []  # one of the two trainings tells whether a change is seen
            found.append(pytest.param(one, kind, knobs, said, id=f"{one}-{kind}-{turned}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "kind", "knobs", "said"), sample(_cases(WRONG), 2))
def test_a_wrong_change_is_caught(bench: Bench, name: str, kind: ParityKind, knobs: Knobs, said: str) -> None:
    found = bench(name, kind, knobs, None)
    assert found.verdict == "differs"
    assert said in found.reason, found.reason


NUMBERS: list[tuple[str, ParityKind, Knobs, str]] = [
    ("both", "rounding", Knobs(rate=3.03e-3), ""),
    ("both", "rounding", Knobs(decay=0.0), ""),
    ("both", "low_precision", Knobs(clear=False), ""),
    ("both", "low_precision", Knobs(shift=1), ""),
    ("both", "low_precision", Knobs(rows=16), ""),
    ("both", "low_precision", Knobs(frozen=True), ""),
    ("conv", "low_precision", Knobs(normalise=False), ""),
]


@pytest.mark.parametrize(("name", "kind", "knobs", "said"), _cases(NUMBERS))
def test_the_losses_and_gradients_alone_would_have_caught_it(bench: Bench, name: str, kind: ParityKind, knobs: Knobs, said: str) -> None:
    """Settings are what torch's own classes show; a hand-written optimizer or layer shows none."""
    found = bench(name, kind, knobs, None)
    assert "rounding noise" in found.reason, found.reason
    assert found.worst_yardsticks is not None
    assert found.worst_yardsticks > (10 if kind == "rounding" else 4)


RIGHT: list[tuple[str, ParityKind, Knobs, str]] = [
    ("both", "exact", Knobs(), ""),
    ("both", "exact", Knobs(options=(("foreach", True),)), ""),
    ("gpt", "exact", Knobs(checkpoints=True), ""),
    ("both", "rounding", Knobs(options=(("fused", True),)), ""),
    ("conv", "rounding", Knobs(layout=True), ""),
    ("gpt", "rounding", Knobs(fused=True), ""),
    ("gpt", "rounding", Knobs(parts=4), ""),
    ("both", "low_precision", Knobs(autocast=BF16), ""),
    ("conv", "low_precision", Knobs(autocast=BF16, layout=True), ""),
    ("gpt", "low_precision", Knobs(autocast=BF16, fused=True, options=(("fused", True),)), ""),
]


@pytest.mark.parametrize(("name", "kind", "knobs", "said"), sample(_cases(RIGHT)))
def test_a_right_change_passes(bench: Bench, name: str, kind: ParityKind, knobs: Knobs, said: str) -> None:
    found = bench(name, kind, knobs, None)
    assert (found.verdict, found.reason, found.settings_changed, found.steps) == ("same", "", (), STEPS)
    assert found.worst_yardsticks is not None
    assert found.worst_yardsticks <= {"exact": 0, "rounding": 10, "low_precision": 4}[kind]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_model_trains_the_same(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = bench("gpt", "rounding", Knobs(compiled=True), None)
    assert found.verdict == "same", found
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1

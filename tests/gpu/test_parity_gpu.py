"""Parity runs on a real GPU, whose kernels may sum in another order each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parityruns import STEPS, Knobs, Run, conv, gpt, record

from gpudiag.experiment.parity import NOISE, ParityKind, judge_parity
from gpudiag.experiment.trial.protocol import ParityPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

TRAININGS = {"conv": conv, "gpt": gpt}
PLAIN = Knobs(device="cuda")


def run(name: str, folder: Path, knobs: Knobs = PLAIN, **options: float) -> Run:
    return record(lambda: TRAININGS[name](knobs), folder, ParityPlan(STEPS, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["conv", "gpt"])
@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("rounding", PLAIN._replace(options=(("fused", True),)), PLAIN._replace(decay=0.0)),
        ("rounding", PLAIN._replace(fused=True, layout=False), PLAIN._replace(rows=16)),
        ("low_precision", PLAIN._replace(autocast=torch.bfloat16), PLAIN._replace(shift=1)),
    ],
)
def test_right_changes_pass_and_wrong_ones_do_not(name: str, kind: ParityKind, right: Knobs, wrong: Knobs, tmp_path: Path) -> None:
    reference = run(name, tmp_path / "a")
    repeats = [run(name, tmp_path / f"a{number}") for number in range(3)]
    noisy = [run(name, tmp_path / f"n{seed}", perturb=NOISE[kind], perturb_seed=seed) for seed in (1, 2, 3)]
    found = judge_parity(kind, reference, run(name, tmp_path / "right", right), repeats, noisy)
    assert found.verdict == "same", found
    found = judge_parity(kind, reference, run(name, tmp_path / "wrong", wrong), repeats, noisy)
    assert (found.verdict, found.worst_yardsticks is not None) == ("differs", True), found


def test_a_fused_optimizer_under_a_scaler_has_the_same_losses_and_gradients(tmp_path: Path) -> None:
    """The factor of the scaler is taken out by the kernel of the optimizer, after the gradients were read."""

    def train(fused: bool) -> None:
        net = torch.nn.Linear(64, 8).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(STEPS + 2):
            x = torch.randn(32, 64, device="cuda")
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    plain, fused = (record(lambda kind=kind: train(kind), tmp_path / str(kind), ParityPlan(STEPS)) for kind in (False, True))  # type: ignore[misc]
    assert [step.loss for step in fused.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-3)
    assert [step.grad_norm for step in fused.steps] == pytest.approx([step.grad_norm for step in plain.steps], rel=1e-2)
    assert plain.run.settings == fused.run.settings

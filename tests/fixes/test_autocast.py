"""Autocast put round the forward pass of a program, and a scaled loss for float16."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.experiment.trial.applied_fixes import AppliedFixes  # noqa: E402
from gpudiag.fixes import precision  # noqa: E402
from gpudiag.model.experiment import NO_INSTRUCTIONS, FixCall  # noqa: E402

nn = torch.nn
X = torch.linspace(-1, 1, 512).reshape(16, 32)
Pair = namedtuple("Pair", "scores extra")


class Net(nn.Module):
    def __init__(self, give: Callable[[Any], Any] = lambda out: out) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
        self.give = give
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        out = self.net(x)
        self.seen.append(out.dtype)
        return self.give(out)


def losses(model: Any, optimizer: Any, steps: int = 4, *, clip: float | None = None, norms: list[float] | None = None) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if norms is not None:
                norms.append(float(norm))
        optimizer.step()
        found.append(loss.item())
    return found


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


@contextmanager
def scaled() -> Iterator[Callable[[], Any]]:
    with applied("fp16") as evidence:
        yield evidence


@pytest.mark.parametrize(("fix", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_are_low_outputs_are_float32_and_the_loss_is_near(fix: str, dtype: Any) -> None:
    plain = Net()
    before = losses(plain, sgd(plain))
    with applied(fix) as evidence:
        model = Net()
        after = losses(model, sgd(model))
        out = model(X)
        shown = evidence()
    assert set(model.seen) == {dtype}
    assert out.dtype == torch.float32
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert after != before
    assert after == pytest.approx(before, rel=0.03)
    assert f"{str(dtype).removeprefix('torch.')} tensors in the forward pass of Net" in shown.found
    assert int(shown.found.split()[0]) >= 3  # two products and what lies between them at least


@pytest.mark.parametrize(("computes", "told"), [(False, True), (True, False), (None, False)])
def test_a_cpu_without_instructions_for_the_type_is_told(monkeypatch: pytest.MonkeyPatch, computes: bool | None, told: bool) -> None:
    monkeypatch.setattr(precision, "supports_dtype", lambda dtype: computes)
    with applied("bf16") as evidence:
        Net()(X).sum().backward()
        shown = evidence()
    assert shown.found.endswith(f"; {NO_INSTRUCTIONS} bfloat16") == told
    assert shown.slow_dtype == ("bfloat16" if told else "")


@pytest.mark.parametrize(
    ("give", "take"),
    [
        (lambda out: {"scores": out}, lambda got: got["scores"]),
        (lambda out: Pair(out, 3), lambda got: got.scores),
        (lambda out: [out, None], lambda got: got[0]),
    ],
)
def test_tensors_inside_of_what_a_model_gives_back_are_float32_too(give: Any, take: Any) -> None:
    with applied("bf16") as evidence:
        model = Net(give)
        got = model(X)
        shown = evidence()
    assert type(got) is type(give(X))
    assert take(got).dtype == torch.float32
    assert shown.found


def test_a_model_that_gives_back_a_float32_loss_is_seen_through_its_graph() -> None:
    with applied("bf16") as evidence:
        Net(lambda out: out.float().square().mean())(X).backward()
        shown = evidence()
    assert shown.found


def test_where_it_changes_nothing_it_is_not_applied() -> None:
    with applied("bf16") as evidence:
        model = Net()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(X).float().sum().backward()
        shown = evidence()
    assert (shown.found, shown.reason) == ("", "the program runs Net in autocast already")
    with applied("bf16") as evidence:
        model = Net().to(torch.bfloat16)
        model(X.bfloat16()).sum().backward()
        shown = evidence()
    assert shown.reason == "Net has no float32 weights: autocast would change nothing"
    with applied("bf16") as evidence:
        nn.LayerNorm(32)(X).sum().backward()  # autocast leaves it in float32
        shown = evidence()
    assert shown.reason == "the forward pass of LayerNorm makes no bfloat16 tensor in autocast"


def test_evaluation_runs_in_it_too_and_looks_at_nothing() -> None:
    with applied("bf16") as evidence:
        model = Net()
        model(X)
        with torch.no_grad():
            assert model.eval()(X).dtype == torch.float32
        assert evidence().found
    assert set(model.seen) == {torch.bfloat16}


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.parametrize("order", [("bf16", "compile"), ("compile", "bf16")])
def test_with_compile_in_either_order(order: tuple[str, str]) -> None:
    patches = Patches()
    put = AppliedFixes(tuple(FixCall(name) for name in order), patches)
    put.install()
    try:
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
        for _ in range(3):
            assert model(X).dtype == torch.float32
        shown = {row.fix: row for row in put.evidence()}
    finally:
        patches.restore()
        put._finding.restore()
        torch._dynamo.reset()
    assert shown["compile"].found == "Sequential: 1 graph, 0 graph breaks, 0 recompilations"
    assert "bfloat16 tensor" in shown["bf16"].found, shown["bf16"]


# -- float16 -----------------------------------------------------------------------------------------------------------


def test_clipping_sees_gradients_that_are_not_scaled() -> None:
    norms: list[float] = []
    plain = Net()
    before = losses(plain, sgd(plain), clip=0.05, norms=norms)
    with scaled() as evidence:
        model = Net()
        of_scaled: list[float] = []
        after = losses(model, sgd(model), clip=0.05, norms=of_scaled)
        assert "losses scaled by 65536, 0 of the first 4 updates left out" in evidence().found
    assert of_scaled == pytest.approx(norms, rel=0.02)
    assert after == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_add_up_as_without_a_scale(to_none: bool) -> None:
    def gradients() -> list[Any]:
        model = Net()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            for part in X.chunk(4):
                (model(part).square().mean() / 4).backward()
            optimizer.step()
        return [parameter.grad for parameter in model.parameters()]

    before = gradients()
    with scaled() as evidence:
        after = gradients()
        assert evidence().found
    for one, other in zip(before, after, strict=True):
        assert torch.linalg.norm(one - other) < 0.02 * torch.linalg.norm(one)


def test_an_update_with_infinities_is_left_out_and_the_scale_halved() -> None:
    with scaled() as evidence:
        model = Net()
        optimizer = sgd(model)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        model(X).sum().backward()  # a gradient of 65,536 at the output: more than float16 holds
        optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(start, model.parameters(), strict=True))
        optimizer.zero_grad()
        model(X).mean().backward()
        optimizer.step()
        assert not any(torch.equal(one, other) for one, other in zip(start, model.parameters(), strict=True))
        assert "losses scaled by 32768, 1 of the first 2 updates left out" in evidence().found


def test_a_closure_a_scheduler_and_a_fused_optimizer() -> None:
    def run(*, fused: bool) -> list[float]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        found = []

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            found.append(optimizer.step(closure).item())
            scheduler.step()
        return found

    for fused in (False, True):
        before = run(fused=fused)
        with scaled() as evidence:
            after = run(fused=fused)
            assert evidence().found
        assert after == pytest.approx(before, rel=0.03)
        assert after[-1] < after[0]


def test_two_networks_that_train_against_each_other() -> None:
    def run() -> list[float]:
        torch.manual_seed(0)
        maker, judge = nn.Linear(32, 32), nn.Linear(32, 1)
        of_maker, of_judge = (torch.optim.SGD(part.parameters(), 0.05) for part in (maker, judge))
        found = []
        for _ in range(3):
            of_judge.zero_grad()
            (0.1 * (judge(X).mean() - judge(maker(X)).mean())).backward()  # its gradients reach the maker too
            of_judge.step()
            of_maker.zero_grad()
            loss = judge(maker(X)).square().mean()
            loss.backward()
            of_maker.step()
            found.append(loss.item())
        return found

    before = run()
    with scaled() as evidence:
        after = run()
        assert evidence().found
    assert after == pytest.approx(before, rel=0.03)


def test_an_optimizer_that_was_made_anew_is_not_unscaled_twice() -> None:
    plain = Net()
    before = losses(plain, sgd(plain))
    with scaled():
        model = Net()
        sgd(model)
        after = losses(model, torch.optim.SGD(model.parameters(), 0.1))
    assert after == pytest.approx(before, rel=0.02)


def test_what_a_scaler_cannot_follow_is_refused() -> None:
    with scaled() as evidence:
        model = Net()
        torch.optim.LBFGS(model.parameters())
        model(X).sum().backward()
        assert "LBFGS" in evidence().reason
        assert model.seen == [torch.float32]
    with scaled() as evidence:
        model = Net()
        next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
        model(X).sum().backward()
        assert "inside of the backward pass" in evidence().reason
    with scaled() as evidence:
        model = Net()
        torch.autograd.grad(model(X).sum(), list(model.parameters()))
        assert "without Tensor.backward" in evidence().reason

"""Code of the program's own that was planted into a training loop: what is offered for it is no compiler, graph or batch size."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from planted import Plant, analysed

from gpudiag.diagnosis import judge, load_rules
from gpudiag.model.finding import Finding

OF_THE_MODEL = {"compile", "compile-reduce-overhead", "fuse-region", "cuda-graphs", "batch-size", "batch-requests"}


def planted(marker: str, setup: str, *, plant: str = "pass", forward: str = "return model(x)") -> Plant:
    return Plant("idle_launch", marker, setup="torch.set_num_threads(1)\n" + textwrap.dedent(setup), plant=plant, forward=forward)


PLANTS = {
    "an environment in Python": planted("env_step", plant="env_step(0.5)", setup="""
        import math
        def env_step(state):
            for _ in range(200_000):
                state = math.sin(state) * 0.9 + 0.1
            return state
        """),
    "parsing of text": planted("parse", forward="return model(parse(TEXT) / 1000 + 0 * x)", setup="""
        TEXT = "\\n".join(",".join(str(i + j) for i in range(64)) for j in range(1200))
        def parse(text):
            return torch.tensor([[float(word) for word in line.split(",")] for line in text.split("\\n")][:8])
        """),
    "images in nested lists": planted("prepare", forward="return model(prepare())", setup="""
        def prepare():
            image = [[(i * j) % 255 for i in range(256)] for j in range(256)]
            return torch.tensor([[value / 255 for value in row] for row in image])[:8, :64]
        """),
    "a metric that asks for one value after the other": planted("metric", plant="metric(torch.rand(1000))", setup="""
        def metric(scores):
            return sum(float(score) > 0.5 for score in scores)
        """),
    "an average of the weights, one by one": planted("average", plant="update()", setup="""
        average = [p.detach().clone() for p in model.parameters()]
        def update():
            for _ in range(100):
                for old, new in zip(average, model.parameters()):
                    old.mul_(0.999).add_(new.detach(), alpha=0.001)
        """),
    "validation in each step": planted("validate", plant="validate()", setup="""
        @torch.no_grad()
        def validate():
            return sum(float(model(torch.rand(8, 64)).square().mean()) for _ in range(100))
        """),
    "augmentation of one row after the other": planted("augment", forward="return model(augment())", setup="""
        def augment():
            rows = [(row - row.mean()) / (row.std() + 1e-6) for row in torch.rand(200, 64)]
            return torch.stack([row.clamp(-2, 2).roll(3) for row in rows])[:8]
        """),
}  # fmt: skip


def _offers_what_fits(finding: Finding) -> bool:
    return finding.rule in ("OVH-01", "OVH-08") and not OF_THE_MODEL & set(finding.fixes)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.needs("torch")
def test_no_change_of_the_model_is_offered_for_code_of_the_loop(name: str, tmp_path: Path) -> None:
    """In one of three recordings: where the system runs other programs meanwhile, other things may take longer."""
    told = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        findings = judge(analysed(folder, PLANTS[name]).analysis, load_rules()).findings
        if findings and _offers_what_fits(findings[0]):
            return
        told.append([(finding.rule, finding.message, finding.fixes) for finding in findings])
    pytest.fail(str(told))

"""Attention with one mask for all samples and heads, in small real programs: MEM-12, what it takes for causal, and what is gained."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from factories import analysis, kernel

from gpudiag.analysis import analyse
from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts, fused_kernels
from gpudiag.facts.window import Window
from gpudiag.inputs import resolve_input

LENGTH, STEPS = 64, 2


def build_mask(kind: str) -> Any:
    """Return a mask of LENGTH tokens, made in the step but for 'kept'."""
    import torch

    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return {
        "added": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(ones.triu(1), float("-inf")),
        "window": lambda: ones.tril() & ones.triu(-8),
        "of each sample": lambda: ones.tril().expand(2, 1, LENGTH, LENGTH).clone(),
        "of each head": lambda: torch.zeros(1, 3, LENGTH, LENGTH),
        "padding": lambda: torch.zeros(1, 1, 1, LENGTH).expand(2, 3, LENGTH, LENGTH),
    }.get(kind, lambda: None)()


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("kind", "calls", "triangle"),
    [
        ("added", 2, True),
        ("kept", 2, False),
        ("window", 2, False),
        ("of each sample", 0, False),
        ("of each head", 0, False),
        ("padding", 0, False),
        ("is_causal", 0, False),
    ],
)
def test_one_square_mask_for_all_samples_and_heads_counts(kind: str, calls: int, triangle: bool, tmp_path: Path) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    query = torch.randn(2, 3, LENGTH, 16, requires_grad=True)

    def step() -> None:
        mask = kept if kind == "kept" else build_mask(kind)
        scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=kind == "is_causal").sum().backward()

    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                step()
    recorder.export_chrome_trace(str(tmp_path / "t.json"))
    window = Window(analyse(resolve_input(str(tmp_path / "t.json"), None), lambda _: None))
    found = fused_kernels.find_masked_attention(window)
    assert found.height == calls * STEPS, "forward and backward"
    assert set(found["length"]) == ({LENGTH} if calls else set())
    assert fused_kernels.masks_triangle(window) is triangle


def test_half_is_saved_or_what_a_kernel_at_its_roofline_leaves() -> None:
    """1,000 us on a GPU whose roof for all scores is 120 us: half of that at 60 % is 100 us. A mask that is expanded has strides of 0."""
    shapes = [[4, 8, 2048, 64]] * 3 + [[4, 8, 2048, 2048]]
    strides = [[1048576, 64, 512, 1]] * 3 + [[0, 0, 2048, 1]]
    made = kernel("aten::_scaled_dot_product_efficient_attention", 0, 1000, shapes=shapes, strides=strides, dtype="bf16", t_roof=120)
    found = Facts(analysis([made], wall=1000))
    assert found.value("masked_attention_length") == 2048
    assert found.value("masked_attention_share") == 1
    assert found.value("masked_attention_saving_ns") == pytest.approx(900_000)


PROGRAM = """
import time, torch
from torch.nn.functional import scaled_dot_product_attention
import gpudiag

torch.set_num_threads(1)
x = torch.randn(1, 4, 1536, 32, requires_grad=True)


def masked():
    mask = torch.ones(1536, 1536, dtype=torch.bool).tril()
    return scaled_dot_product_attention(x, x, x, attn_mask=mask)  # marked


def causal():
    return scaled_dot_product_attention(x, x, x, is_causal=True)


def train(attend):
    began = time.process_time()
    attend().square().mean().backward()
    return time.process_time() - began


times = [(train(masked), train(causal)) for _ in range(7)]
with gpudiag.profile(BUNDLE, skip=2, record=3, telemetry_hz=0) as prof:
    for _ in prof.steps(range(12)):
        train(masked)
"""


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_causal_mask_is_named_with_its_line_and_the_bound_holds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = runpy.run_path(str(tmp_path / "train.py"), init_globals={"BUNDLE": str(tmp_path / "run")})
    with_mask, without = (sorted(each)[3] for each in zip(*done["times"], strict=True))
    found = analyse(resolve_input(str(tmp_path / "run"), None), lambda _: None)
    finding = next(one for one in judge(found, load_rules()).findings if one.rule == "MEM-12")
    gain = 1 - without / with_mask
    assert gain > 0.1
    assert finding.severity == "warning"
    assert finding.ceiling is not None
    assert 0.8 * gain < finding.ceiling.share < 3 * gain, (gain, finding.ceiling.share)
    marked = next(row for row, line in enumerate(PROGRAM.splitlines(), 1) if "# marked" in line)
    assert str(finding.where[0].file).endswith("train.py")
    assert finding.where[0].line == marked

"""Utilisation against hand-counted FLOPs: a small GPT recorded on the CPU, with and without checkpointing; what is left out is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
from factories import A100, analysis, kernel
from noticewords import format_notices

from gpudiag.analysis import analyse
from gpudiag.facts import Facts, efficiency
from gpudiag.facts.window import Window
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing

BATCH, LENGTH, WIDTH, HEADS, BLOCKS, VOCABULARY = 2, 32, 64, 4, 3, 96
TOKENS = BATCH * LENGTH
BLOCK_WEIGHTS = 12 * WIDTH * WIDTH
"""qkv 3, projection 1, mlp 4 + 4 widths squared."""
PAIRS = BATCH * HEADS * LENGTH * LENGTH // 2
"""Query-key pairs that count under a causal mask: half of all (op_costs section 3, as flash-attention's benchmarks); PaLM counts all."""
ATTENTION_FORWARD = 2 * 2 * PAIRS * (WIDTH // HEADS)
"""Two products over the head dimension."""


def _gpt(reentrant: bool | None) -> Callable[[], None]:
    """Return one training step: pre-norm blocks, untied output layer; each block checkpointed unless `reentrant` is None."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.first(x)).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
            return x + self.mlp(self.second(x))

    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    blocks = [Block() for _ in range(BLOCKS)]
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step() -> None:
        x = embedding(tokens)
        for block in blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        functional.cross_entropy(head(x).view(-1, VOCABULARY), tokens.view(-1)).backward()

    return step


def _recorded(step: Callable[[], None], path: Path) -> Analysis:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        step()
    recorder.export_chrome_trace(str(path))
    return analyse(resolve_input(str(path), None), lambda _: None)


def _numbers(found: Analysis, *names: str) -> tuple[Any, ...]:
    facts = Facts(found)
    return tuple(facts.value(name) for name in names)


MODEL_FLOP = 6 * TOKENS * (BLOCKS * BLOCK_WEIGHTS + WIDTH * VOCABULARY) + 3 * BLOCKS * ATTENTION_FORWARD
SCORES_AGAIN = BLOCKS * ATTENTION_FORWARD // 2


@pytest.mark.needs("torch")
def test_a_transformer_step_counts_6n_per_token_and_the_attention_that_its_mask_leaves(tmp_path: Path) -> None:
    """6N + 12LHQT per token (PaLM, appendix B): N without embedding, norms and biases, half of T for the causal mask."""
    per_token = 6 * (BLOCKS * BLOCK_WEIGHTS + WIDTH * VOCABULARY) + 12 * BLOCKS * WIDTH * LENGTH / 2
    assert per_token * TOKENS == MODEL_FLOP
    found = _recorded(_gpt(None), tmp_path / "t.json")
    assert _numbers(found, "matrix_flop", "recompute_flop", "matrix_known_share") == (MODEL_FLOP, SCORES_AGAIN, 1.0)


@pytest.mark.needs("torch")
def test_full_checkpointing_adds_a_forward_of_every_block(tmp_path: Path) -> None:
    found = _recorded(_gpt(True), tmp_path / "t.json")
    forward = 2 * TOKENS * BLOCKS * BLOCK_WEIGHTS + BLOCKS * ATTENTION_FORWARD
    model, again = _numbers(found, "matrix_flop", "recompute_flop")
    assert (model, again) == (MODEL_FLOP, forward + SCORES_AGAIN)
    head = 6 * TOKENS * WIDTH * VOCABULARY
    assert (model - head + again - SCORES_AGAIN) / (model - head) == pytest.approx(4 / 3, rel=1e-12)  # op_costs 15.1


def gemm(start: float, end: float, flops: float, **changes: Any) -> Any:
    return kernel("aten::mm", start, end, shapes=[[64, 64], [64, 64]], dtype="bf16", flops=flops, **changes)


def test_utilisation_is_flop_over_wall_time_and_peak() -> None:
    found = analysis([gemm(0, 500, 31.2e9)])
    assert _numbers(found, "mfu", "hfu", "matrix_dtype") == (pytest.approx(31.2e9 / (1e-3 * 312e12)), pytest.approx(0.1), "bf16")
    assert efficiency.find_peak_flop_per_s(Window(found)) == A100.peaks["bf16"]


def test_work_counts_in_the_step_that_launched_it_also_where_it_ran_after_the_window() -> None:
    late = gemm(1200, 1500, 1e9, launched=900, step=0)
    (flop,) = _numbers(analysis([gemm(0, 500, 31.2e9), late]), "matrix_flop")
    assert flop == 32.2e9


@pytest.mark.parametrize(("unknown", "bound"), [(10, ""), (200, "lower bound: the FLOP of 29 %"), (700, None)])
def test_matrix_work_that_was_not_counted_makes_a_lower_bound_then_no_figure(unknown: float, bound: str | None) -> None:
    lost = kernel(None, 500, 500 + unknown, replay=True, step=0)
    found = analysis([gemm(0, 500, 31.2e9), lost], wall=2000)
    (mfu,) = _numbers(found, "mfu")
    assert isinstance(mfu, Missing) == (bound is None)
    if bound is not None:
        assert bound in " ".join(format_notices(efficiency.list_mfu_notices(Window(found))))
        assert bool(efficiency.list_mfu_notices(Window(found))) == bool(bound)


def test_a_recording_without_shapes_says_why_there_is_no_figure() -> None:
    (mfu,) = _numbers(analysis([kernel("aten::mm", 0, 500)]), "mfu")
    assert isinstance(mfu, Missing)
    assert "record_shapes" in mfu.reason


def test_a_real_resnet50_step(traces: Path) -> None:
    """torchvision counts 4.089 GMAC an image forward; backward twice that, without the input gradient of the first layer (118 MMAC)."""
    found = kept.analysis(traces / "v100_resnet50_train_2021_memory_callstack.json.gz")
    batch, steps = 32, 6
    per_image = 3 * 2 * 4_089_184_256 - 2 * 118_013_952
    flop, again = _numbers(found, "matrix_flop", "recompute_flop")
    assert flop == pytest.approx(steps * batch * per_image, rel=1e-3)
    assert again == 0


def test_checkpointing_of_a_real_run_repeats_all_but_the_first_convolution(traces: Path) -> None:
    path = traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz"
    found = kept.analysis(path)
    model, again, mfu, hfu = _numbers(found, "matrix_flop", "recompute_flop", "mfu", "hfu")
    first, head = 2 * 10 * 118_013_952, 2 * 10 * 512 * 1000
    forward = (model + 3 * first) / 9  # three steps; the first layer has no input gradient
    assert again == pytest.approx(3 * (forward - first - head), rel=1e-6)
    assert hfu / mfu == pytest.approx((model + again) / model)
    assert found.op_rows["recompute_ns"].sum() == 4_209_958  # TraceLens: 4.122 ms, without 0.088 ms of memsets
    assert set(found.op_rows.filter(pl.col("recompute_ns") > 0)["phase"]) == {"backward"}

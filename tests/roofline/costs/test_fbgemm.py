"""Batched embedding look-ups by sizes alone: worked numbers on FBGEMM's schema as real traces record it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

CostOf = Callable[..., Cost]
TABLES, BATCH, INDICES, WIDTH, ROWS = 6, 100, 5_000, 64, 4_000
ROWWISE = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
ADAGRAD = "fbgemm::split_embedding_codegen_lookup_adagrad_function"


def lookup(total_d: int | None, state: int, weights: str = "fp32") -> list[Any]:
    """Return the arguments of a split look-up: `state` elements of optimizer state, `total_d` None where it was not recorded."""
    none = ("fp32", (0,))
    head = [none, (weights, (ROWS * WIDTH,)), none, ("fp32", (0, 0)), ("int32", (TABLES,)), ("int64", (TABLES,)), ("int32", (TABLES + 1,))]
    middle = [total_d, WIDTH, ("int64", (TABLES + 1,)), 20, ("int64", (INDICES,)), ("int64", (TABLES * BATCH + 1,)), 0, None, None]
    return [*head, *middle, ("int32", (0,)), False, 1.0, False, ("fp32", (state,)), none, ("int32", (TABLES,)), ("int64", (TABLES,))]


READ = 8 * INDICES + 8 * (TABLES * BATCH + 1)
POOLED = 4 * TABLES * BATCH * WIDTH


def test_the_width_comes_from_one_state_a_row(cost: CostOf) -> None:
    """5000 look-ups in tables of 4000 rows: no more than the tables are read."""
    found = cost(ROWWISE, *lookup(None, ROWS))
    assert found == Cost(vector_flops=INDICES * WIDTH, bytes=4 * ROWS * WIDTH + READ + POOLED, provenance="derived")


def test_the_width_comes_from_the_recorded_total(cost: CostOf) -> None:
    assert cost(ADAGRAD, *lookup(TABLES * WIDTH, ROWS * WIDTH)) == cost(ROWWISE, *lookup(None, ROWS))
    half = cost(ADAGRAD, *lookup(TABLES * WIDTH, ROWS * WIDTH, weights="fp16"))
    assert half.bytes == 2 * ROWS * WIDTH + READ + POOLED


def test_without_either_there_is_a_reason(recorded: Callable[..., Signature]) -> None:
    found = estimate_cost(ADAGRAD, recorded(*lookup(None, ROWS * WIDTH)))
    assert isinstance(found, Missing)
    assert "total_D" in found.reason


@pytest.mark.parametrize(("name", "total", "state", "per_row"), [(ROWWISE, None, ROWS, 1), (ADAGRAD, TABLES * WIDTH, ROWS * WIDTH, WIDTH)])
def test_the_backward_updates_rows_and_states(
    name: str, total: int | None, state: int, per_row: int, recorded: Callable[..., Signature]
) -> None:
    """Gradients of the bags read; every touched row and its state read and written."""
    found = BACKWARD_FORMULAS[name](recorded(*lookup(total, state)))
    assert found.bytes == POOLED + READ + 2 * 4 * ROWS * (WIDTH + per_row)
    assert found.provenance == "derived"


def test_dense_tables_write_a_gradient_as_large_as_they_are(recorded: Callable[..., Signature]) -> None:
    ends = ("int64", (TABLES + 1,))
    arguments = [("fp32", (ROWS * WIDTH,)), ("int64", (TABLES,)), ends, TABLES * WIDTH, WIDTH, ends, 20]
    signature = recorded(*arguments, ("int64", (10,)), ("int64", (TABLES * BATCH + 1,)), 0, None, None)
    name = "fbgemm::dense_embedding_codegen_lookup_function"
    read = 8 * 10 + 8 * (TABLES * BATCH + 1)
    assert estimate_cost(name, signature) == Cost(vector_flops=10 * WIDTH, bytes=4 * 10 * WIDTH + read + POOLED, provenance="derived")
    assert BACKWARD_FORMULAS[name](signature).bytes == POOLED + read + 4 * ROWS * WIDTH


def test_permuting_pooled_embeddings_reads_and_writes_them_once(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    arguments = [("fp32", (1024, 70904)), *[("int64", (size,)) for size in (981, 980, 981, 980)]]
    found = cost("fbgemm::permute_pooled_embs_auto_grad", *arguments)
    assert found.bytes == 2 * 4 * 1024 * 70904 + 8 * (981 + 980)
    assert BACKWARD_FORMULAS["fbgemm::permute_pooled_embs_auto_grad"](recorded(*arguments)) == found


def test_sparse_features(cost: CostOf) -> None:
    """Permuting 2 of 4 features writes half of the lengths and, on average, of the indices; dealing writes lengths for each rank."""
    lengths, indices = ("int32", (4, 100)), ("int64", (1000,))
    found = cost("fbgemm::permute_2D_sparse_data", ("int32", (2,)), lengths, indices, None, None)
    assert found.bytes == 8 + 1600 + 8000 + (1600 + 8000) // 2
    dealt = cost("fbgemm::block_bucketize_sparse_features", ("int32", (400,)), indices, False, False, ("int64", (4,)), 8, None)
    assert dealt.bytes == 1600 + 8000 + 32 + 8 * 1600 + 8000
    assert cost("fbgemm::bounds_check_indices", ("int64", (4,)), indices, ("int64", (401,)), 0, ("int64", (1,))).bytes == 8 * (
        4 + 1000 + 401
    )
    assert cost("fbgemm::asynchronous_complete_cumsum", ("int32", (400,))).bytes == 3200


def test_compressed_communication(cost: CostOf) -> None:
    x = ("fp32", (16, 64))
    assert cost("fbgemm::FloatToBfloat16Quantized", x).bytes == (4 + 2) * 1024
    assert cost("fbgemm::FloatToFused8BitRowwiseQuantized", x).bytes == 4 * 1024 + 1024 + 16 * 8
    packed = ("int8", (16, 72))
    assert cost("fbgemm::Fused8BitRowwiseQuantizedToFloat", packed).bytes == 16 * 72 + 4 * 1024


def test_jagged_rows_pad_to_the_longest(cost: CostOf) -> None:
    found = cost("fbgemm::jagged_to_padded_dense", ("bf16", (30, 8)), [(5,)], [10], 0.0)
    assert found.bytes == 2 * (30 * 8 + 4 * 10 * 8)
    assert cost("fbgemm::dense_to_jagged", ("bf16", (4, 10, 8)), [(5,)], 30).bytes == 2 * 2 * 30 * 8

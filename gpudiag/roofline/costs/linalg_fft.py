"""Factorisations, solves and Fourier transforms: leading-order FLOP counts of the standard algorithms.

LAPACK Working Note 41, appendix C (Cholesky n^3/3, LU 2n^3/3, QR 2n^2(m - n/3), inverse 2n^3, triangular solve n^2 a column) and Golub
& Van Loan, Matrix Computations, sections 5.2, 8.3, 8.6 (symmetric eigenvectors 9n^3, values 4n^3/3; SVD 4m^2 n + 8mn^2 + 9n^3).
Iterative ones depend on the data, and a library may choose another algorithm: all are `derived`. Bytes: the matrix read, results as large
as it written.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2, prod
from typing import Literal

from gpudiag.model.ops import Cost, Input, Shape, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import costs, count_read_bytes, require, size_of

Flops = Callable[[int, int], int]


def _count_qr_flops(m: int, n: int) -> int:
    long, short = max(m, n), min(m, n)
    return 2 * short * short * long - 2 * short**3 // 3


# name -> (FLOP of one m x n matrix, results as large as the matrix)
_FACTORISATIONS: dict[str, tuple[Flops, int]] = {
    "linalg_cholesky_ex": (lambda m, n: n**3 // 3, 1),
    "cholesky": (lambda m, n: n**3 // 3, 1),
    "cholesky_inverse": (lambda m, n: 2 * n**3 // 3, 1),
    "linalg_lu_factor_ex": (lambda m, n: 2 * n**3 // 3, 1),
    "linalg_lu": (lambda m, n: 2 * n**3 // 3, 2),
    "linalg_ldl_factor_ex": (lambda m, n: n**3 // 3, 1),
    "_linalg_det": (lambda m, n: 2 * n**3 // 3, 1),
    "_linalg_slogdet": (lambda m, n: 2 * n**3 // 3, 1),
    "linalg_inv_ex": (lambda m, n: 2 * n**3, 1),
    "geqrf": (_count_qr_flops, 1),
    "linalg_householder_product": (_count_qr_flops, 1),
    "linalg_qr": (lambda m, n: 2 * _count_qr_flops(m, n), 2),
    "_linalg_eigh": (lambda m, n: 9 * n**3, 1),
    "linalg_eig": (lambda m, n: 25 * n**3, 2),
    "_linalg_svd": (lambda m, n: 4 * max(m, n) ** 2 * min(m, n) + 8 * m * n * min(m, n) + 9 * min(m, n) ** 3, 2),
}

# name -> (positions of matrix and right-hand sides, FLOP of factorising an n x n matrix first)
_SOLVES: dict[str, tuple[int, int, Callable[[int], int], int]] = {
    "_linalg_solve_ex": (0, 1, lambda n: 2 * n**3 // 3, 2),
    "linalg_solve_triangular": (0, 1, lambda n: 0, 1),
    "triangular_solve": (1, 0, lambda n: 0, 1),
    "cholesky_solve": (1, 0, lambda n: 0, 2),
    "_cholesky_solve_helper": (1, 0, lambda n: 0, 2),
    "linalg_lu_solve": (0, 2, lambda n: 0, 2),
    "linalg_ldl_solve": (0, 2, lambda n: 0, 2),
}


def estimate_factorisation(signature: Signature, flops: Flops, results: int) -> Cost:
    """Estimate the cost of factorising a batch of m x n matrices."""
    x = signature.need(0, "A")
    require(len(x.shape) >= 2, "A is no matrix")
    *batch, m, n = x.shape
    operations = prod(batch) * flops(m, n)
    return build_matrix_cost(-(-operations // 2), x.dtype, x.distinct_bytes + results * size_of(x.numel, x.dtype), "derived")


def estimate_solve(signature: Signature, matrix: int, right: int, factor: Callable[[int], int], passes: int) -> Cost:
    """Estimate the cost of solving for right-hand sides: n^2 FLOP a column and triangular pass, after a factorisation if any."""
    a, b = signature.need(matrix, "A"), signature.need(right, "B")
    require(len(a.shape) >= 2 and len(b.shape) >= 1, "A is no matrix")
    n = a.shape[-1]
    columns = b.numel // n if n else 0
    operations = prod(a.shape[:-2]) * factor(n) + passes * n * n * columns
    return build_matrix_cost(-(-operations // 2), a.dtype, count_read_bytes((a, b)) + size_of(b.numel, b.dtype), "derived")


for _name, (_flops, _results) in _FACTORISATIONS.items():
    costs(f"aten::{_name}", flops=_flops, results=_results)(estimate_factorisation)
for _name, (_matrix, _right, _factor, _passes) in _SOLVES.items():
    costs(f"aten::{_name}", matrix=_matrix, right=_right, factor=_factor, passes=_passes)(estimate_solve)


_COMPLEX = {"fp16": "complex64", "bf16": "complex64", "fp32": "complex64", "fp64": "complex128"}
_REAL = {"complex64": "fp32", "complex128": "fp64"}
_FLOP_PER_POINT = 5


def _estimate_transform(x: Input, dims: Shape, sizes: tuple[int, int], outputs: int, dtype: str | None, halves: int) -> Cost:
    """Estimate the cost of a transform of `sizes` (elements, points of the last dimension): read and written once.

    `halves`: 2 where one side is real.
    """
    elements, last = sizes
    points = prod(x.shape[dim] for dim in dims[:-1]) * last
    flops = ceil(_FLOP_PER_POINT * elements * log2(points) / halves) if points > 1 else 0
    return Cost(vector_flops=flops, bytes=x.distinct_bytes + size_of(outputs, dtype))


def estimate_fft(signature: Signature, kind: Literal["c2c", "r2c", "c2r"]) -> Cost:
    """Estimate the cost of a transform over `dim` (1). r2c: `onesided` (3) keeps n/2 + 1 of the last dimension; c2r: its size is 3."""
    x, dims = signature.need(0, "self"), signature.integers(1, "dim (Concrete Inputs)")
    rank = len(x.shape)
    require(bool(dims) and all(-rank <= dim < rank for dim in dims), "dim does not fit the shape")
    dims = tuple(dim % rank for dim in dims)
    have = x.shape[dims[-1]]
    if kind == "c2c":
        return _estimate_transform(x, dims, (x.numel, have), x.numel, x.dtype, 1)
    if kind == "r2c":
        kept = have // 2 + 1 if signature.flag(3, "onesided (Concrete Inputs)") else have
        return _estimate_transform(x, dims, (x.numel, have), x.numel // have * kept if have else 0, _COMPLEX.get(x.dtype or ""), 2)
    last = signature.integer(3, "last_dim_size (Concrete Inputs)")
    require(last >= 0, "last_dim_size is negative")
    outputs = x.numel // have * last if have else 0
    return _estimate_transform(x, dims, (outputs, last), outputs, _REAL.get(x.dtype or ""), 2)


costs("aten::_fft_c2c", kind="c2c")(estimate_fft)
costs("aten::_fft_r2c", kind="r2c")(estimate_fft)
costs("aten::_fft_c2r", kind="c2r")(estimate_fft)

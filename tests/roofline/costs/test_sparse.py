"""Which recorded arguments are sparse tensors, and what one call inside tells about them."""

from __future__ import annotations

import pytest

from gpudiag.model.ops import Input, NotModelledError, Signature, parse_signature
from gpudiag.roofline.costs.copies import HeldRows, count_rows_inside, estimate_sparse_cost, find_sparse_size
from gpudiag.roofline.costs.registry import is_sparse, is_sparse_tensor

SPARSE = Input(dtype="fp32", shape=(1000, 64), strides=())


def tensor(*shape: int, dtype: str = "fp32") -> Input:
    return Input(dtype=dtype, shape=shape, strides=tuple(1 for _ in shape))


@pytest.mark.parametrize(
    ("shapes", "strides", "expected"),
    [
        ("[[1000, 64]]", "[[]]", True),
        ("[[]]", "[[]]", False),  # a zero-dimensional tensor
        ("[[0]]", "[[1]]", False),
        ("[[1000, 64]]", None, False),  # strides were not recorded (torch before 2.0)
        ("[[1000, 64]]", "[]", False),
        ("[[1000, 64]]", "[[64, 1]]", False),
    ],
)
def test_sizes_without_strides_are_a_sparse_tensor(shapes: str, strides: str | None, expected: bool) -> None:
    signature = parse_signature(shapes, '["float"]', strides, None)
    assert is_sparse_tensor(signature.inputs[0]) is expected
    assert is_sparse("aten::add", signature) is expected


def test_a_tensor_packed_by_a_library_is_dense() -> None:
    assert not is_sparse("mkldnn::_linear_pointwise", Signature((SPARSE,)))


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ((tensor(200, 64),), (200, False)),
        ((tensor(1, 200, dtype="int64"),), (200, False)),
        ((tensor(1000, 64), tensor(200, 64)), (200, False)),
        ((tensor(1000, 64),), (None, True)),  # the values, or a dense operand
        ((SPARSE, tensor(64, 1000), tensor(200)), (None, False)),
        ((tensor(1, 200),), (None, False)),  # no indices
    ],
)
def test_rows_inside(inside: tuple[Input, ...], expected: tuple[int | None, bool]) -> None:
    assert count_rows_inside((1000, 64), "aten::mul", Signature(inside)) == expected


def test_a_cut_tells_its_length_and_a_tensor_without_a_size_nothing() -> None:
    cut = Signature((tensor(1, 700, dtype="int64"), Input(value=1), Input(value=0), Input(value=423)))
    assert count_rows_inside((1000, 64), "aten::narrow", cut) == (423, False)
    assert count_rows_inside((1000, 64), "aten::resize_", Signature((tensor(1, 0, dtype="int64"),))) == (None, False)


def test_sizes_that_no_tensor_has_tell_nothing() -> None:
    assert count_rows_inside((1 << 70, 64), "aten::mul", Signature((tensor(1 << 70, 64), tensor(1 << 65, 64)))) == (None, False)
    cut = Signature((tensor(1, 700, dtype="int64"), Input(value=1), Input(value=0), Input(value=-5)))
    assert count_rows_inside((1000, 64), "aten::narrow", cut) == (700, False)


def test_values_of_a_sparse_tensor_have_a_dimension_besides_its_rows() -> None:
    assert find_sparse_size(Signature((tensor(4), SPARSE))) == (1000, 64)
    assert find_sparse_size(Signature((Input(dtype="fp32", shape=(1000,), strides=()),))) is None
    assert find_sparse_size(Signature((tensor(4),))) is None


def test_a_product_is_none_of_the_ops_on_rows() -> None:
    with pytest.raises(NotModelledError):
        estimate_sparse_cost("aten::mm", Signature((SPARSE, tensor(64, 32))), HeldRows(200, 200, 200))

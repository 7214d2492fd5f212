"""What the rules need to know of a call beyond its cost: family, dtype, GEMM dimensions, copy kind. Once per distinct signature."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import polars as pl

from gpudiag.model.signature import ITEM_BYTES, Input, Signature, parse_signature
from gpudiag.roofline.families import base_name, family

FLOATING = ("fp64", "fp32", "fp16", "bf16", "fp8", "fp4")


class Call(msgspec.Struct, frozen=True):
    """One distinct (operator, signature). None: not recorded, or does not apply to this operator."""

    op_name: str
    signature: int | None
    family: str
    dtype: str | None = None
    """Type of the first floating (else first) tensor."""
    item_bytes: int | None = None
    numel: int | None = None
    """Elements of the largest tensor: the output of an element-wise op."""
    batch: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    """GEMM dimensions; for a convolution n and k are the output and the input channels of one group, m is None."""
    copy_kind: str | None = None
    """layout (other strides) | cast (other dtype) | plain; None: no copy, or strides were not recorded."""
    zeroed_bytes: int | None = None
    shapes: str = ""
    """Shapes as text for messages."""


SCHEMA = {
    "op_name": pl.String, "signature": pl.Int64, "family": pl.String, "dtype": pl.String, "item_bytes": pl.Int64, "numel": pl.Int64,
    "batch": pl.Int64, "m": pl.Int64, "n": pl.Int64, "k": pl.Int64, "copy_kind": pl.String, "zeroed_bytes": pl.Int64, "shapes": pl.String,
}  # fmt: skip

_INT64_MAX = 2**63 - 1


def table(pairs: Iterable[tuple[str, int | None]], signatures: pl.DataFrame) -> pl.DataFrame:
    """Return one row (fields of Call) per (operator name, signature row) of `pairs`."""
    rows = [msgspec.structs.asdict(_bounded(describe(name, sig, signatures))) for name, sig in pairs]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def describe(name: str, row: int | None, signatures: pl.DataFrame) -> Call:
    """Return what is known of operator `name` called with row `row` of `signatures`."""
    if row is None or not 0 <= row < signatures.height:
        return Call(name, row, family(name))
    texts = signatures.row(row, named=True)
    signature = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"])
    return from_signature(name, row, signature)


def from_signature(name: str, row: int | None, signature: Signature) -> Call:
    """Return the description of operator `name` called with `signature`."""
    tensors = [item for item in signature.inputs if item.is_tensor]
    group = family(name)
    lead = next((item for item in tensors if item.dtype in FLOATING), tensors[0] if tensors else None)
    batch, m, n, k = dimensions(name, signature) or (None, None, None, None)
    return Call(
        op_name=name,
        signature=row,
        family=group,
        dtype=lead.dtype if lead else None,
        item_bytes=ITEM_BYTES.get(lead.dtype or "") if lead else None,
        numel=max((item.numel for item in tensors), default=None),
        batch=batch,
        m=m,
        n=n,
        k=k,
        copy_kind=copy_kind(name, signature),
        zeroed_bytes=_zeroed_bytes(name, signature),
        shapes=" x ".join("[" + ", ".join(map(str, item.shape)) + "]" for item in tensors[:4]),
    )


def dimensions(name: str, signature: Signature) -> tuple[int | None, int | None, int, int] | None:
    """Return (batch, m, n, k) of a GEMM, (None, None, output channels, input channels of a group) of a convolution, else None."""
    short = base_name(name)
    if family(name) == "conv":
        return _channels(short, signature)
    first = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "_scaled_mm": 0, "_int_mm": 0}.get(short, 1)
    if family(name) != "gemm":
        return None
    a, b = signature.tensor(first), signature.tensor(first + 1)
    if a is None or b is None or not a.shape or not b.shape:
        return None
    return _linear_dimensions(a, b) if short == "linear" else _product_dimensions(a, b)


def _linear_dimensions(a: Input, weight: Input) -> tuple[int | None, int | None, int, int] | None:
    if len(weight.shape) != 2:
        return None
    return 1, math.prod(a.shape[:-1]), weight.shape[0], weight.shape[1]


def _product_dimensions(a: Input, b: Input) -> tuple[int | None, int | None, int, int] | None:
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        return None
    if len(b.shape) == 2:  # matmul folds the leading dimensions into m
        return 1, math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    return math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]


def _channels(short: str, signature: Signature) -> tuple[int | None, int | None, int, int] | None:
    # input, weight, ... forward; grad_output, input, weight backward (schemas of torch 2.13 and of the cudnn/miopen ops before 1.11)
    weight = signature.tensor(2 if "backward" in short else 1)
    if weight is None or len(weight.shape) < 3:
        return None
    return None, None, weight.shape[0], weight.shape[1]


def copy_kind(name: str, signature: Signature) -> str | None:
    """Return 'layout', 'cast' or 'plain' for a copying operator; None for others and where strides were not recorded."""
    short = base_name(name)
    if short in ("cat", "stack", "constant_pad_nd", "pad", "repeat", "_reshape_copy", "narrow_copy", "roll", "flip"):
        return "layout"
    if short not in ("copy", "clone", "contiguous", "_to_copy"):
        return None
    source = signature.tensor(1 if short == "copy" else 0)
    target = signature.tensor(0)
    if source is None or target is None:
        return None
    if short == "copy" and source.dtype != target.dtype:
        return "cast"
    if short == "_to_copy":
        return None  # its target is its child copy_, which carries the kernel
    if source.strides is None or target.strides is None:
        return None
    return "layout" if _layout_changes(short, source, target) else "plain"


def _layout_changes(short: str, source: Input, target: Input) -> bool:
    """Return whether the copy reorders elements: other strides of the target, or (clone) a source that is not dense row-major."""
    if 0 in (source.strides or ()):
        return True  # an expanded source is written out
    expected = target.strides if short == "copy" and target.shape == source.shape else _row_major(source.shape)
    return any(size > 1 and have != want for size, have, want in zip(source.shape, source.strides or (), expected or (), strict=False))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _zeroed_bytes(name: str, signature: Signature) -> int | None:
    """Return the bytes that zero_ or _foreach_zero_ writes (tensor lists carry no dtype: fp32, the default of gradients)."""
    short = base_name(name)
    if short == "zero":
        tensor = signature.tensor(0)
        return tensor.numel * tensor.item_bytes if tensor else None
    if short == "_foreach_zero_":
        lists = signature.inputs[0].tensors if signature.inputs else None
        return sum(math.prod(shape) for shape in lists) * 4 if lists else None
    return None


def _bounded(call: Call) -> Call:
    """Return `call` without numbers that no int64 column holds: sizes of a hostile or broken trace."""
    bad = {
        field: None
        for field in ("numel", "batch", "m", "n", "k", "zeroed_bytes")
        if (value := getattr(call, field)) is not None and abs(value) > _INT64_MAX
    }
    return msgspec.structs.replace(call, **bad) if bad else call

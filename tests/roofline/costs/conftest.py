"""Builds signatures the way torch.profiler records them: JSON texts of shapes, types, strides and concrete inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gpudiag.model.ops import Cost, Signature, parse_signature
from gpudiag.roofline.costs import estimate_cost

TORCH_NAMES = {
    "fp64": "double",
    "fp32": "float",
    "fp16": "c10::Half",
    "bf16": "c10::BFloat16",
    "fp8": "c10::Float8_e4m3fn",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short int",
    "int32": "int",
    "int64": "long int",
    "bool": "bool",
}


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _entry(value: Any) -> tuple[Any, str, Any, str]:
    """Return (dims, type, strides, concrete) of one argument.

    ("bf16", shape[, strides]): a tensor; [shape, ...] of tuples: a tensor list; other lists and scalars: plain values.
    """
    if isinstance(value, tuple):
        dtype, shape, *strides = value
        return list(shape), TORCH_NAMES[dtype], list(strides[0]) if strides else _contiguous(shape), ""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [list(shape) for shape in value], "TensorList", [_contiguous(shape) for shape in value], ""
    if value is None:
        return [], "", [], ""
    return [], "ScalarList" if isinstance(value, list) else "Scalar", [], str(value)


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Signature]:
    """Returns the signature of a call with these arguments."""

    def build(*arguments: Any, concrete: bool = True) -> Signature:
        dims, types, strides, values = ([entry[i] for entry in map(_entry, arguments)] for i in range(4))
        return parse_signature(json.dumps(dims), json.dumps(types), json.dumps(strides), json.dumps(values) if concrete else None)

    return build


@pytest.fixture(scope="session")
def cost(recorded: Callable[..., Signature]) -> Callable[..., Cost]:
    """Returns the cost of a call with these arguments; fails where there is none."""

    def of(name: str, *arguments: Any, concrete: bool = True) -> Cost:
        found = estimate_cost(name, recorded(*arguments, concrete=concrete))
        assert isinstance(found, Cost), found
        return found

    return of

"""Every schema name that torch.utils.flop_counter knows, on meta tensors over a grid of shapes: our matrix FLOPs equal its count.

Its conventions: no causal discount, bias ignored, packed sequences as long as the longest. Its one error (the weight gradient of a grouped
convolution is multiplied by `groups`) is undone by arithmetic that is shown.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs import estimate_cost

torch = pytest.importorskip("torch", reason="compares with torch's own formulas")
counter = pytest.importorskip("torch.utils.flop_counter")
pytest.importorskip("torch.nn.attention.varlen", reason="registers its formulas when it is imported")
aten = torch.ops.aten

Arguments = tuple[Any, ...]
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.int32: "int32", torch.int64: "int64"}

NOT_COMPARABLE = {
    "_slow_conv2d_forward": "the registered formula takes seven positional arguments, the operator has six: it cannot be called",
    "flex_attention": "a higher-order operator: the profiler records the kernel that Inductor writes for it, not the operator",
    "flex_attention_backward": "as flex_attention",
}


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(*shape, device="meta", dtype=dtype)


def as_input(value: Any) -> Input:
    """Return an argument as the profiler would have recorded it."""
    if isinstance(value, torch.Tensor):
        return Input(dtype=DTYPES[value.dtype], shape=tuple(value.shape), strides=tuple(value.stride()))
    return Input(value=tuple(value) if isinstance(value, list) else value)


def ours(name: str, arguments: Arguments) -> Cost:
    found = estimate_cost(name, Signature(tuple(as_input(value) for value in arguments)))
    assert isinstance(found, Cost), (name, found)
    assert found.provenance == "exact"
    return found


def counted(target: Any, arguments: Arguments, result: Any = None) -> int:
    return int(counter.flop_registry[target](*arguments, out_val=result))


def _gemms() -> Iterator[tuple[Any, Arguments]]:
    for m, k, n in ((1, 7, 5), (64, 32, 48), (3, 1, 2)):
        yield aten.mm, (meta(m, k), meta(k, n))
        yield aten.mm, (meta(k, m).t(), meta(n, k).t())
        for bias in (meta(n), meta(m, n), meta(1, n).expand(m, n)):
            yield aten.addmm, (bias, meta(m, k), meta(k, n), 1, 1)
        yield (
            aten._scaled_mm,
            (
                *(meta(m * 16, k * 16, dtype=torch.float8_e4m3fn), meta(n * 16, k * 16, dtype=torch.float8_e4m3fn).t()),
                *(meta(1, dtype=torch.float32), meta(1, dtype=torch.float32), None, None, 15, False),
            ),
        )
        for b in (1, 6):
            yield aten.bmm, (meta(b, m, k), meta(b, k, n))
            yield aten.baddbmm, (meta(b, m, n), meta(b, m, k), meta(b, k, n), 1, 1)


def test_products() -> None:
    cases = list(_gemms())
    assert len(cases) == 30
    for target, arguments in cases:
        tensors = arguments[:3] if target in (aten.addmm, aten.baddbmm) else arguments  # the counter's formula takes no beta and alpha
        where = (target, [tuple(item.shape) for item in arguments[:3] if isinstance(item, torch.Tensor)])
        assert ours(f"aten::{target.__name__}", arguments).matrix_flops == counted(target, tensors) > 0, where


# input, weight, stride, padding, dilation, transposed, output_padding, groups
CONVOLUTIONS = [
    ((2, 4, 11), (6, 4, 3), [2], [1], [2], False, [0], 1),
    ((2, 4, 9, 7), (6, 4, 3, 2), [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
    ((2, 4, 9, 7), (6, 2, 3, 3), [1, 1], [2, 2], [2, 2], False, [0, 0], 2),
    ((2, 8, 9, 7), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 8),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 3), [1, 2, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    ((2, 4, 5), (4, 3, 3), [2], [0], [1], True, [1], 1),
    ((2, 4, 5, 6), (4, 3, 2, 3), [2, 2], [1, 1], [1, 1], True, [0, 0], 1),
    ((2, 4, 5, 6), (4, 3, 3, 3), [2, 1], [1, 0], [1, 2], True, [1, 0], 2),
    ((1, 3, 4, 5, 6), (3, 2, 2, 2, 2), [2, 2, 2], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case: tuple[Any, ...]) -> None:
    x, weight, stride, padding, dilation, transposed, extra, groups = meta(*case[0]), meta(*case[1]), *case[2:]
    plain = (x, weight, None, stride, padding, dilation, transposed, extra, groups)
    result = aten.convolution(*plain)
    for target, tail in ((aten.convolution, ()), (aten._convolution, (False, False, True)), (aten.convolution_overrideable, ())):
        assert ours(f"aten::{target.__name__}", (*plain, *tail)).matrix_flops == counted(target, (*plain, *tail), result) > 0
    if not transposed:
        arguments = (x, weight, padding, stride, dilation, groups, False, False, True)
        assert ours("aten::cudnn_convolution", arguments).matrix_flops == counted(aten.cudnn_convolution, arguments, result) > 0


@pytest.mark.parametrize("mask", [[True, True, False], [False, True, True], [True, False, False]], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution_gradients(case: tuple[Any, ...], mask: list[bool]) -> None:
    x, weight, *rest = meta(*case[0]), meta(*case[1]), *case[2:]
    groups = case[-1]
    forward = ours("aten::convolution", (x, weight, None, *rest)).matrix_flops
    grad = aten.convolution(x, weight, None, *rest)
    arguments = (grad, x, weight, [0], *rest, mask)
    shapes = (x if mask[0] else None, weight if mask[1] else None, None)
    found = ours("aten::convolution_backward", arguments).matrix_flops
    # the counter takes the gradients' grouped weight for a full one: groups x too much for the weight
    assert found + (groups - 1) * forward * mask[1] == counted(aten.convolution_backward, arguments, shapes)
    assert found == forward * (mask[0] + mask[1])


HEADS = [(2, 4, 4, 16, 16, 32, 32), (1, 8, 2, 5, 24, 16, 16), (3, 4, 1, 7, 7, 8, 16), (1, 32, 8, 1, 128, 64, 64)]


def _qkv(case: tuple[int, ...], length_first: bool) -> tuple[Any, Any, Any, Any]:
    """Return query, key, value and a gradient of the result, as [batch, heads, length, dim] or [batch, length, heads, dim]."""
    b, h, hk, sq, sk, d, dv = case
    sizes = ((h, sq, d), (hk, sk, d), (hk, sk, dv), (h, sq, dv))
    q, k, v, grad = (meta(b, s, n, w) if length_first else meta(b, n, s, w) for n, s, w in sizes)
    return q, k, v, grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_sdpa(case: tuple[int, ...], causal: bool) -> None:
    q, k, v, grad = _qkv(case, length_first=False)
    lse, state, sizes = meta(*case[:2], case[3], dtype=torch.float32), meta(1, dtype=torch.int64), (case[3], case[4])
    for name, arguments, back in (
        ("flash_attention", (0.0, causal, False, None), (grad, q, k, v, grad, lse, None, None, *sizes, 0.0, causal, state, state, None)),
        ("flash_attention_for_cpu", (0.0, causal, None, None), (grad, q, k, v, grad, lse, 0.0, causal, None, None)),
        (
            "efficient_attention",
            (None, True, 0.0, causal, None),
            (grad, q, k, v, None, grad, lse, state, state, 0.0, [True] * 4, causal, None),
        ),
        (
            "cudnn_attention",
            (None, True, 0.0, causal, False, None),
            (grad, q, k, v, grad, lse, state, state, None, None, None, *sizes, 0.0, causal, None),
        ),
    ):
        op = f"_scaled_dot_product_{name}"
        if getattr(aten, op) not in counter.flop_registry:  # that of CPUs: since torch 2.15
            continue
        forward, backward = ours(f"aten::{op}", (q, k, v, *arguments)), ours(f"aten::{op}_backward", back)
        full = counted(getattr(aten, op), (q, k, v, *arguments)), counted(getattr(aten, f"{op}_backward"), back)
        if not causal:
            assert (forward.matrix_flops, backward.matrix_flops) == full
        elif case[3] == case[4]:  # the triangle is half of the square
            assert (2 * forward.matrix_flops, 2 * backward.matrix_flops) == full
        else:
            assert 0 < forward.matrix_flops <= full[0]


def _as_read(target: Any, by_length: Arguments, by_head: Arguments) -> Arguments:
    """Return the tensors in the order that the counter's formula reads: from torch 2.15 on that of flash attention turns them itself."""
    return by_length if "transpose(-2, -3)" in inspect.getsource(counter.flop_registry[target]) else by_head


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_attention_kernels(case: tuple[int, ...]) -> None:
    """[batch, length, heads, dim] as these kernels take it: the counter reads [batch, heads, length, dim] in some, and gets that."""
    by_length, by_head = _qkv(case, length_first=True), _qkv(case, length_first=False)
    sizes, state = (case[3], case[4]), meta(1, dtype=torch.int64)
    lse = meta(*case[:2], case[3], dtype=torch.float32)
    tail = (None, None, *sizes, 0.0, False, False, None, None, None)
    assert ours("aten::_flash_attention_forward", (*by_length[:3], *tail)).matrix_flops == counted(
        aten._flash_attention_forward, (*_as_read(aten._flash_attention_forward, by_length, by_head)[:3], *tail)
    )
    tail = (None, None, None, *sizes, 0.0, 0, True, None, None, None)
    assert ours("aten::_efficient_attention_forward", (*by_length[:3], *tail)).matrix_flops == counted(
        aten._efficient_attention_forward, (*by_head[:3], *tail)
    )
    back = [
        (grad, q, k, v, grad, lse, None, None, *sizes, 0.0, False, state, state, None, None, None)
        for q, k, v, grad in (by_length, _as_read(aten._flash_attention_backward, by_length, by_head))
    ]
    assert ours("aten::_flash_attention_backward", back[0]).matrix_flops == counted(aten._flash_attention_backward, back[1])
    back = [(grad, q, k, v, None, grad, None, None, *sizes, lse, 0.0, state, state, 0, False) for q, k, v, grad in (by_length, by_head)]
    assert ours("aten::_efficient_attention_backward", back[0]).matrix_flops == counted(aten._efficient_attention_backward, back[1])


PACKED = [(3, 4, 4, 16, 16, 32, 32), (2, 8, 2, 5, 24, 16, 16), (4, 4, 1, 7, 7, 8, 8)]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences(case: tuple[int, ...]) -> None:
    """All as long as the longest, which is what the counter assumes where it cannot read the lengths."""
    count, h, hk, sq, sk, d, dv = case
    q, k, v, grad = meta(count * sq, h, d), meta(count * sk, hk, d), meta(count * sk, hk, dv), meta(count * sq, h, dv)
    ends, sizes = meta(count + 1, dtype=torch.int32), (sq, sk)
    lse, state = meta(h, count * sq, dtype=torch.float32), meta(1, dtype=torch.int64)
    varlen = torch.ops.torch_attn
    calls = [
        (aten._flash_attention_forward, (q, k, v, ends, ends, *sizes, 0.0, False, False, None, None, None)),
        (aten._flash_attention_backward, (grad, q, k, v, grad, lse, ends, ends, *sizes, 0.0, False, state, state, None, None, None)),
        (varlen._varlen_attn, (q, k, v, ends, ends, *sizes, False, None, None)),
        (varlen._varlen_attn_out, (grad, q, k, v, ends, ends, *sizes, False, None, None)),
        (varlen._varlen_attn_backward, (grad, q, k, v, grad, lse, ends, ends, *sizes, False, state, None, None)),
    ]
    for target, arguments in calls:
        name = target._qualified_op_name if hasattr(target, "_qualified_op_name") else f"aten::{target.__name__}"
        if target in counter.flop_registry:
            assert ours(name, arguments).matrix_flops == counted(target, arguments) > 0, name
    q, k, v, grad = (item[None] for item in (q, k, v, grad))
    tail = (None, ends, ends, *sizes, 0.0, 0, True, None, None, None)
    assert ours("aten::_efficient_attention_forward", (q, k, v, *tail)).matrix_flops == counted(
        aten._efficient_attention_forward, (q, k, v, *tail)
    )
    back = (grad, q, k, v, None, grad, ends, ends, *sizes, lse, 0.0, state, state, 0, False)
    assert ours("aten::_efficient_attention_backward", back).matrix_flops == counted(aten._efficient_attention_backward, back)


COMPARED = {
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "convolution_backward"),
    *(f"_scaled_dot_product_{name}_attention{tail}" for name in ("flash", "efficient", "cudnn") for tail in ("", "_backward")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *(f"_{name}_attention_{tail}" for name in ("flash", "efficient") for tail in ("forward", "backward")),
    *("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward"),
}


def test_every_registered_name_is_compared_or_has_a_reason() -> None:
    """A new name in torch's registry fails here."""
    registered = {str(target).rsplit(".", 1)[-1] for target in counter.flop_registry}
    assert registered <= COMPARED | set(NOT_COMPARABLE), registered - COMPARED - set(NOT_COMPARABLE)


def test_the_formula_of_slow_conv2d_cannot_be_called() -> None:
    """Its reason in NOT_COMPARABLE holds; the count by shapes is ours."""
    x, weight = meta(2, 4, 9, 7), meta(6, 4, 3, 3)
    arguments = (x, weight, [3, 3], None, [1, 1], [1, 1])
    with pytest.raises(TypeError):
        counted(aten._slow_conv2d_forward, arguments, meta(2, 6, 9, 7))
    expected = counter.conv_flop_count(list(x.shape), list(weight.shape), [2, 6, 9, 7])
    assert ours("aten::_slow_conv2d_forward", arguments).matrix_flops == expected

"""The worked examples of the design knowledge (op_costs.md), recomputed from signatures as torch would record them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpudiag.model.cost import Cost

Example = dict[str, Any]
CostOf = Callable[..., Cost]

NOT_COVERED = {
    "emb-narrow": "32-byte sectors are no compulsory traffic (ideal bytes are covered below)",
    "adamw-fused-bf16": "torch does not record the dtype of tensor lists; fp32 is assumed",
    "lstm-1024": "RNNs have no formula yet",
    "gru-512": "RNNs have no formula yet",
    "lstm-tiny": "RNNs have no formula yet",
    "h2d-imagenet": "host to device copies are judged by the bytes of the memcpy record",
    "coscos-fused": "a fused kernel is no aten op",
    "ar-8": "collective",
    "ag-8": "collective",
    "rs-16": "collective",
    "ddp-7b": "collective",
    "fsdp-7b": "collective",
    "llama31-8b": "model level",
    "torchtitan-8gpu-bf16": "model level",
    "torchtitan-8gpu-compile": "model level",
    "megatron-1t": "model level",
    "gpt2-124m": "model level",
}


def _examples(knowledge: Path) -> dict[str, Example]:
    text = (knowledge / "op_costs.md").read_text()
    blocks = re.findall(r"```yaml examples\n(.*?)```", text, flags=re.DOTALL)
    return {item["id"]: item for block in blocks for item in yaml.safe_load(block)}


def _same(found: Cost, expect: Example, flops: str = "flops", moved: str = "bytes", extra: int = 0) -> None:
    if flops in expect:
        assert found.flops == expect[flops]
    assert found.bytes == expect[moved] + extra
    if "ai" in expect and flops == "flops":
        assert found.flops / found.bytes == pytest.approx(expect["ai"], rel=5e-3)


def _gemm(cost: CostOf, i: Example, expect: Example) -> None:
    m, k, n, dtype = i["m"], i["k"], i["n"], i["dtype"]
    a, b = (dtype, (m, k)), (dtype, (k, n), (1, k))
    if i.get("bias"):
        _same(cost("aten::addmm", (dtype, (n,)), a, b, 1, 1), expect)
    else:
        _same(cost("aten::mm", a, b), expect)
    linear = cost("aten::linear", a, (dtype, (n, k)), (dtype, (n,)) if i.get("bias") else None)
    _same(linear, expect)
    assert linear.dtype == dtype


def _bmm(cost: CostOf, i: Example, expect: Example) -> None:
    b, m, k, n, dtype = (i[key] for key in ("b", "m", "k", "n", "dtype"))
    _same(cost("aten::bmm", (dtype, (b, m, k)), (dtype, (b, k, n))), expect)


def _scaled_mm(cost: CostOf, i: Example, expect: Example) -> None:
    m, k, n = i["m"], i["k"], i["n"]
    scale = ("fp32", ())
    found = cost("aten::_scaled_mm", ("fp8", (m, k)), ("fp8", (k, n), (1, k)), scale, scale, None, None, 15, False)
    _same(found, expect, extra=8)  # the two per-tensor scales that the example leaves out


def _linear_backward(cost: CostOf, i: Example, expect: Example) -> None:
    m, k, n, dtype = i["m"], i["k"], i["n"], i["dtype"]
    dgrad = cost("aten::mm", (dtype, (m, n)), (dtype, (n, k)))
    wgrad = cost("aten::mm", (dtype, (n, m), (1, n)), (dtype, (m, k)))
    assert (dgrad.flops, wgrad.flops) == (expect["dgrad_flops"], expect["wgrad_flops"])
    assert dgrad.bytes + wgrad.bytes == expect["bytes"]


def _convolution(cost: CostOf, i: Example, expect: Example) -> None:
    groups, dtype, p, q = i["groups"], i["dtype"], *expect["out_hw"]
    x, weight = (dtype, (i["n"], i["c"], i["h"], i["w"])), (dtype, (i["k"], i["c"] // groups, i["r"], i["s"]))
    stride, pad = [i["stride"]] * 2, [i["pad"]] * 2
    _same(cost("aten::convolution", x, weight, None, stride, pad, [1, 1], False, [0, 0], groups), expect)
    _same(cost("aten::cudnn_convolution", x, weight, pad, stride, [1, 1], groups, False, False, True), expect)
    _same(cost("aten::miopen_convolution", x, weight, None, pad, stride, [1, 1], groups, False, False), expect)
    grad = (dtype, (i["n"], i["k"], p, q))
    rest = (stride, pad, [1, 1], False, [0, 0], groups)
    both = cost("aten::convolution_backward", grad, x, weight, [0], *rest, [True, True, False])
    _same(both, expect, "bwd_flops", "bwd_bytes")
    weight_only = cost("aten::convolution_backward", grad, x, weight, [0], *rest, [False, True, False])
    assert 2 * weight_only.flops == expect["bwd_flops"]


def _transposed(cost: CostOf, i: Example, expect: Example) -> None:
    x, weight = (i["dtype"], (i["n"], i["c"], i["h"], i["w"])), (i["dtype"], (i["c"], i["k"], i["r"], i["s"]))
    stride, pad = [i["stride"]] * 2, [i["pad"]] * 2
    _same(cost("aten::convolution", x, weight, None, stride, pad, [1, 1], True, [0, 0], 1), expect)
    _same(cost("aten::cudnn_convolution_transpose", x, weight, pad, [0, 0], stride, [1, 1], 1, False, False, True), expect)
    grad = (i["dtype"], (i["n"], i["k"], *expect["out_hw"]))
    back = cost("aten::convolution_backward", grad, x, weight, [0], stride, pad, [1, 1], True, [0, 0], 1, [True, True, False])
    assert back.flops == expect["bwd_flops"]


def _attention(cost: CostOf, i: Example, expect: Example) -> None:
    b, h, hk, sq, sk, d, dtype = (i[key] for key in ("b", "h", "h_kv", "s_q", "s_k", "d", "dtype"))
    q, kv, lse = (dtype, (b, h, sq, d)), (dtype, (b, hk, sk, d)), ("fp32", (b, h, sq))
    forward = cost("aten::_scaled_dot_product_flash_attention", q, kv, kv, 0.0, i["causal"], False, None)
    _same(forward, expect, moved="bytes_flash")
    full = cost("aten::_scaled_dot_product_flash_attention", q, kv, kv, 0.0, False, False, None)
    assert full.flops == expect["flops_flop_counter"]
    state = ("int64", ())
    name = "aten::_scaled_dot_product_flash_attention_backward"
    backward = cost(name, q, q, kv, kv, q, lse, None, None, sq, sk, 0.0, i["causal"], state, state, None)
    _same(backward, expect, "bwd_flops_flash", "bwd_bytes_flash")
    short_q, short_kv = (dtype, (b, sq, h, d)), (dtype, (b, sk, hk, d))
    inner = cost("aten::_flash_attention_forward", short_q, short_kv, short_kv, None, None, sq, sk, 0.0, i["causal"], False, None)
    assert inner == forward


def _norm(cost: CostOf, i: Example, expect: Example) -> None:
    rows, cols, dtype, p = i["rows"], i["cols"], i["dtype"], i["param_dtype"]
    x, gamma, stat = (dtype, (rows, cols)), (p, (cols,)), ("fp32", (rows, 1))
    _same(cost("aten::native_layer_norm", x, [cols], gamma, gamma, 1e-5), expect)
    back = cost("aten::native_layer_norm_backward", x, x, [cols], stat, stat, gamma, gamma, [True, True, True])
    _same(back, expect, "bwd_flops", "bwd_bytes")


def _rms(cost: CostOf, i: Example, expect: Example) -> None:
    rows, cols, dtype, p = i["rows"], i["cols"], i["dtype"], i["param_dtype"]
    x, gamma, stat = (dtype, (rows, cols)), (p, (cols,)), ("fp32", (rows, 1))
    _same(cost("aten::_fused_rms_norm", x, [cols], gamma, None), expect)
    _same(cost("aten::_fused_rms_norm_backward", x, x, [cols], stat, gamma, [True, True]), expect, "bwd_flops", "bwd_bytes")


def _batch_norm(cost: CostOf, i: Example, expect: Example) -> None:
    x, c = (i["dtype"], (i["n"], i["c"], i["h"], i["w"])), (i["param_dtype"], (i["c"],))
    forward = cost("aten::cudnn_batch_norm", x, c, c, c, c, True, 0.1, 1e-5)
    assert (forward.bytes, forward.flops) == (expect["bytes_min"], 8 * expect["elements"])
    backward = cost("aten::native_batch_norm_backward", x, x, c, c, c, c, c, True, 1e-5, [True, True, True])
    assert backward.bytes == expect["bwd_bytes_min"]


def _group_norm(cost: CostOf, i: Example, expect: Example) -> None:
    shape, groups = (i["n"], i["c"], i["h"], i["w"]), i["groups"]
    x, c, stat = (i["dtype"], shape), (i["param_dtype"], (i["c"],)), ("fp32", (i["n"], groups))
    sizes = (i["n"], i["c"], i["h"] * i["w"], groups)
    _same(cost("aten::native_group_norm", x, c, c, *sizes, 1e-5), expect)
    back = cost("aten::native_group_norm_backward", x, x, stat, stat, c, *sizes, [True, True, True])
    assert back.bytes == expect["bwd_bytes"]


def _softmax(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["rows"], i["cols"]))
    _same(cost("aten::_softmax", x, -1, False), expect)
    _same(cost("aten::_softmax_backward_data", x, x, -1, 5), expect, "bwd_flops", "bwd_bytes")


def _cross_entropy(cost: CostOf, i: Example, expect: Example) -> None:
    """Eager cross entropy = log_softmax, nll; backward = zero fill, nll scatter, log_softmax backward."""
    logits, target, one = ("fp32", (i["tokens"], i["vocab"])), ("int64", (i["tokens"],)), ("fp32", ())
    forward = cost("aten::_log_softmax", logits, -1, False).bytes + cost("aten::nll_loss_forward", logits, target, None, 1, -100).bytes
    scatter = cost("aten::nll_loss_backward", one, logits, target, None, 1, -100, one).bytes
    assert scatter == 4 * i["tokens"] + 8 * i["tokens"] + 4  # the example leaves out the scatter's own targets, values, gradient
    softmax = cost("aten::_log_softmax_backward_data", logits, logits, -1, 6).bytes
    backward = cost("aten::fill_", logits, 0).bytes + softmax
    casts = 0
    if i["dtype"] != "fp32":
        wide = ("fp32", (i["tokens"], i["vocab"]))
        cast = cost("aten::_to_copy", (i["dtype"], wide[1]), 6, None, None, None, False, None).bytes
        assert cast == expect["cast_bytes"]
        casts = 2 * cast
    if "fwd_bytes" in expect:
        assert (forward + casts // 2, backward + casts // 2) == (expect["fwd_bytes"], expect["bwd_bytes"])
    assert forward + backward + casts == expect["total_bytes"]


def _embedding(cost: CostOf, i: Example, expect: Example) -> None:
    t, d, v, dtype = i["tokens"], i["dim"], i["vocab"], i["dtype"]
    _same(cost("aten::embedding", (dtype, (v, d)), ("int64", (t,)), -1, False, False), expect)
    fill = cost("aten::fill_", (dtype, (v, d)), 0)
    back = cost("aten::embedding_dense_backward", (dtype, (t, d)), ("int64", (t,)), v, -1, False)
    assert fill.bytes == expect["grad_bytes"]
    assert fill.bytes + back.bytes == expect["bwd_bytes"]


def _relu(cost: CostOf, i: Example, expect: Example) -> None:
    _same(cost("aten::relu", (i["dtype"], (i["numel"],))), expect)
    _same(cost("aten::relu_", (i["dtype"], (i["numel"],))), expect)


def _add(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["numel"],))
    _same(cost("aten::add", x, x, 1), expect)


def _cos(cost: CostOf, i: Example, expect: Example) -> None:
    assert expect["kernels"] * cost("aten::cos", (i["dtype"], (i["numel"],))).bytes == expect["bytes"]


def _cast(cost: CostOf, i: Example, expect: Example) -> None:
    source, target = (i["dtype_in"], (i["numel"],)), (i["dtype_out"], (i["numel"],))
    _same(cost("aten::_to_copy", source, 15, None, None, None, False, None), expect)
    _same(cost("aten::copy_", target, source, False), expect)


def _broadcast(cost: CostOf, i: Example, expect: Example) -> None:
    rows, columns = i["shape"]
    _same(cost("aten::add", (i["dtype"], (rows, columns)), (i["dtype"], (columns,)), 1), expect)
    expanded = (i["dtype"], (rows, columns), (0, 1))
    _same(cost("aten::add", (i["dtype"], (rows, columns)), expanded, 1), expect)


def _dropout(cost: CostOf, i: Example, expect: Example) -> None:
    x, mask = (i["dtype"], (i["numel"],)), ("bool", (i["numel"],))
    assert cost("aten::native_dropout", x, 0.1, True).bytes == expect["bytes"]
    assert cost("aten::native_dropout_backward", x, mask, 1.1).bytes == expect["bwd_bytes"]


def _sum_all(cost: CostOf, i: Example, expect: Example) -> None:
    _same(cost("aten::sum", (i["dtype"], (i["numel"],)), None), expect)
    _same(cost("aten::sum", (i["dtype"], (i["numel"],)), [], False, None), expect)


def _sum_rows(cost: CostOf, i: Example, expect: Example) -> None:
    _same(cost("aten::sum", (i["dtype"], tuple(i["shape"])), [1], False, None), expect)


def _grad_norm(cost: CostOf, i: Example, expect: Example) -> None:
    gradients = [(i["params"] // 2,), (i["params"] // 2,)]
    assert cost("aten::_foreach_norm", gradients, 2, None).bytes == expect["bytes_norm"] + 2 * 4
    assert cost("aten::_foreach_mul_", gradients, ("fp32", ())).bytes == expect["bytes_clip_scale"]


def _max_pool(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["n"], i["c"], i["h"], i["w"]))
    rest = ([i["k"]] * 2, [i["stride"]] * 2, [i["pad"]] * 2, [1, 1], False)
    _same(cost("aten::max_pool2d", x, *rest), expect)
    if "bytes_with_indices" in expect:
        assert cost("aten::max_pool2d_with_indices", x, *rest).bytes == expect["bytes_with_indices"]


def _avg_pool(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["n"], i["c"], i["h"], i["w"]))
    _same(cost("aten::mean", x, [-1, -2], True, None), expect)
    _same(cost("aten::_adaptive_avg_pool2d", x, [1, 1]), expect)


def _fused(cost: CostOf, i: Example, expect: Example) -> None:
    p = [(i["params"],)]
    if "adamw" in expect["op"]:
        _same(cost("aten::_fused_adamw_", p, p, p, p, None, [(1,)], 1e-3), expect)
    else:
        _same(cost("aten::_fused_sgd_", p, p, p, 0.0, 0.9, 0.1), expect)


def _adam_foreach(cost: CostOf, i: Example, expect: Example) -> None:
    p = [(i["params"],)]
    one, two = (("mul_", (p, 0.9)), ("lerp_", (p, p, 0.1))), (("mul_", (p, 0.9)), ("addcmul_", (p, p, p, 0.1)))
    three = (("sqrt", (p,)), ("div_", (p, [0.5])), ("add_", (p, 1e-8)), ("addcdiv_", (p, p, p, [0.1])))
    passes = (*one, *two, *three)
    assert sum(cost(f"aten::_foreach_{name}", *arguments).bytes for name, arguments in passes) == expect["bytes"]


def _sgd_foreach(cost: CostOf, i: Example, expect: Example) -> None:
    p = [(i["params"],)]
    calls = (("mul_", (p, 0.9)), ("add_", (p, p, 1.0)), ("add_", (p, p, -0.1)))
    assert sum(cost(f"aten::_foreach_{name}", *arguments).bytes for name, arguments in calls) == expect["bytes"]


def _cat(cost: CostOf, i: Example, expect: Example) -> None:
    parts = [(i["numel_total"] // 3,)] * 3
    found = cost("aten::cat", parts, 0, (i["dtype"], (i["numel_total"],)))
    assert (found.bytes, found.provenance) == (expect["bytes"], "exact")


def _clone(cost: CostOf, i: Example, expect: Example) -> None:
    x, transposed = (i["dtype"], (4096, 8192)), (i["dtype"], (4096, 8192), (1, 4096))
    assert i["numel"] == 4096 * 8192
    _same(cost("aten::clone", transposed, 0), expect)
    _same(cost("aten::copy_", x, transposed, False), expect)


def _gather_rows(cost: CostOf, i: Example, expect: Example) -> None:
    table, index = (i["dtype"], (4 * i["rows"], i["width"])), (i["index"], (i["rows"],))
    _same(cost("aten::index_select", table, 0, index), expect)


def _index_add(cost: CostOf, i: Example, expect: Example) -> None:
    target, source = (i["dtype"], (i["unique"], i["width"])), (i["dtype"], (i["rows"], i["width"]))
    _same(cost("aten::index_add_", target, 0, (i["index"], (i["rows"],)), source, 1), expect)


def _mse(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["numel"],))
    _same(cost("aten::mse_loss", x, x, 1), expect)
    assert cost("aten::mse_loss_backward", (i["dtype"], ()), x, x, 1).bytes == expect["bwd_bytes"]


def _bce(cost: CostOf, i: Example, expect: Example) -> None:
    x = (i["dtype"], (i["numel"],))
    _same(cost("aten::binary_cross_entropy_with_logits", x, x, None, None, 1), expect)


COVERED: dict[str, Callable[[CostOf, Example, Example], None]] = {
    **dict.fromkeys(("mm-square", "linear-nv-512", "linear-nv-1", "addmm-bias", "ffn-llama8b", "clip-logits"), _gemm),
    "bmm-96": _bmm,
    "scaled-mm": _scaled_mm,
    "linear-bwd": _linear_backward,
    **dict.fromkeys(("conv3x3", "conv1x1", "resnet-stem", "depthwise", "grouped4"), _convolution),
    "conv-transpose": _transposed,
    **dict.fromkeys(("mha-2k", "mha-2k-causal", "gqa-2k-causal", "long-8k-causal", "decode-1xq"), _attention),
    **dict.fromkeys(("ln-bert", "ln-8k-4k-bf16"), _norm),
    "rms-8k-4k-bf16": _rms,
    "bn-train-resnet": _batch_norm,
    "gn-unet": _group_norm,
    "softmax-rows": _softmax,
    **dict.fromkeys(("ce-llama3-fp32", "ce-llama3-autocast", "ce-gpt2"), _cross_entropy),
    **dict.fromkeys(("emb-llama3-bf16", "emb-bert-fp32"), _embedding),
    "relu-fp16": _relu,
    "add-fp32": _add,
    "coscos-unfused": _cos,
    "cast-fp32-bf16": _cast,
    "bias-broadcast": _broadcast,
    "dropout-train": _dropout,
    "sum-all": _sum_all,
    "sum-rows": _sum_rows,
    "grad-norm": _grad_norm,
    **dict.fromkeys(("maxpool-3x3-s1", "maxpool-resnet"), _max_pool),
    "avgpool-global": _avg_pool,
    **dict.fromkeys(("adamw-fused-fp32", "sgdm-fused-fp32"), _fused),
    "adamw-foreach-fp32": _adam_foreach,
    "sgdm-foreach-fp32": _sgd_foreach,
    "cat-3": _cat,
    "contiguous": _clone,
    "gather-rows": _gather_rows,
    "scatter-add": _index_add,
    "mse": _mse,
    "bce-logits": _bce,
}


def test_every_example_is_covered_or_named(knowledge: Path) -> None:
    assert set(_examples(knowledge)) == set(COVERED) | set(NOT_COVERED)


@pytest.mark.parametrize("name", sorted(COVERED))
def test_worked_example(name: str, knowledge: Path, cost: CostOf) -> None:
    example = _examples(knowledge)[name]
    COVERED[name](cost, example["inputs"], {**example["expect"], "op": example["op"]})


def test_numbers_that_need_no_file(cost: CostOf) -> None:
    """NVIDIA's guides: 512x1024x4096 fp16 has 315 FLOP/B, one row 1 FLOP/B; ResNet-50's stem at batch 256 is 60.4 GFLOP."""
    big = cost("aten::mm", ("fp16", (512, 1024)), ("fp16", (1024, 4096)))
    assert (big.matrix_flops, big.bytes, round(big.flops / big.bytes)) == (4294967296, 13631488, 315)
    small = cost("aten::mm", ("fp16", (1, 1024)), ("fp16", (1024, 4096)))
    assert round(small.flops / small.bytes) == 1
    x, weight = ("fp16", (256, 3, 224, 224)), ("fp16", (64, 3, 7, 7))
    stem = cost("aten::convolution", x, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1)
    assert (stem.matrix_flops, stem.bytes) == (60423143424, 488130944)
    q = ("bf16", (4, 32, 2048, 128))
    causal = cost("aten::_scaled_dot_product_flash_attention", q, q, q, 0.0, True, False, None)
    assert (causal.matrix_flops, causal.bytes) == (137438953472, 269484032)
    narrow = cost("aten::embedding", ("fp32", (10_000_000, 4)), ("int64", (1_000_000,)), -1, False, False)
    assert narrow.bytes == 40_000_000

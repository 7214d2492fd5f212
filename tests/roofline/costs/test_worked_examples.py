"""The worked examples of the cost formulas (worked_examples.yaml), recomputed from signatures as torch would record them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpudiag.model.ops import ITEM_BYTES, Cost
from gpudiag.trace.collectives import compute_bandwidths, find_bus_factor

Example = dict[str, Any]
CostOf = Callable[..., Cost]

EXAMPLES: list[Example] = yaml.safe_load((Path(__file__).parent / "worked_examples.yaml").read_text())
COUNT = 70


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


def _embedding_narrow(cost: CostOf, i: Example, expect: Example) -> None:
    """The formula counts ideal bytes; DRAM moves sectors of 32 bytes, so a 16-byte row is read as two."""
    t, row = i["tokens"], i["dim"] * 4
    found = cost("aten::embedding", (i["dtype"], (i["vocab"], i["dim"])), ("int64", (t,)), -1, False, False)
    assert found.bytes == expect["bytes_ideal"]
    assert found.bytes + t * (-(-row // 32) * 32 - row) == expect["bytes_sector"]


def _fused_cos(cost: CostOf, i: Example, expect: Example) -> None:
    """A fused chain moves what one of its ops moves."""
    assert expect["kernels"] == 1
    assert cost("aten::cos", (i["dtype"], (i["numel"],))).bytes == expect["bytes"]


def _fused_bf16(cost: CostOf, i: Example, expect: Example) -> None:
    """torch does not record the dtype of tensor lists: 4 bytes an element are assumed, the example has 2."""
    p = [(i["params"],)]
    found = cost("aten::_fused_adamw_", p, p, p, p, None, [(1,)], 1e-3)
    assert found.provenance == "derived"
    assert found.bytes * ITEM_BYTES[i["dtype"]] // 4 == expect["bytes"]


def _rnn(cost: CostOf, i: Example, expect: Example) -> None:
    """The example leaves out the initial and final states; a kernel that does not keep the recurrent matrix streams it at each step."""
    t, b, n, h = i["seq"], i["batch"], i["input"], i["hidden"]
    gates = 3 if "GRU" in expect["op"] else 4
    e, recurrent = ITEM_BYTES[i["dtype"]], gates * h * h
    weights, state = [(gates * h, n), (gates * h, h)], (i["dtype"], (1, b, h))
    cell = state if gates == 4 else None
    rest = (2 if gates == 4 else 3, h, 0, 1, False, 0.0, True, False, [], None)
    found = cost("aten::_cudnn_rnn", (i["dtype"], (t, b, n)), weights, 2, None, state, cell, *rest)
    assert found.matrix_flops == expect["flops"]
    least = found.bytes - (4 if cell else 2) * b * h * e
    assert least == expect["bytes_min"]
    if "bytes_restream_recurrent" in expect:
        assert least + (t - 1) * recurrent * e == expect["bytes_restream_recurrent"]
        x, y, buffer = (i["dtype"], (t, b, n)), (i["dtype"], (t, b, h)), (i["dtype"], (1,))
        back = (x, weights, 2, buffer, state, cell, y, y, None, None, *rest, ("bool", (1,)), [True, False, False, True])
        assert cost("aten::_cudnn_rnn_backward", *back).matrix_flops == expect["bwd_flops"]


def _host_copy(cost: CostOf, i: Example, expect: Example) -> None:
    """256 fp32 images of 3 x 224 x 224 over PCIe 4.0 x16 (31.5 GB/s)."""
    image = ("fp32", (256, 3, 224, 224))
    assert cost("aten::copy_", image, image, False).bytes == 2 * i["bytes"] == 2 * expect["bytes"]
    assert i["bytes"] / 31.5e9 * 1e3 == pytest.approx(expect["min_time_ms"], rel=1e-3)


def _collective(cost: CostOf, i: Example, expect: Example) -> None:
    found = compute_bandwidths(expect["op"], i.get("bytes") or i["total_bytes"], i["ranks"], i["time_us"] * 1000)
    assert found is not None
    assert found == (pytest.approx(expect["algbw_gbs"] * 1e9, rel=1e-4), pytest.approx(expect["busbw_gbs"] * 1e9, rel=1e-4))


def _gradient_sum(cost: CostOf, i: Example, expect: Example) -> None:
    moved, factor = i["params"] * i["bytes_per_param"], find_bus_factor("all_reduce", i["ranks"])
    assert factor is not None
    assert moved == expect["bytes"]
    assert moved * factor / (i["link_gbs"] * 1e9) * 1e3 == pytest.approx(expect["min_time_ms"], rel=1e-4)


def _sharded_step(cost: CostOf, i: Example, expect: Example) -> None:
    gather, scatter = find_bus_factor("all_gather", i["ranks"]), find_bus_factor("reduce_scatter", i["ranks"])
    assert gather is not None
    assert scatter is not None
    wire = i["params"] * (2 * gather * ITEM_BYTES["bf16"] + scatter * ITEM_BYTES["fp32"])
    assert wire == expect["bytes_wire"]
    assert wire / (i["link_gbs"] * 1e9) * 1e3 == pytest.approx(expect["min_time_ms"], rel=1e-4)


def _flops_per_token(cost: CostOf, i: Example, expect: Example) -> None:
    """6N + 12LHQT from our counts: three products with N weights, and three times a full (not causal) attention forward a layer."""
    weights, heads = i["n_params"], ("bf16", (1, i["heads"], i["seq"], i["head_dim"]))
    product = cost("aten::mm", ("bf16", (1, weights)), ("bf16", (weights, 1))).matrix_flops
    attention = cost("aten::_scaled_dot_product_flash_attention", heads, heads, heads, 0.0, False, False, None).matrix_flops
    scores = 3 * i["layers"] * attention // i["seq"]
    assert 3 * product + scores == expect["flops_per_token"]
    if "attn_share" in expect:
        assert scores / (3 * product + scores) == pytest.approx(expect["attn_share"], rel=5e-3)


def _utilisation(cost: CostOf, i: Example, expect: Example) -> None:
    achieved = i["tokens_per_s_per_gpu"] * i["flops_per_token"] / 1e12
    assert achieved == pytest.approx(expect["tflops"], rel=1e-3)
    assert achieved / i["peak_tflops"] == pytest.approx(expect["mfu"], rel=1e-3)


def _per_gpu(cost: CostOf, i: Example, expect: Example) -> None:
    achieved = i["total_pflops"] * 1e3 / i["gpus"]
    assert achieved == pytest.approx(expect["tflops"], rel=1e-3)
    assert achieved / i["peak_tflops"] == pytest.approx(expect["fraction"], rel=1e-3)


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
    "emb-narrow": _embedding_narrow,
    "coscos-fused": _fused_cos,
    "adamw-fused-bf16": _fused_bf16,
    **dict.fromkeys(("lstm-1024", "gru-512", "lstm-tiny"), _rnn),
    "h2d-imagenet": _host_copy,
    **dict.fromkeys(("ar-8", "ag-8", "rs-16"), _collective),
    "ddp-7b": _gradient_sum,
    "fsdp-7b": _sharded_step,
    **dict.fromkeys(("llama31-8b", "gpt2-124m"), _flops_per_token),
    **dict.fromkeys(("torchtitan-8gpu-bf16", "torchtitan-8gpu-compile"), _utilisation),
    "megatron-1t": _per_gpu,
}


def test_every_example_is_covered() -> None:
    assert sorted(example["id"] for example in EXAMPLES) == sorted(COVERED)
    assert len(EXAMPLES) == COUNT


def test_the_copy_here_is_the_design_knowledge(knowledge: Path) -> None:
    text = (knowledge / "op_costs.md").read_text()
    blocks = re.findall(r"```yaml examples\n(.*?)```", text, flags=re.DOTALL)
    assert [item for block in blocks for item in yaml.safe_load(block)] == EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["id"] for example in EXAMPLES])
def test_worked_example(example: Example, cost: CostOf) -> None:
    COVERED[example["id"]](cost, example["inputs"], {**example["expect"], "op": example["op"]})


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


def test_adams_square_of_the_gradient_reads_it_once(cost: CostOf) -> None:
    # op_costs section 10, adamw-foreach-fp32: addcmul_ moves 12 bytes a parameter, whether called on a list or for each tensor
    n = 1_000_000
    assert cost("aten::addcmul_", ("fp32", (n,)), ("fp32", (n,)), ("fp32", (n,)), 0.1).bytes == 12 * n
    assert cost("aten::addcmul_", ("fp32", (10, n)), ("fp32", (10, n)), ("fp32", (n,)), 0.1).bytes == 4 * (3 * 10 + 1) * n
    assert cost("aten::addcmul", ("fp32", (n,)), ("fp32", (n,)), ("fp32", (n,)), 0.1).bytes == 16 * n

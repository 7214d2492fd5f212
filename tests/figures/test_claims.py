"""Claims of papers, guides and talks that plain arithmetic can check, computed by the code that shows such figures to users.

One test a claim; its number is that of the catalogue of figures (A: arithmetic, C: torch on a CPU).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpudiag.facts.efficiency import PUBLISHED_MFUS
from gpudiag.facts.matrix_products import HARD_BYTES, SOFT_BYTES
from gpudiag.hardware.device_peaks import build_device
from gpudiag.hardware.device_table import load_table
from gpudiag.model.hardware import Device
from gpudiag.model.ops import ITEM_BYTES, Cost, parse_signature
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.inductor import Operand, estimate_fused_cost
from gpudiag.roofline.transformer import PRESETS, Transformer, estimate_transformer_memory

TIB = 2**40
GIB = 2**30
TORCH = {"fp16": "c10::Half", "fp32": "float", "bf16": "c10::BFloat16"}


def _device(identifier: str) -> Device:
    table = load_table()
    return build_device(next(row for row in table.devices if row.id == identifier), table)


def _cost(name: str, *tensors: tuple[str, tuple[int, ...]]) -> Cost:
    """Return our cost of op `name` on contiguous tensors (dtype, shape)."""
    strides = [[_volume(shape[axis + 1 :]) for axis in range(len(shape))] for _, shape in tensors]
    texts = ([list(shape) for _, shape in tensors], [TORCH[dtype] for dtype, _ in tensors], strides, [""] * len(tensors))
    found = estimate_cost(name, parse_signature(*map(json.dumps, texts)))
    assert isinstance(found, Cost), found
    return found


def _volume(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _published(what: str) -> Any:
    return next(item for item in PUBLISHED_MFUS if what in item.what)


def estimate_training_flop_per_token(*, parameters: int, layers: int, heads: int, head_dim: int, sequence: int) -> int:
    """FLOP of forward and backward pass a token: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B), attention not halved."""
    return 6 * parameters + 12 * layers * heads * head_dim * sequence


def test_A_01_memory_example_takes_2_09_of_activations_and_2_15_in_all() -> None:
    found = estimate_transformer_memory(PRESETS["playbook"])
    assert found.activations_bytes == 2_298_583_449_600
    assert f"{found.activations_bytes / TIB:.2f}" == "2.09"
    assert found.parameters == 6_579_429_376
    assert f"{found.total_bytes / TIB:.2f}" == "2.15"


@pytest.mark.parametrize(
    ("changes", "activations", "total"),
    [
        ({"optimizer_bytes": 1}, 2.0905, 2.1444),  # as the slide shows it, which then reads 2.14
        ({"optimizer_bytes": 8, "mixed_precision": True}, 1.1125, 1.2082),
        ({"recompute": "selective"}, 1.2116, None),
        ({"recompute": "full"}, 0.0642, None),
    ],
)
def test_A_01_its_variants(changes: dict[str, Any], activations: float, total: float | None) -> None:
    found = estimate_transformer_memory(msgspec.structs.replace(PRESETS["playbook"], **changes))
    assert found.activations_bytes / TIB == pytest.approx(activations, abs=5e-5)
    if total is not None:
        assert found.total_bytes / TIB == pytest.approx(total, abs=5e-5)


def test_A_01_the_preset_of_the_calculator() -> None:
    found = estimate_transformer_memory(PRESETS["llama3-8b"])
    assert [round(part / GIB, 2) for part in (found.activations_bytes, found.states_bytes, found.total_bytes)] == [61.09, 97.90, 158.99]


def test_A_01_tensor_and_sequence_parallelism_follow_korthikanti() -> None:
    """Equations 2 and 4 of arXiv 2205.05198 with fp16 values: s b h (10 + 24 / t) and, with sequence parallelism, s b h 34 / t."""
    model = Transformer(
        heads=16, batch=2, hidden=1024, feed_forward=4096, layers=1, sequence=512, vocab=1, activation="gelu", mixed_precision=True,
        recompute="selective", tensor_parallel=8,
    )  # fmt: skip
    tokens_h = 2 * 512 * 1024

    def layer(found: Any) -> int:
        return found.attention_bytes + found.feed_forward_bytes + found.norms_bytes  # type: ignore[no-any-return]

    assert layer(estimate_transformer_memory(model)) == tokens_h * (10 + 24 // 8)
    assert layer(estimate_transformer_memory(msgspec.structs.replace(model, sequence_parallel=True))) == tokens_h * 34 // 8
    whole = estimate_transformer_memory(msgspec.structs.replace(model, recompute="none", tensor_parallel=1))
    assert layer(whole) == tokens_h * 34 + 5 * 16 * 512**2 * 2


def test_A_02_the_batch_of_that_example_is_a_tenth_of_a_million_tokens() -> None:
    example = PRESETS["playbook"]
    assert example.batch * example.sequence == 102_400


def test_A_03_a_batch_of_a_million_tokens() -> None:
    gpus, micro_batch, sequence, accumulation = 8, 4, 8192, 4
    assert gpus * micro_batch * sequence * accumulation == 1_048_576


@pytest.mark.parametrize(
    ("parameters", "gpu_hours", "tokens", "dollars", "utilisation"),
    [(8.03e9, 1.46e6, 15e12, 2.92e6, 0.139), (70.6e9, 7.0e6, 15e12, 14.0e6, 0.255), (405e9, 30.84e6, 15.6e12, 61.68e6, 0.345)],
)
def test_A_04_A_05_llama_3_1_cost_and_overall_utilisation(
    parameters: float, gpu_hours: float, tokens: float, dollars: float, utilisation: float
) -> None:
    """2 dollars a GPU-hour; 6 N D over all GPU-hours, restarts and evaluation included, on the H100 of the device table."""
    assert gpu_hours * 2 == pytest.approx(dollars)
    peak = _device("h100-sxm5-80gb").matrix_peak("bf16")
    per_token = estimate_training_flop_per_token(parameters=round(parameters), layers=0, heads=0, head_dim=0, sequence=0)
    assert per_token * tokens / (gpu_hours * 3600 * (peak or 0)) == pytest.approx(utilisation, abs=1e-3)


def test_A_06_megatron_reached_52_percent_of_an_a100() -> None:
    found = _published("GPT 1T, Megatron")
    assert found.flop_per_s == pytest.approx(502e15 / 3072, rel=1e-3)
    assert found.share == pytest.approx(0.5238, abs=1e-4)
    assert found.peak_flop_per_s == _device("a100-sxm4-80gb").matrix_peak("fp16")


def test_A_07_zero_infinity_reached_40_percent_of_a_v100() -> None:
    found = _published("ZeRO-Infinity on 512")
    assert found.flop_per_s == pytest.approx(25e15 / 512, rel=1e-3)
    assert found.share == pytest.approx(0.391, abs=1e-3)


def test_A_08_zero_offload_against_plain_training() -> None:
    assert (_published("ZeRO-Offload").share, _published("plain PyTorch").share) == (0.32, 0.24)


def test_A_09_frontier_per_gcd() -> None:
    found = [_published(f"GPT {size} on Frontier").flop_per_s / 1e12 for size in ("22B", "175B", "1T")]
    assert found == pytest.approx([73.5, 69.2, 61.2], abs=0.05)
    assert _published("GPT 22B").peak_flop_per_s == _device("mi250x-gcd").matrix_peak("fp16")


def test_A_10_fuyou_depends_on_the_denominator() -> None:
    """156 TFLOP/s on an RTX 4090 are 94 % of what fp32 accumulation allows, 47 % of fp16 accumulation."""
    peaks = _device("rtx-4090").peaks
    fuyou, infinity = _published("Fuyou"), _published("GPT-3 13B, ZeRO-Infinity")
    assert fuyou.flop_per_s / peaks["fp16"] == pytest.approx(0.944, abs=1e-3)
    assert fuyou.share == pytest.approx(0.472, abs=1e-3)
    assert fuyou.peak_flop_per_s == pytest.approx(peaks["fp16_fp16acc"], rel=1e-3)
    assert infinity.share == pytest.approx(0.272, abs=1e-3)


def test_A_11_a_trillion_parameters_on_20_trillion_tokens() -> None:
    per_token = estimate_training_flop_per_token(parameters=10**12, layers=0, heads=0, head_dim=0, sequence=0)
    assert per_token * 20 * 10**12 == 120 * 10**6 * 10**18


def test_A_12_v100s_that_hold_the_states_of_a_trillion_parameters() -> None:
    """16 bytes a parameter for weights, gradients and Adam in fp32: those of the estimator."""
    found = estimate_transformer_memory(msgspec.structs.replace(PRESETS["playbook"], optimizer_bytes=8))
    per_parameter = found.states_bytes / found.parameters
    assert per_parameter == 16
    assert [10**12 * size / 32e9 for size in (per_parameter, per_parameter + 4)] == [500, 625]


def test_A_13_tensor_cores_against_vector_units() -> None:
    device = _device("a100-sxm4-80gb")
    assert device.peaks["fp16"] / device.peaks["fp32"] == pytest.approx(16.0, rel=1e-3)


def test_A_14_normalisation_reaches_a_245th_of_the_rate_of_products() -> None:
    """Shares of FLOP and of time in BERT training, table 1 of arXiv 2007.00072: products, normalisation, element-wise."""
    products, norms, elementwise = (99.80, 61.0), (0.17, 25.5), (0.03, 13.5)
    rate = products[0] / products[1]
    assert rate / (norms[0] / norms[1]) == pytest.approx(245, abs=1)
    assert rate / (elementwise[0] / elementwise[1]) == pytest.approx(736, abs=1)


def test_A_15_two_cosines_fused_move_half_of_the_bytes() -> None:
    shape = (2**20,)
    apart = 2 * _cost("aten::cos", ("fp32", shape)).bytes
    fused = estimate_fused_cost(("cos", "cos"), (Operand(shape, "fp32"), Operand(shape, "fp32")), 2**20, "derived").bytes
    assert (apart, fused) == (16 * 2**20, 8 * 2**20)


@pytest.mark.parametrize(
    ("identifier", "once", "cap", "crossover"),
    [
        ("a100-sxm4-40gb", 0.194, 9.75, 50),
        ("h200-sxm", 0.600, 33.45, 56),
        ("h100-sxm5-80gb", 0.419, 33.45, 80),
        ("rtx-4090", 0.126, 41.3, 328),
        ("l4", 0.037, 15.2, 404),
    ],
)
def test_A_16_G_02_repeated_doubling_climbs_to_half_of_the_vector_peak(identifier: str, once: float, cap: float, crossover: float) -> None:
    """A multiplication is half of a multiply-add: min(r BW / 8, P / 2) FLOP/s."""
    device = _device(identifier)
    bandwidth, peak = device.bandwidth_byte_per_s or 0, device.vector_peak or 0
    assert bandwidth / 8 / 1e12 == pytest.approx(once, abs=1e-3)
    assert peak / 2 / 1e12 == pytest.approx(cap, rel=4e-3)
    assert (peak / 2) / (bandwidth / 8) == pytest.approx(crossover, abs=1)


def test_A_17_a_linear_layer_with_batch_512_computes_with_batch_1_it_waits() -> None:
    def intensity(rows: int) -> float:
        found = _cost("aten::mm", ("fp16", (rows, 1024)), ("fp16", (1024, 4096)))
        return found.flops / found.bytes

    assert intensity(512) == pytest.approx(315.08, abs=0.01)
    assert intensity(1) == pytest.approx(0.999, abs=1e-3)
    ridges = [(device.matrix_peak("fp16") or 0) / (device.bandwidth_byte_per_s or 1) for device in map(_device, (_V100, "h200-sxm"))]
    assert ridges == pytest.approx([139, 206], abs=1)
    assert intensity(1) < min(ridges) < max(ridges) < intensity(512)


_V100 = "v100-sxm2-16gb"


@pytest.mark.parametrize(
    ("identifier", "rows"), [(_V100, 149), ("a100-sxm4-80gb", 165), ("h200-sxm", 229), ("h100-sxm5-80gb", 345), ("l4", 502)]
)
def test_A_18_rows_from_which_a_product_of_width_4096_computes(identifier: str, rows: int) -> None:
    device = _device(identifier)
    ridge = (device.matrix_peak("fp16") or 0) / (device.bandwidth_byte_per_s or 1)

    def computes(m: int) -> bool:
        found = _cost("aten::mm", ("fp16", (m, 4096)), ("fp16", (4096, 4096)))
        return found.flops / found.bytes >= ridge

    first = next(m for m in range(1, 4096) if computes(m))
    assert first == pytest.approx(rows, abs=2)


@pytest.mark.parametrize(
    ("size", "hard", "soft"), [(50257, False, False), (50304, True, True), (4096, True, True), (4100, False, False), (4104, True, False)]
)
def test_A_19_alignment_of_dimensions(size: int, hard: bool, soft: bool) -> None:
    """16-bit types: multiples of 8 (16 bytes), ideally of 64 (128 bytes)."""
    assert (size * ITEM_BYTES["bf16"] % HARD_BYTES == 0) is hard
    assert (size * ITEM_BYTES["bf16"] % SOFT_BYTES == 0) is soft
    assert (50304 % 128, 50304 % 256, 4096 % 256) == (0, 128, 0)


def test_A_20_qlora_weights_of_65b_fit_48_gb() -> None:
    """4 bit and 0.127 bit of doubly quantised scales a weight (Dettmers et al. 2023, QLoRA, section 3)."""
    assert pytest.approx(33.5e9, rel=2e-3) == 65e9 * 4.127 / 8
    assert 65e9 * 4.127 / 8 < 48e9 < estimate_transformer_memory(msgspec.structs.replace(PRESETS["playbook"])).parameters * 16


def test_A_21_galore_fits_24_gb_only_as_a_bound() -> None:
    """7B in bf16: 14 GB of weights, 28 of Adam states in bf16; 65.5 % less leaves 9.7: no room for whole gradients (14 GB)."""
    weights, states = 7e9 * 2, 7e9 * 4
    kept = states * (1 - 0.655)
    assert weights + kept == pytest.approx(23.7e9, rel=0.01)
    assert weights + kept < 24e9 < weights + kept + weights


def test_A_22_memory_grew_five_times() -> None:
    sizes = {row.id: row.memory.gib for row in load_table().devices}
    ratios = [sizes[name] / sizes[_V100] for name in ("a100-sxm4-80gb", "h200-sxm", "mi355x")]
    assert ratios == pytest.approx([5.0, 8.8, 18.0], rel=0.01)


def test_A_26_interleaving_shrinks_the_bubble_of_a_pipeline() -> None:
    """(p - 1) / (v m + p - 1), Narayanan et al. 2021 (Megatron-LM): 8 stages, 32 micro-batches, 1 or 2 chunks."""
    plain, interleaved = ((8 - 1) / (v * 32 + 8 - 1) for v in (1, 2))
    assert (plain, interleaved) == pytest.approx((0.179, 0.099), abs=1e-3)
    assert (1 - interleaved) / (1 - plain) == pytest.approx(1.10, abs=0.01)


def test_A_27_without_an_all_to_all_of_45_percent() -> None:
    assert pytest.approx(1.82, abs=0.005) == 1 / (1 - 0.45)


def test_A_28_less_error_overhead_is_15_percent_of_performance() -> None:
    """C4: 30 points of overhead fewer cannot give more than 1 / 0.7; the 15 % that were seen lie below."""
    assert 1.15 < 1 / (1 - 0.30)


def test_A_29_torchtitan_gains() -> None:
    gains = [after / before - 1 for before, after in ((5605, 8380), (829, 876), (100, 128))]
    assert gains == pytest.approx([0.495, 0.057, 0.28], abs=1e-3)


def test_A_30_llama_3_1_8b_on_eight_h100() -> None:
    per_token = estimate_training_flop_per_token(parameters=8_030_261_248, layers=32, heads=32, head_dim=128, sequence=8192)
    assert per_token == 61_066_469_376
    peak = _device("h100-sxm5-80gb").matrix_peak("bf16") or 0
    shares = [tokens * per_token / peak for tokens in (5762, 6667)]
    assert shares == pytest.approx([0.356, 0.412], abs=1e-3)
    assert shares == pytest.approx([_published("8B, FSDP, eager").share, _published("torch.compile").share], abs=1e-3)
    assert pytest.approx((0.157, 0.280), abs=1e-3) == (6667 / 5762 - 1, 8532 / 6667 - 1)

"""Estimates against what a real training on the CPU allocates, event by event, and against arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from examples import sample
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from gpudiag import estimate_memory
from gpudiag.errors import InputError, UsageError
from gpudiag.model.memory import ModelEstimate

Make = Callable[..., Any]


class Blocks(nn.Module):
    """Blocks in a row, each computed again in the backward pass where it is asked for."""

    def __init__(self, blocks: list[nn.Module], *, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.again = again

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def _mlp(again: bool) -> Blocks:
    pairs = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.GELU()) for _ in range(3)]
    return Blocks([*pairs, nn.Linear(64, 10)], again=again)


def _cnn(again: bool) -> Blocks:
    widths = [3, 32, 64, 64]
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(widths)]
    return Blocks([*layers, nn.Sequential(nn.Flatten(), nn.Linear(64 * 16, 10))], again=again)


def _encoder(again: bool) -> Blocks:
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)]
    return Blocks([nn.Embedding(100, 64), *layers, nn.Sequential(nn.Linear(64, 10), nn.Flatten(0, 1))], again=again)


MODELS: dict[str, tuple[Make, Make]] = {
    "mlp": (_mlp, lambda: (torch.randn(256, 64), torch.randint(10, (256,)))),
    "cnn": (_cnn, lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))),
    "encoder": (_encoder, lambda: (torch.randint(100, (8, 32)), torch.randint(10, (256,)))),
}
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
    "loop": lambda values: torch.optim.AdamW(values, foreach=False),
    "foreach": lambda values: torch.optim.AdamW(values, foreach=True),
    "fused": lambda values: torch.optim.AdamW(values, fused=True),
}


class Measured(NamedTuple):
    peak: int
    parameters: int
    gradients: int
    states: int


def _bytes(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))


def measured(make: Make, batch: Make, loss: Make, optimizer: Make, autocast: bool = False) -> Measured:
    """Train two steps on the CPU, with everything made while the profiler hears of each allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model, (inputs, *rest) = make(), batch()
        trained = optimizer(model.parameters())

        def step() -> None:
            trained.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = model(inputs)
                value = loss(output, *rest)
            value.backward()
            trained.step()

        for _ in range(2):
            step()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    states = [value for state in trained.state.values() for value in state.values()]
    return Measured(peak, _bytes(model.parameters()), _bytes(value.grad for value in model.parameters()), _bytes(states))


CASES = [
    *((model, "fp32", "momentum") for model in MODELS),
    *(("mlp", "fp32", optimizer) for optimizer in ("loop", "foreach", "fused")),
    *(("encoder", kind, "foreach") for kind in ("bf16", "again")),
    ("cnn", "bf16", "fused"),
]
"""again: the blocks are computed again in the backward pass."""


@pytest.mark.parametrize(("name", "kind", "optimizer"), sample(CASES))
def test_what_a_real_training_allocates(name: str, kind: str, optimizer: str) -> None:
    """States to the byte; the peak within 5 %: kernels have buffers of their own, the generator's state is not a tensor of the step."""
    model, batch = MODELS[name]
    loss, chosen, autocast = functional.cross_entropy, OPTIMIZERS[optimizer], kind == "bf16"
    real = measured(lambda: model(kind == "again"), batch, loss, chosen, autocast)
    found = estimate_memory(
        lambda: model(kind == "again"), batch, loss=loss, optimizer=chosen, autocast="bf16" if autocast else None, device="cpu"
    )
    assert (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes) == (real.parameters, real.gradients, real.states)
    if (name, kind) == ("cnn", "bf16") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("convolutions take other kernels, with buffers of their own, on a processor without instructions for bf16")
    assert found.peak_bytes == pytest.approx(real.peak, rel=0.05)


def test_the_way_of_the_optimizer_sets_the_peak() -> None:
    """Wide weights and no batch to speak of: AdamW holds three more of one weight in a loop (a root, a quotient and that of the weight
    before), one of each in lists, and none when fused."""
    width, layers = 128, 4
    weights = 4 * width * width * layers

    def extra(optimizer: str) -> int:
        def make() -> nn.Module:
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

        found = estimate_memory(make, torch.randn(1, width), loss=lambda out: out.sum(), optimizer=OPTIMIZERS[optimizer], device="cpu")
        step = next(part.bytes for part in found.phases if part.phase == "optimizer")
        return (step - 4 * weights) // (weights // layers)

    assert extra("fused") == 0
    assert extra("loop") == 3
    assert extra("foreach") == layers


def _sums(found: ModelEstimate) -> None:
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert max(part.bytes for part in found.phases) == found.peak_bytes
    assert sum(row.bytes for row in found.modules) == found.activations_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_the_parts_are_the_whole(device: str, autocast: str | None) -> None:
    model, batch = MODELS["encoder"]
    _sums(estimate_memory(lambda: model(False), batch, loss=functional.cross_entropy, device=device, autocast=autocast))


def test_activations_are_those_of_the_layers() -> None:
    """A batch of 16 rows: tanh keeps its output of 16 x 32, and so does the next product; the output is held, and the loss."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))
    found = estimate_memory(model, torch.randn(16, 8), loss=lambda out: out.mean(), optimizer=None, device="cpu")
    rows = {row.module: row.bytes for row in found.modules}
    assert rows == {"* (Tanh)": 4 * 16 * 32, "* (Linear)": 4 * 16, "": 4}
    assert found.optimizer_bytes == 0


def test_recomputation_keeps_the_inputs_of_the_blocks() -> None:
    def found(again: bool) -> ModelEstimate:
        return estimate_memory(lambda: _mlp(again), MODELS["mlp"][1], loss=functional.cross_entropy, device="cpu")

    kept, again = found(False), found(True)
    assert again.activations_bytes < kept.activations_bytes / 3
    assert again.peak_bytes < kept.peak_bytes
    assert again.gradients_bytes == kept.gradients_bytes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(16, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.head(self.frozen(self.embedding(x)) * self.scale.float()).logsumexp(-1).mean()


@pytest.mark.parametrize("convert", [lambda model: model, lambda model: model.to("cuda"), lambda model: model.cuda()])
def test_tied_weights_count_once_and_frozen_ones_have_no_gradient(convert: Make) -> None:
    for given in (Tied(), lambda: convert(Tied())):
        found = estimate_memory(given, torch.randint(50, (4, 8)), optimizer="Adam")
        assert found.parameter_count == 50 * 16 + 16 * 16
        assert found.parameters_bytes == 4 * found.parameter_count
        assert found.gradients_bytes == 4 * 50 * 16
        assert found.optimizer_bytes == 8 * 50 * 16
        assert found.buffers_bytes == 8 * 16


def test_the_type_of_the_model_is_that_of_all_its_states() -> None:
    """Pure bf16: 2 bytes a weight, 2 a gradient, 4 of AdamW; the counters of its steps stay on the host of a GPU."""
    found = estimate_memory(lambda: nn.Linear(64, 64, bias=False).to(torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16),
                            loss=lambda out: out.float().sum())  # fmt: skip
    assert (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes) == (8192, 8192, 16384)


def test_autocast_keeps_copies_of_the_weights() -> None:
    """The second layer's gradient of its input needs the copy; the first has none, so its copy is gone when autocast ends."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
    found = estimate_memory(model, torch.randn(8, 64), loss=lambda out: out.float().sum(), autocast="bf16")
    assert found.weight_casts_bytes == 2 * 64 * 32
    assert found.autocast == "bfloat16"


class Both(nn.Module):
    """Attention and dropout, or a norm, of one size."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.kind = kind

    def forward(self, x: Any) -> Any:
        x = x * self.weight
        if self.kind == "attention":
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return functional.dropout(x, 0.1) if self.kind == "dropout" else functional.layer_norm(x, (32,))


@pytest.mark.parametrize("kind", ["attention", "dropout"])
def test_a_gpu_keeps_less_of_attention_and_dropout(kind: str) -> None:
    """Attention with dropout has no fused kernel on a CPU and writes its scores out: 64 x 64 for each head, several times; the mask of a
    fused dropout is one byte an element, that of the CPU four."""
    x, values = torch.randn(2, 4, 64, 32), 2 * 4 * 64 * 32
    cpu, gpu = (estimate_memory(Both(kind), x, loss=lambda out: out.sum(), device=device) for device in ("cpu", "cuda"))
    if kind == "attention":
        assert cpu.activations_bytes > gpu.activations_bytes + 4 * 2 * 4 * 64 * 64
    else:
        assert cpu.activations_bytes - gpu.activations_bytes == 3 * values


def test_autocast_norms_are_fp32_on_a_gpu() -> None:
    """AT_FORALL_FP32 of the CUDA list has layer_norm: bf16 in, fp32 out."""
    x, seen = torch.randn(8, 32, dtype=torch.bfloat16), []
    for device in ("cpu", "cuda"):
        estimate_memory(
            lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)),
            x.float(),
            loss=lambda out: (seen.append(out.dtype), out.float().sum())[1],
            autocast="bf16",
            device=device,
        )
    assert set(seen[:2]) == {torch.bfloat16}
    assert set(seen[2:]) == {torch.float32}


def test_nothing_is_left_behind() -> None:
    """The model keeps its values, has no gradient and no hook; torch is as it was."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    before, apply, init = copy.deepcopy(model.state_dict()), nn.Module._apply, torch.autocast.__init__
    x = torch.randn(4, 8)
    estimate_memory(model, x, loss=lambda out: out.sum(), optimizer=torch.optim.Adam(model.parameters()), autocast="bf16")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert nn.Module._apply is apply
    assert torch.autocast.__init__ is init
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert functional.layer_norm(x.bfloat16(), (8,)).dtype == torch.bfloat16
    assert torch.backends.mkldnn.enabled
    torch.manual_seed(0)
    assert float(functional.dropout(torch.ones(1000), 0.5).mean()) == pytest.approx(1, abs=0.2)


def test_an_optimizer_of_the_model_is_taken_with_it() -> None:
    model = nn.Linear(16, 16)
    found = estimate_memory(model, torch.randn(2, 16), loss=lambda out: out.sum(), optimizer=torch.optim.RMSprop(model.parameters()))
    assert found.optimizer == "RMSprop (foreach)"
    assert found.optimizer_bytes == found.parameters_bytes == 4 * 17 * 16


def test_gradients_that_are_kept_are_there_in_the_forward_pass() -> None:
    model, x = nn.Linear(512, 512), torch.randn(2, 512)
    fresh, kept = (estimate_memory(model, x, loss=lambda out: out.sum(), optimizer="SGD", accumulate=again) for again in (False, True))
    before, after = (next(part.bytes for part in found.phases if part.phase == "forward") for found in (fresh, kept))
    assert after - before >= fresh.gradients_bytes


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return {"loss": Square.apply(self.linear(x.cuda())).float().mean()}


def test_functions_of_ones_own_and_code_for_a_gpu_that_is_not_there() -> None:
    """What the function saves is the output of the layer, 8 x 64 in bf16; the layer keeps its input of 8 x 16."""
    found = estimate_memory(Custom, torch.randn(8, 16))
    assert next(row.bytes for row in found.modules if row.module == "linear") == 2 * 8 * 64 + 2 * 8 * 16
    assert found.gradients_bytes == found.parameters_bytes


def test_recurrent_layers_keep_their_gates() -> None:
    """At least the four gates and the state of each step for both layers; a note says that libraries keep them their own way."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0].mean()

    found = estimate_memory(Recurrent, torch.randn(4, 10, 16), device="cpu")
    assert found.activations_bytes >= 2 * 5 * 4 * (4 * 10 * 32)
    assert any("oneDNN" in note for note in found.notes)


class ByValue(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        x = self.linear(x)
        if self.kind == "branch":
            return x.sum() if (x > 0).all() else x.mean()
        if self.kind == "select":
            return x[x > 0].sum()
        raise ValueError("no such kind\nat all")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("branch", "forward pass needs the values of a tensor .aten::_local_scalar_dense.*test_estimate.py:.* in forward"),
        ("select", "forward pass needs the values of a tensor .aten::(nonzero|index)"),
        ("other", "forward pass failed: ValueError: no such kind, at test_estimate.py:.* in forward"),
    ],
)
def test_what_cannot_be_estimated_says_which_op_and_where(kind: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        estimate_memory(lambda: ByValue(kind), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "AdamV"}, "did you mean 'AdamW'|did you mean 'Adam'"),
        ({"autocast": "int8"}, "autocast='int8'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"loss": None}, "the model returns a tensor of 2x4"),
        ({"loss": lambda out: out}, "loss= returns a tensor of 2x4"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        estimate_memory(nn.Linear(4, 4), torch.randn(2, 4), **({"loss": lambda out: out.sum()} | options))


def test_no_model_and_nothing_to_train() -> None:
    with pytest.raises(UsageError, match="the model is a int"):
        estimate_memory(3, torch.randn(1))
    with pytest.raises(UsageError, match="wrapped in DataParallel"):
        estimate_memory(nn.DataParallel(nn.Linear(1, 1)), torch.randn(1))
    with pytest.raises(UsageError, match="no parameter to train"):
        estimate_memory(nn.ReLU(), torch.randn(1))
    with pytest.raises(InputError, match=r"the optimizer step failed: TypeError: .*closure"):
        estimate_memory(nn.Linear(1, 1), torch.randn(1, 1), loss=lambda out: out.sum(), optimizer="LBFGS")


@pytest.mark.slow
def test_models_of_transformers() -> None:
    """A Llama of two layers with shared key heads and a BERT: the formulas of their weights; the logits are among the activations."""
    transformers = pytest.importorskip("transformers", minversion="5", reason="older BERTs branch on the values of their mask")

    def llama() -> Any:
        config = transformers.LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=500,
            tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def bert() -> Any:
        config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=500)
        return transformers.BertForMaskedLM(config)

    ids = torch.randint(500, (2, 64))
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    for make, options, autocast in ((llama, {}, "bf16"), (bert, {"attention_mask": torch.ones_like(ids)}, None)):
        found = estimate_memory(make, {"input_ids": ids, "labels": ids, **options}, autocast=autocast)
        _sums(found)
        assert found.activations_bytes > 4 * 2 * 64 * 500
        assert found.optimizer_bytes == 2 * found.parameters_bytes
        assert make is bert or found.parameter_count == 500 * 64 + 2 * layer + 64

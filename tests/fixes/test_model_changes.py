"""Fixes that change modules in place: memory format, checkpoints, attention, precision of products."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.errors import InputError  # noqa: E402
from gpudiag.fixes.kernels import Sdpa  # noqa: E402
from gpudiag.fixes.precision import Tf32  # noqa: E402

nn = torch.nn
NHWC = torch.channels_last


def conv_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.LazyLinear(2))


def images() -> Any:
    return torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


def train(model: Any, x: Any, steps: int = 3) -> list[float]:
    model(x)  # lazy modules have weights from here on
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# -- channels-last -----------------------------------------------------------------------------------------------------


def test_convolutions_and_inputs_are_converted_and_losses_agree_but_for_rounding() -> None:
    before = train(conv_net(), images())
    with applied("channels-last") as evidence:
        model = conv_net()
        weight = model[0].weight
        after = train(model, images())
        shown = evidence()
    out = model[:3](images().contiguous(memory_format=NHWC))
    assert model[0].weight is weight  # the optimizer's own
    assert weight.is_contiguous(memory_format=NHWC)
    assert not weight.is_contiguous()
    assert out.is_contiguous(memory_format=NHWC)
    assert shown.found == "2 of 2 convolutions have channels-last weights, 1 of them converted; 3 inputs converted in 3 calls"
    assert after == pytest.approx(before, rel=1e-4)


def test_inputs_that_are_no_images_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.got: dict[str, Any] = {}

        def forward(self, x: Any, **others: Any) -> Any:
            self.got = {"x": x, **others}
            return self.conv(x)

    counts, mask = torch.ones(2, 3, 4, 4, dtype=torch.long), torch.ones(2, 5)
    with applied("channels-last"):
        model = Net()
        model(images(), counts=counts, mask=mask, name="a").sum().backward()
    assert model.got["x"].is_contiguous(memory_format=NHWC)
    assert model.got["counts"] is counts
    assert model.got["mask"] is mask
    assert model.got["name"] == "a"


def test_a_net_without_convolutions_or_in_that_format_is_not_changed() -> None:
    with applied("channels-last") as evidence:
        train(nn.Sequential(nn.Linear(8, 2)), torch.ones(2, 8))
        assert evidence().reason == "Sequential has no convolution in two dimensions with weights of its own"
    with applied("channels-last") as evidence:
        train(conv_net()[:3].to(memory_format=NHWC), images().contiguous(memory_format=NHWC))
        assert evidence().reason == "the program trains in channels-last itself"


def test_one_root_that_suits_is_enough() -> None:
    with applied("channels-last") as evidence:
        head, net = nn.Linear(8, 8), nn.Conv2d(3, 4, 3)
        head(torch.ones(2, 8)).sum().backward()
        net(images()).sum().backward()
        assert evidence().found.startswith("1 of 1 convolutions")


def test_weights_are_converted_before_ddp_lays_its_buckets_out() -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with applied("channels-last") as evidence:
            model = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3)))
            assert model.module[0].weight.is_contiguous(memory_format=NHWC)
            model(images()).sum().backward()
            assert evidence().found.startswith("1 of 1 convolutions have channels-last weights, 1 of them converted; 1 inputs")
    finally:
        distributed.destroy_process_group()


# -- checkpointing -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.calls = 0

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        self.calls += 1
        return x + scale * self.inner(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def gradients(model: Any) -> list[Any]:
    torch.manual_seed(1)
    model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_blocks_run_again_in_the_backward_pass_and_gradients_are_equal_to_the_bit() -> None:
    before = gradients(Stack())
    with applied("checkpointing") as evidence:
        model = Stack()
        after = gradients(model)
        with torch.no_grad():
            model.eval()(torch.ones(2, 8))
        shown = evidence()
    assert [block.calls for block in model.blocks] == [3, 3, 3]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert shown.found == "3 blocks (Block) run again in the backward pass"


def test_a_sequence_of_equal_blocks_is_checkpointed_and_batchnorm_in_it_is_told() -> None:
    with applied("checkpointing") as evidence:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
        gradients(model)
        shown = evidence()
    assert shown.found.startswith("2 blocks (Sequential) run again in the backward pass; their running means")


def test_a_model_without_blocks_is_told_what_to_do() -> None:
    with applied("checkpointing") as evidence:
        gradients(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
        assert "has no list of equal blocks" in evidence().reason


class Switchable(nn.Module):
    """With the switches of Hugging Face's models."""

    def __init__(self, *, on: bool = False, able: bool = True, attention: str = "eager", obeys: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.net.gradient_checkpointing = on
        self.able, self.obeys = able, obeys
        self.config = SimpleNamespace(_attn_implementation=attention)
        self.given: Any = None

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        if not self.able:
            raise ValueError("Switchable does not support gradient checkpointing.")
        self.given = gradient_checkpointing_kwargs
        self.net.gradient_checkpointing = True

    def set_attn_implementation(self, name: str) -> None:
        if not self.able:
            raise ValueError("Switchable does not support sdpa.\nMore lines.")
        if self.obeys:
            self.config._attn_implementation = name


def test_the_models_own_switch_is_used() -> None:
    with applied("checkpointing") as evidence:
        model = Switchable()
        gradients(model)
        assert evidence().found == "1 modules checkpoint: Linear"
    assert model.given == {"use_reentrant": False}


@pytest.mark.parametrize(("options", "reason"), [({"on": True}, "Switchable checkpoints already"), ({"able": False}, "does not support")])
def test_a_switch_that_is_on_or_stuck_is_told(options: dict[str, Any], reason: str) -> None:
    with applied("checkpointing") as evidence:
        gradients(Switchable(**options))
        shown = evidence()
    assert shown.found == ""
    assert reason in shown.reason


# -- attention ---------------------------------------------------------------------------------------------------------


def test_attention_is_switched() -> None:
    with applied("sdpa") as evidence:
        model = Switchable()
        gradients(model)
        assert evidence().found == "attention of 1 models runs as sdpa"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "sdpa"}, "its attention runs as sdpa already"),
        ({"able": False}, "Switchable does not support sdpa."),
        ({"obeys": False}, "Switchable cannot switch its attention: pass attn_implementation='sdpa' where it is made"),
    ],
)
def test_attention_that_cannot_be_switched_is_told(options: dict[str, Any], reason: str) -> None:
    with applied("sdpa") as evidence:
        gradients(Switchable(**options))
        assert (evidence().found, evidence().reason) == ("", reason)


def test_attention_that_is_written_out_takes_the_source() -> None:
    with applied("sdpa") as evidence:
        gradients(Stack())
        assert "F.scaled_dot_product_attention(q, k, v" in evidence().reason
    with pytest.raises(InputError, match="no back-end 'flsh'; did you mean 'flash'"):
        Sdpa("flsh")


@pytest.mark.slow
def test_a_real_model_of_hugging_face_is_switched_and_checkpointed() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).train()
    ids = torch.arange(32).reshape(2, 16) % 64
    before = plain(input_ids=ids, labels=ids).loss
    with applied("sdpa") as evidence:
        model = copy.deepcopy(plain)
        loss = model(input_ids=ids, labels=ids).loss
        shown = evidence()
    assert shown.found.startswith("attention of 1 models runs as sdpa; ScaledDotProduct"), shown
    torch.testing.assert_close(loss, before)
    with applied("checkpointing") as evidence:
        model = copy.deepcopy(plain)
        model(input_ids=ids, labels=ids).loss.backward()
        shown = evidence()
    assert "GPT2Block" in shown.found
    before.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-10)  # kernels round by the place of their data


# -- precision of products ---------------------------------------------------------------------------------------------


@pytest.fixture
def precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def product() -> Any:
    rows = torch.linspace(0.9, 1.1, 64 * 64).reshape(64, 64)
    return rows @ rows.mT


def test_products_in_bfloat16_where_the_cpu_has_it(precision: None) -> None:
    exact = product()
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with applied("tf32=medium") as evidence:
        model = nn.Linear(8, 1)
        gradients(model)
        torch.set_float32_matmul_precision("highest")  # the program sets it later: overruled
        gradients(model)
        rough = product()
        shown = evidence()
    if not able:
        assert shown.reason == "'medium' on a CPU takes bfloat16 instructions: on this one products stay in float32"
        return
    assert shown.found == "float32 matrix products in 'medium' precision on cpu; the program's own 'highest' overruled"
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(rough, product())  # whether oneDNN takes bfloat16 for products of this size depends on the processor


def test_what_the_program_sets_first_is_not_ours(precision: None) -> None:
    with applied("tf32=medium") as evidence:
        torch.set_float32_matmul_precision("high")
        gradients(nn.Linear(8, 1))
        assert evidence().reason == "the program has set high itself"
    with pytest.raises(InputError, match="no precision 'hgh'; did you mean 'high'"):
        Tf32("hgh")


def test_tf32_on_a_cpu_without_it_is_not_applied(precision: None) -> None:
    if getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)():
        pytest.skip("this CPU has AMX-FP16")
    with applied("tf32") as evidence:
        gradients(nn.Linear(8, 1))
        assert evidence().reason == "'high' on a CPU takes AMX-FP16: on this one products stay in float32"
    assert torch.get_float32_matmul_precision() == "highest"

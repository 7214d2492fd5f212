"""The front door: kinds of names, provenance of what is not modelled, and that no input makes it raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.model.finding import Missing
from gpudiag.model.ops import ITEM_BYTES, Cost, Input, NotModelledError, Signature, parse_signature
from gpudiag.roofline.costs import FORMULAS, estimate_cost, find_kind, gradients
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, VIEWS, WRAPPERS, costs

KINDS = {
    "work": ("aten::addmm", "aten::cudnn_convolution", "aten::add_", "aten::_foreach_add_", "aten::_fused_adamw_"),
    "view": ("aten::t", "aten::as_strided", "aten::empty_strided", "detach", "aten::_unsafe_view"),
    "wrapper": ("aten::linear", "aten::conv2d", "aten::_convolution", "aten::to", "aten::softmax", "aten::cross_entropy_loss"),
    "framework": (
        "autograd::engine::evaluate_function: AddmmBackward0",
        "AddmmBackward0",
        "CudnnConvolutionBackward",
        "torch::autograd::AccumulateGrad",
        "torch::autograd::CppNode<SplitLookupFunction_Dense_Op>",
        "Optimizer.step#AdamW.step",
        "CompiledFunctionBackward",
        "Torch-Compiled Region: 0/0",
        "ProfilerStep#3",
    ),
    "communication": ("nccl:all_reduce", "record_param_comms", "c10d::allreduce_", "_c10d_functional::all_gather_into_tensor"),
    None: ("mylib::fused_thing", "aten::native_layer_norm_of_tomorrow", "All2All_Pooled_Req", "flash_attn::_flash_attn_of_tomorrow"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_kind(kind: str | None, name: str) -> None:
    assert find_kind(name) == kind


def test_views_and_wrappers_are_apart() -> None:
    assert not VIEWS & WRAPPERS
    assert not VIEWS & set(FORMULAS)


def test_names_are_torch_names() -> None:
    """A misspelt name would never match: every name exists in torch, but for older torch's and other libraries' ops."""
    torch = pytest.importorskip("torch")
    if torch.__version__ < (2, 13):
        pytest.skip("the tables also name operators of later torch")
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    older = ("convolution_backward", "conv2d_backward", "conv3d_backward", "conv_dilated2d_backward", "conv_depthwise2d_backward")
    older += ("conv_depthwise3d_backward", "depthwise2d_backward", "_backward_input", "_backward_weight", "transpose_backward", "::_cat")
    unknown = {name for name in {*FORMULAS, *VIEWS, *WRAPPERS} if name.startswith("aten::") and name not in known}
    unknown = {name for name in unknown if not name.endswith(older)}
    if torch.__version__ < (2, 15):
        unknown -= {f"aten::{name}" for name in ("_scaled_addmm", "_scaled_addmm_", "_cudnn_attention_forward_no_dropout_inplace")}
        unknown -= {f"aten::{name}" for name in ("linalg_polar", "linalg_matrix_sqrth", "shallow_copy_data_")}
    else:
        unknown -= {"aten::cholesky", "aten::qr"}  # taken out in 2.15, recorded by those before it
    assert unknown <= {
        f"aten::{name}" for name in ("align_to", "refine_names", "rename", "requires_grad", "float", "half", "double", "bfloat16")
    }


def test_a_second_formula_for_a_name_fails() -> None:
    with pytest.raises(ValueError, match="aten::mm has two formulas"):
        costs("aten::mm")(lambda signature: Cost())


def test_views_are_free_even_without_shapes() -> None:
    assert estimate_cost("aten::transpose", None) == Cost()
    assert estimate_cost("aten::view", Signature((Input(dtype="fp32", shape=(4, 4)),))) == Cost()


@pytest.mark.parametrize("name", ["aten::mm", "aten::add", "mylib::op"])
def test_without_shapes_there_is_a_reason(name: str) -> None:
    for signature in (None, Signature(()), Signature((Input(), Input(value=3)))):
        found = estimate_cost(name, signature)
        assert isinstance(found, Missing)
        assert "recorded" in found.reason


def test_generic_reads_inputs_and_writes_their_broadcast(recorded: Callable[..., Signature]) -> None:
    signature = recorded(("bf16", (64, 1, 32)), ("bf16", (16, 32)), ("bf16", (1,)), 0.5)
    assert estimate_cost("mylib::op", signature) == Cost(
        vector_flops=64 * 16 * 32, bytes=2 * (64 * 32 + 16 * 32 + 1 + 64 * 16 * 32), provenance="generic"
    )
    unfit = estimate_cost("mylib::op", recorded(("fp32", (5, 7)), ("fp32", (3,))))
    assert unfit == Cost(vector_flops=35, bytes=4 * (35 + 3 + 35), provenance="generic")


def test_generic_in_place_writes_self(recorded: Callable[..., Signature]) -> None:
    found = estimate_cost("mylib::op_", recorded(("bf16", (8,)), ("fp32", (4, 8))))
    assert found == Cost(vector_flops=8, bytes=2 * 8 + 4 * 32 + 2 * 8, provenance="generic")


def test_triton_arguments_hold_the_results(recorded: Callable[..., Signature]) -> None:
    found = estimate_cost("triton_poi_fused_add_0", recorded(("bf16", (64,)), ("bf16", (64,)), ("bf16", (64,)), 64))
    assert found == Cost(vector_flops=64, bytes=3 * 128, provenance="derived")


def test_tensor_lists_are_never_exact(recorded: Callable[..., Signature]) -> None:
    """torch does not record the dtype of a tensor list."""
    lists = [(4, 4), (8,)]
    assert estimate_cost("aten::cat", recorded(lists, 0)) == Cost(bytes=2 * 24 * 4, provenance="derived")
    assert estimate_cost("aten::_foreach_add_", recorded(lists, lists, 1)) == Cost(vector_flops=24, bytes=3 * 24 * 4, provenance="derived")
    assert estimate_cost("aten::_foreach_sqrt", recorded(lists)) == Cost(vector_flops=24, bytes=2 * 24 * 4, provenance="derived")
    assert estimate_cost("aten::_fused_sgd_", recorded(lists, lists, None, 0.0)) == Cost(
        vector_flops=48, bytes=3 * 24 * 4, provenance="derived"
    )


def test_reduction_without_dimensions_counts_the_read(recorded: Callable[..., Signature]) -> None:
    """The largest possible result decides: at least 32 elements to one is little beside the read, 2 to one is not."""
    small = recorded(("fp32", (64, 32)), None, None, None, concrete=False)
    assert estimate_cost("aten::sum", small) == Cost(vector_flops=2048, bytes=8192, provenance="derived")
    large = recorded(("fp32", (64, 2)), None, None, None, concrete=False)
    assert estimate_cost("aten::sum", large) == Cost(vector_flops=128, bytes=512, provenance="generic")
    wider = recorded(("int32", (64, 12)), None, None, None, concrete=False)  # the sum of integers is int64
    assert estimate_cost("aten::sum", wider) == Cost(vector_flops=768, bytes=3072, provenance="generic")


def test_batch_norm_training_flag_decides_flops(recorded: Callable[..., Signature]) -> None:
    """The flag is parsed by type: the text 'False' is no truth."""
    x, c = ("fp32", (2, 4, 8, 8)), ("fp32", (4,))
    training, evaluation = (estimate_cost("aten::native_batch_norm", recorded(x, c, c, c, c, flag, 0.1, 1e-5)) for flag in (True, False))
    assert isinstance(training, Cost)
    assert isinstance(evaluation, Cost)
    assert (training.vector_flops, evaluation.vector_flops) == (8 * 512, 2 * 512)
    assert training.bytes - evaluation.bytes == 2 * 4 * 4
    unknown = estimate_cost("aten::cudnn_batch_norm", recorded(x, c, c, c, c, True, 0.1, 1e-5, concrete=False))
    assert isinstance(unknown, Cost)
    assert (unknown.bytes, unknown.provenance) == (training.bytes, "derived")


def test_batch_norm_gradients_follow_the_mask(recorded: Callable[..., Signature]) -> None:
    x, c = ("bf16", (2, 4, 8, 8)), ("fp32", (4,))
    for name in ("aten::native_batch_norm_backward", "aten::batch_norm_backward"):
        every, frozen = (
            estimate_cost(name, recorded(x, x, c, c, c, c, c, True, 1e-5, mask)) for mask in ([True, True, True], [True, False, False])
        )
        assert every == Cost(vector_flops=14 * 512, bytes=3 * 1024 + 5 * 16)
        assert frozen == Cost(vector_flops=14 * 512, bytes=3 * 1024 + 3 * 16)


def test_optimizer_passes(recorded: Callable[..., Signature]) -> None:
    """Tensors read and written per parameter: Adagrad p, g, s read and p, s written; unscale reads and writes the gradients."""
    lists, step = [(10,), (2, 5)], [(), ()]
    moved = {
        "aten::_fused_adagrad_": (5, recorded(lists, lists, lists, step, 0.1)),
        "aten::_fused_adam_": (7 + 2, recorded(lists, lists, lists, lists, lists, step, 0.1)),
        "aten::_amp_foreach_non_finite_check_and_unscale_": (2, recorded(lists, ("fp32", ()), ("fp32", ()))),
        "aten::_foreach_zero_": (1, recorded(lists)),
        "aten::_foreach_copy_": (2, recorded(lists, lists, False)),
        "aten::_foreach_clone": (2, recorded(lists)),
    }
    for name, (passes, signature) in moved.items():
        found = estimate_cost(name, signature)
        assert isinstance(found, Cost)
        assert (found.bytes, found.provenance) == (passes * 20 * 4, "derived"), name


def test_indexing_by_tensors_is_unknown(recorded: Callable[..., Signature]) -> None:
    """The index tensors' shapes are not recorded: looking up ten rows or a million looks the same."""
    found = estimate_cost("aten::index", recorded(("fp32", (1000, 64)), None))
    assert isinstance(found, Missing)


SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 10**12]), max_size=6).map(tuple)
NUMBERS = st.one_of(st.integers(-3, 5), st.sampled_from([10**30, -(10**30)]), st.booleans(), st.floats(), st.text(max_size=4), st.none())
VALUES = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=4).map(tuple))
INPUTS = st.one_of(
    st.builds(Input, dtype=st.sampled_from([*ITEM_BYTES, "mystery"]), shape=SIZES, strides=st.one_of(st.none(), SIZES), value=VALUES),
    st.builds(Input, value=VALUES),
    st.builds(Input, shape=SIZES),
    st.builds(Input, tensors=st.lists(SIZES, max_size=3).map(tuple)),
)


@settings(max_examples=60, deadline=None)
@given(inputs=st.lists(INPUTS, max_size=16))
def test_no_input_makes_it_raise(inputs: list[Input]) -> None:
    """A trace is untrusted: whatever stands in a signature, every formula gives a cost that is not negative, or a reason."""
    signature = Signature(tuple(inputs))
    for name in FORMULAS:
        found = estimate_cost(name, signature)
        if isinstance(found, Cost):
            assert found.matrix_flops >= 0, name
            assert found.vector_flops >= 0, name
            assert found.bytes >= 0, name
            assert type(found.matrix_flops) is type(found.vector_flops) is type(found.bytes) is int, name
            assert bool(found.dtype) or not found.matrix_flops, name
        else:
            assert found.reason, name


@settings(max_examples=60, deadline=None)
@given(inputs=st.lists(INPUTS, max_size=22), node=st.lists(INPUTS, max_size=2))
def test_no_input_makes_a_backward_raise(inputs: list[Input], node: list[Input]) -> None:
    """A backward's cost from its forward is not negative either, or says why there is none; so with what the node's gradient tells."""
    signature, gradient = Signature(tuple(inputs)), Signature(tuple(node))
    calls = [partial(formula, signature) for formula in BACKWARD_FORMULAS.values()]
    calls += [partial(gradients.estimate_forward_from_gradient, name, signature, gradient) for name in gradients.TOLD_BY_GRADIENT]
    for call in calls:
        try:
            found = call()
        except NotModelledError:
            continue
        assert min(found.matrix_flops, found.vector_flops, found.bytes) >= 0
        assert type(found.matrix_flops) is type(found.vector_flops) is type(found.bytes) is int


@settings(max_examples=60, deadline=None)
@given(shapes=st.text(max_size=30), dtypes=st.text(max_size=30), args=st.text(max_size=30))
def test_malformed_text_gives_a_reason(shapes: str, dtypes: str, args: str) -> None:
    signature = parse_signature(shapes, dtypes, None, args)
    assert isinstance(estimate_cost("aten::convolution", signature), Missing)


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 5), min_size=4, max_size=4).map(tuple), data=st.data())
def test_plausible_calls_never_raise(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Tensors of one shape with small arguments reach deeper into the formulas than random ones."""
    x = Input(dtype="fp32", shape=shape)
    arguments = st.one_of(
        st.just(Input(value=(1, 1))), st.just(Input(value=True)), st.just(Input(value=1)), st.just(Input(value=0)), st.just(x)
    )
    signature = Signature((x, x, x, *data.draw(st.lists(arguments, max_size=13))))
    for name in FORMULAS:
        assert isinstance(estimate_cost(name, signature), (Cost, Missing))

"""Shapes, dtypes, strides and arguments: texts as torch 1.9 to 2.13 wrote them, and texts that nobody should write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from examples import sample
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.ops import DTYPES, ITEM_BYTES, Input, parse_argument, parse_signature

# words of "Input type" that are no tensor: torch/csrc/profiler/util.cpp, and the names of torch 1.9
NOT_TENSORS = {"", "Scalar", "ScalarList", "TensorList", "GenericList", "Int", "Double", "Bool", "Device", "String", "Complex"}


def test_a_matrix_product_of_torch_2() -> None:
    signature = parse_signature(
        "[[2048], [559, 1024], [1024, 2048], [], []]",
        '["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar"]',
        "[[1], [1024, 1], [1, 1024], [], []]",
        '["", "", "", "1", "1."]',
    )
    weight = signature.tensor(2)
    assert weight is not None
    assert (weight.dtype, weight.shape, weight.strides) == ("bf16", (1024, 2048), (1, 1024))
    assert (weight.numel, weight.item_bytes, weight.distinct_bytes) == (2_097_152, 2, 4_194_304)
    assert signature.tensor(3) is None
    assert (signature.value(3), signature.value(4), signature.value(9, "default")) == (1, 1.0, "default")
    assert signature.has_args


def test_torch_1_9_recorded_no_strides_and_no_arguments() -> None:
    signature = parse_signature("[[32, 3, 224, 224], [64, 3, 7, 7], []]", '["float", "float", ""]', None, None)
    assert [item.dtype for item in signature.inputs] == ["fp32", "fp32", None]
    assert signature.inputs[0].distinct_bytes == 32 * 3 * 224 * 224 * 4
    assert not signature.has_args


def test_a_tensor_list_keeps_its_shapes() -> None:
    signature = parse_signature(
        "[[[1, 559, 32], [1, 559, 32]], []]", '["TensorList", "Scalar"]', "[[[17888, 1, 559], [17888, 1, 559]], []]", '["", "-1"]'
    )
    assert signature.inputs[0].tensors == ((1, 559, 32), (1, 559, 32))
    assert signature.tensor(0) is None
    assert signature.value(1) == -1


def test_an_expanded_tensor_is_read_once() -> None:
    signature = parse_signature("[[128, 1, 768]]", '["c10::BFloat16"]', "[[0, 768, 1]]", None)
    assert signature.inputs[0].distinct_bytes == 768 * 2
    assert Input(dtype="fp32", shape=(0, 4), strides=(0, 1)).distinct_bytes == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("None", None),
        ("True", True),
        ("False", False),
        ("-1", -1),
        ("1.0000000000000001e-05", 1e-05),
        ("[]", ()),
        ("[1, 2]", (1, 2)),
        ("[False, True, False]", (False, True, False)),
        ("[[1], [2]]", "[[1], [2]]"),
        ("cuda:0", "cuda:0"),
        ("__import__('os').system('false')", "__import__('os').system('false')"),
    ],
)
def test_arguments_are_read_by_type_and_never_evaluated(text: str, value: object) -> None:
    parsed = parse_argument(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_dtype_has_a_size() -> None:
    assert set(DTYPES.values()) <= set(ITEM_BYTES)


json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*DTYPES, "TensorList"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).map(json.dumps)
texts = json_texts | st.text()


@given(texts, st.none() | texts, st.none() | texts, st.none() | texts)
def test_no_text_raises(shapes: str, dtypes: str | None, strides: str | None, args: str | None) -> None:
    signature = parse_signature(shapes, dtypes, strides, args)
    for index, item in enumerate(signature.inputs):
        assert item.distinct_bytes >= 0
        assert signature.tensor(index) in (item, None)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 900 + "]" * 900, "\ud800", "9" * 5_000, "[" + "9" * 5_000 + "]", "[[1e400]]"])
def test_hostile_texts_are_unknown_inputs(text: str) -> None:
    assert all(not item.is_tensor for item in parse_signature(text, text, text, text).inputs)


def _inputs(path: Path) -> dict[tuple[str | None, ...], None]:
    document = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), strict=False)
    found: dict[tuple[str | None, ...], None] = {}
    for event in document if isinstance(document, list) else document["traceEvents"]:
        args: dict[str, Any] = event.get("args") or {}
        dims = args.get("Input Dims", args.get("Input dims"))
        if dims is not None:
            rest = (args.get("Input type"), args.get("Input Strides"), args.get("Concrete Inputs"))
            found[(json.dumps(dims), *(None if item is None else json.dumps(item) for item in rest))] = None
    return found


@pytest.mark.parametrize(
    "name",
    sample(
        [
            "h100_bert-small",
            "h100_qwen1.5-0.5b_prefill",
            "mi300x_norm_layers_fwd_bwd",
            "a100_dlrm_train_cudagraph_triton_rank0of16",
            "v100_resnet50_train_2021_memory_callstack",
            "mi300x_vllm_gptoss_decode_fullgraph_capture",
        ]
    ),
)
def test_real_traces_hold_no_dtype_that_is_not_known(traces: Path, name: str) -> None:
    signatures = _inputs(traces / f"{name}.json.gz")
    tensors = 0
    for texts_of_one in signatures:
        signature = parse_signature(*texts_of_one)  # type: ignore[arg-type]
        assert len(signature.inputs) == len(json.loads(texts_of_one[0] or "[]"))
        tensors += sum(item.is_tensor for item in signature.inputs)
        assert set(json.loads(texts_of_one[1] or "[]")) <= set(DTYPES) | NOT_TENSORS
    assert tensors > len(signatures) / 2

"""GELU by its approximation, wherever a program asks for the exact one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

X = torch.linspace(-5, 5, 1001)
EXACT, TANH = (functional.gelu(X, approximate=kind) for kind in ("none", "tanh"))


def test_the_approximation_is_near_and_not_the_same() -> None:
    assert 1e-4 < float((EXACT - TANH).abs().max()) < 5e-4


@pytest.mark.parametrize("call", [nn.GELU(), lambda x: functional.gelu(x), lambda x: nn.functional.gelu(x, approximate="none")])
def test_every_exact_gelu_is_replaced_and_put_back(call: Any) -> None:
    with applied("gelu-tanh") as evidence:
        assert torch.equal(call(X), TANH)
        assert torch.equal(call(X), TANH)
        assert evidence().found == "calls of an exact GELU that computed by tanh: 2"
    assert torch.equal(call(X), EXACT)


def test_a_function_that_a_model_keeps_is_replaced_and_can_be_saved() -> None:
    with applied("gelu-tanh") as evidence:
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu")
        layer(torch.ones(2, 3, 8))
        assert evidence().found == "calls of an exact GELU that computed by tanh: 1"
        assert pickle.loads(pickle.dumps(layer)).activation is functional.gelu  # noqa: S301 - our own bytes


def test_compiled_code_has_the_approximation_in_its_graph(no_code_generation: None) -> None:
    with applied("gelu-tanh") as evidence:
        model = torch.compile(nn.GELU(), fullgraph=True)
        for _ in range(3):
            assert torch.equal(model(X), TANH)
        assert (evidence().found or "").startswith("calls of an exact GELU that computed by tanh: ")  # each time that Dynamo traces it


def test_a_program_without_an_exact_gelu_is_not_changed() -> None:
    with applied("gelu-tanh") as evidence:
        assert torch.equal(nn.GELU(approximate="tanh")(X), TANH)
        assert evidence().reason == "the program calls neither nn.GELU nor F.gelu with approximate='none'"

"""No framework may reach the network in these tests, and nothing of a recording may stay behind."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


def patched() -> list[object]:
    """What a recording puts into the process."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return [
        dataloader._BaseDataLoaderIter.__next__,
        torch.Tensor.backward,
        torch.save,
        len(optimizer._global_optimizer_post_hooks),
        len(gc.callbacks),
        torch._C._autograd._profiler_enabled(),
    ]


@pytest.fixture(autouse=True)
def _everything_is_put_back() -> Iterator[None]:
    before = patched()
    yield
    assert patched() == before

"""The clocks round copies to the device: called on a tensor, invisible to those who ask the class, gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudiag.capture import device_clock
from gpudiag.capture.hooks import Patches

TIMED = ("to", "cuda", "copy_")
ORIGINALS = {name: getattr(torch.Tensor, name) for name in TIMED}


class Watch:
    def __init__(self) -> None:
        self.begun = self.ended = 0

    def begin(self) -> Any:
        self.begun += 1
        return self.begun

    def end(self, token: Any) -> None:
        self.ended += 1


def test_a_copy_that_stays_on_the_host_is_begun_and_not_counted() -> None:
    patches, watch = Patches(), Watch()
    device_clock.install_copy_hooks(patches, watch.begin, watch.end)
    try:
        moved = torch.ones(2).to("cpu", copy=True)
        torch.ones(2).to(torch.float64)  # to a type, as the first argument: no copy to anywhere
        torch.ones(2).copy_(moved)
    finally:
        patches.restore()
    assert moved.tolist() == [1.0, 1.0]
    assert (watch.begun, watch.ended) == (1, 0)


def test_whoever_asks_the_class_gets_the_method_of_torch() -> None:
    patches = Patches()
    own = {name: name in vars(torch.Tensor) for name in TIMED}
    device_clock.install_copy_hooks(patches, Watch().begin, Watch().end)
    try:
        assert {name: getattr(torch.Tensor, name) for name in TIMED} == ORIGINALS
        assert torch.ones(1).to.__name__ == "to"
    finally:
        patches.restore()
    assert {name: name in vars(torch.Tensor) for name in TIMED} == own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_the_device_are_counted() -> None:
    patches, watch = Patches(), Watch()
    device_clock.install_copy_hooks(patches, watch.begin, watch.end)
    try:
        on_device = torch.ones(2).to("cuda")
        torch.ones(2).cuda()
        on_device.copy_(torch.ones(2))
        on_device.to("cuda")
    finally:
        patches.restore()
    assert (watch.begun, watch.ended) == (3, 3)

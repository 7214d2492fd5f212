"""Lets torchvision be imported beside a CPU build of torch: its wheel on PyPI is compiled for CUDA, and its own ops cannot be loaded there.

None of the programs here uses one of these ops; what torchvision does in Python is as it comes.
"""

import contextlib

import torch

with contextlib.suppress(RuntimeError):  # where torchvision's ops can be loaded, they are there already
    OPS = torch.library.Library("torchvision", "FRAGMENT")
    for NAME in ("nms", "qnms"):
        OPS.define(f"{NAME}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""What to record to know more, in the words of the tool that made the recording."""

from __future__ import annotations

from gpudiag.model.trace import Recorder

_OF_NSYS = {
    "record with activities=[CPU, CUDA]": "record with `nsys profile --trace=cuda,nvtx` and torch.autograd.profiler.emit_nvtx()",
    "record with record_shapes=True": "record with torch.profiler or gpudiag.profile, which note shapes and types (record_shapes=True)",
    "record with with_stack=True": "record with torch.profiler, which notes Python stacks (with_stack=True), or with gpudiag.profile",
}
"""PyTorch's profiler's options, which nsys has not -> what does the same there."""


def advice(text: str, recorder: Recorder) -> str:
    """Return `text`, which says what to record in terms of torch.profiler, as it applies to a recording of `recorder`."""
    if recorder == "nsys":
        for of_torch, of_nsys in _OF_NSYS.items():
            text = text.replace(of_torch, of_nsys)
    return text

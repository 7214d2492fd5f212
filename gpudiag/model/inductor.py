"""What a bundle says about the code that torch.compile generated: `inductor/rank<N>.json`. Holds no source text and no path."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.signature import Shape

INDUCTOR_VERSION = 1

Access = Literal["read", "write", "both"]


class KernelBuffer(msgspec.Struct, frozen=True):
    """A buffer that one call of a generated kernel is given."""

    name: str
    """Inductor's name of the argument, such as 'in_ptr0'."""
    dtype: str
    """Short dtype name ('fp32'); '' where it is not known."""
    access: Access
    shape: Shape | None = None
    """Shape of what is passed (a view where a view is passed); None: sizes that only the run decides."""
    touched: int | None = None
    """At most this many elements are accessed: places in the code times the points of the loops around them. None: not known."""


class GeneratedKernel(msgspec.Struct, frozen=True):
    """A kernel and its calls with the same buffers in one compiled graph."""

    name: str
    category: str
    """poi, red, per, tem, for, ... (codegen/triton.py of Inductor), 'cpp', or 'extern' for a call of a library."""
    calls: int = 1
    """Calls in one call of the graph."""
    ops: tuple[str, ...] | None = None
    """Original operators as Inductor's comment names them, such as 'add'; None: no comment, the kernel's name says them."""
    nodes: tuple[str, ...] = ()
    """Source nodes of the traced graph."""
    buffers: tuple[KernelBuffer, ...] = ()
    points: int | None = None
    """Points of the loops, reduced dimensions included; None: sizes that only the run decides."""
    reduction: int | None = None
    """Length of the reduced dimensions; None: no reduction, or not known."""


class CompiledGraph(msgspec.Struct, frozen=True):
    """A graph that torch.compile compiled: its key in the trace ('## Call CompiledFxGraph <key> ##') and its kernels."""

    key: str
    kernels: tuple[GeneratedKernel, ...]


class InductorCode(msgspec.Struct, frozen=True):
    """`inductor/rank<N>.json` of a bundle."""

    version: int = INDUCTOR_VERSION
    graphs: tuple[CompiledGraph, ...] = ()

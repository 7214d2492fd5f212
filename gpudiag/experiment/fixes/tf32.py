"""tf32: float32 matrix products on fewer bits of the mantissa."""

from __future__ import annotations

from typing import Any

from gpudiag.errors import InputError, nearest
from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.modules import NO_ROOT, name_of, trained

VALUES = ("high", "medium")
"""Of torch.set_float32_matmul_precision: TF32, with 10 bits of mantissa, and bfloat16, with 7."""

_TF32_CAPABILITY = (8, 0)
"""Ampere is the first with tensor cores for TF32 (https://docs.nvidia.com/cuda/cuda-c-programming-guide/, compute capability 8.x)."""


class Tf32(Applier):
    """Sets the precision of float32 matrix products when a root is called first, and again where the program sets another one later."""

    id = "tf32"

    def __init__(self, value: str | None = None) -> None:
        if value is not None and value not in VALUES:
            raise InputError(f"tf32 has no precision {value!r}{nearest(value, VALUES)}", "high or medium; high without a value")
        super().__init__(value)
        self._precision = value or VALUES[0]
        self._roots: list[tuple[str, str]] = []
        """Class and kind of device."""
        self._overruled: list[str] = []
        self._reason = ""
        self._own = False

    def install(self, site: Site) -> None:
        """Set it at the first call of a root, behind whatever the program sets before, and stand in the way of later calls."""
        import torch

        site.on_root(self._root)
        site.patches.wrap(torch, "set_float32_matmul_precision", self._setter)

    def _setter(self, original: Any) -> Any:
        def set_float32_matmul_precision(precision: str) -> None:
            if self._roots and not self._own:
                self._overruled.append(precision)
                return
            original(precision)

        return set_float32_matmul_precision

    def _root(self, module: Any) -> None:
        import torch

        device = next(iter(trained(module))).device.type
        self._reason = self._reason or self._unsuitable(device)
        if self._reason:
            return
        self._own = True
        try:
            torch.set_float32_matmul_precision(self._precision)
        finally:
            self._own = False
        self._roots.append((name_of(module), device))

    def _unsuitable(self, device: str) -> str:
        """Return why the setting would change nothing; '' where it does."""
        import torch

        if not self._roots and _precision() != "highest":
            return f"the program has set {_precision()} itself"
        if device == "cuda":
            able = torch.version.cuda is None or torch.cuda.get_device_capability() >= _TF32_CAPABILITY
            return "" if able else "this GPU has no tensor cores for TF32"
        able, what = _cpu(self._precision)
        return "" if able else f"{self._precision!r} on a CPU takes {what}: on this one products stay in float32"

    def evidence(self, site: Site) -> str:
        """Return what torch says of the precision. Raises NotAppliedError."""
        if not self._roots:
            raise NotAppliedError(self._reason or NO_ROOT)
        if _precision() != self._precision:
            raise NotAppliedError(f"the program has set {_precision()} again")
        overruled = f"; the program's own {', '.join(map(repr, dict.fromkeys(self._overruled)))} overruled" if self._overruled else ""
        devices = ", ".join(dict.fromkeys(device for _, device in self._roots))
        return f"float32 matrix products in {self._precision!r} precision on {devices}{overruled}"


def _precision() -> str:
    """Return the precision of float32 matrix products."""
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # "mix of the legacy and new APIs": it was set for a back-end alone
        return "torch.backends.*.fp32_precision"


def _cpu(precision: str) -> tuple[bool, str]:
    """Return whether this CPU computes float32 products faster in `precision`, and what that takes.

    aten/src/ATen/native/mkldnn/Utils.h: 'medium' lets oneDNN use bfloat16 where it supports it, 'high' TF32 by way of AMX-FP16.
    """
    import torch

    if precision == "medium":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), "bfloat16 instructions"
    able = getattr(torch.cpu, "_is_amx_fp16_supported", None)
    return able is not None and bool(able()), "AMX-FP16"

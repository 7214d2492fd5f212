"""The settings in force while a window is recorded, those included that a program switches on for a part of each step only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gpudiag.capture.environment.reading import flag, read
from gpudiag.capture.environment.settings import sdp_backends, settings
from gpudiag.capture.patches import Patches
from gpudiag.model.bundle import Settings

_ENTERED = ("_cur_sdpa_kernel_backends", "math_sdp_enabled")
"""What torch.nn.attention.sdpa_kernel calls when it is entered, to know what to put back; the second is that of torch 2.4."""


class Switches:
    """Settings as of the end of the first timing window, or of now until then. A mark stands outside the regions of a step.

    So anomaly detection is asked about where a backward pass begins. Which kernels attention may use is known there too, where
    the region spans forward and backward passes; where it spans less, it is unknown.
    """

    def __init__(self) -> None:
        self._frozen: Settings | None = None
        self._anomaly = self._chosen = False
        self._inside: set[tuple[str, ...] | None] = set()

    def install(self, patches: Patches) -> None:
        """Hear of sdpa_kernel regions. Where this torch has none there is nothing to hear of."""
        from torch.nn import attention

        for name in [name for name in _ENTERED if hasattr(attention, name)][:1]:
            patches.wrap(attention, name, self._entered)

    def backward_began(self) -> None:
        """Look inside a step."""
        import torch

        if self._frozen is None:
            self._anomaly = self._anomaly or flag(read(torch.is_anomaly_enabled)) is True
            if self._chosen:
                self._inside.add(sdp_backends())

    def freeze(self) -> None:
        """Keep the settings as they are now; only the first call does."""
        if self._frozen is None:
            self._frozen = self.now()

    def now(self) -> Settings:
        """Return the settings."""
        if self._frozen is not None:
            return self._frozen
        found = settings()
        anomaly = True if self._anomaly else found.anomaly_detection
        return msgspec.structs.replace(found, anomaly_detection=anomaly, sdp_backends=self._attention(found.sdp_backends))

    def _attention(self, outside: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the kernels allowed: those in every backward pass where they are others than between steps, else unknown."""
        if not self._chosen:
            return outside
        return next(iter(self._inside)) if len(self._inside) == 1 and outside not in self._inside else None

    def _entered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._chosen = True
            return original(*args, **kwargs)

        return entered

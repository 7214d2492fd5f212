"""sdpa: attention in one kernel, by torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

from gpudiag.errors import InputError, nearest
from gpudiag.experiment.fixes.fix import OUTSIDE, NotAppliedError, Site
from gpudiag.experiment.fixes.modules import RootFix, device_of, inner, name_of, wrap_forward
from gpudiag.experiment.fixes.outputs import nodes

BACKENDS = {"flash": "FlashAttention", "efficient": "EfficientAttention", "cudnn": "CudnnAttention"}
"""Back-ends that may be asked for, and what the autograd nodes of their ops are called (aten/src/ATen/native/native_functions.yaml)."""

LOOKS = 3

_NODE = "ScaledDotProduct"
_BY_HAND = "F.scaled_dot_product_attention(q, k, v, is_causal=True) in place of softmax(q @ k.mT / sqrt(d)) @ v"


class Sdpa(RootFix):
    """Switches models of Hugging Face to it; with a value, has torch prefer one of its back-ends wherever the program calls it."""

    id = "sdpa"

    def __init__(self, value: str | None = None) -> None:
        if value is not None and value not in BACKENDS:
            hint = f"one of {', '.join(BACKENDS)}; without a value a Hugging Face model is switched to it"
            raise InputError(f"sdpa has no back-end {value!r}{nearest(value, BACKENDS)}", hint)
        super().__init__(None)
        self.value = value
        self._looks = 0
        self._nodes: set[str] = set()
        self._configs: list[Any] = []

    def install(self, site: Site) -> None:
        """Switch roots when they are called first, and look at what their forward passes are made of."""
        super().install(site)
        site.on_root(self._look, layer=OUTSIDE)

    def change(self, module: Any) -> None:
        """Switch one model, or the back-end. Raises NotAppliedError where that is not possible, or so already."""
        if self.value is None:
            self._switch(inner(module))
        else:
            self._prefer(device_of(module).type)

    def _switch(self, model: Any) -> None:
        switch: Any = getattr(model, "set_attn_implementation", None)
        config: Any = getattr(model, "config", None)
        if switch is None:
            raise NotAppliedError(f"{name_of(model)} has no switch for its attention; where it is written out, write {_BY_HAND}")
        before = config._attn_implementation
        if before not in (None, "eager"):
            raise NotAppliedError(f"its attention runs as {before} already")
        try:
            switch("sdpa")
        except (ValueError, ImportError) as error:
            raise NotAppliedError(str(error).splitlines()[0]) from None
        if config._attn_implementation != "sdpa":
            raise NotAppliedError(f"{name_of(model)} cannot switch its attention: pass attn_implementation='sdpa' where it is made")
        self._configs.append(config)

    def _prefer(self, device: str) -> None:
        import torch

        if device != "cuda":
            raise NotAppliedError("there is one back-end only on a CPU")
        for name, set_enabled in (
            ("flash", torch.backends.cuda.enable_flash_sdp),
            ("efficient", torch.backends.cuda.enable_mem_efficient_sdp),
            ("cudnn", torch.backends.cuda.enable_cudnn_sdp),
        ):
            set_enabled(name == self.value)

    def _look(self, module: Any) -> None:
        import torch

        def make(forward: Any) -> Any:
            def looked_at(target: Any, *args: Any, **kwargs: Any) -> Any:
                output = forward(target, *args, **kwargs)
                if self._looks < LOOKS and torch.is_grad_enabled():
                    self._looks += 1
                    self._nodes.update(node.name() for node in nodes(output))
                return output

            return looked_at

        wrap_forward(module, make)

    def shown(self) -> str:
        """Return the switch as it stands, and the fused kernels in the forward pass. Raises NotAppliedError."""
        fused = sorted(name.removesuffix("Backward0") for name in self._nodes if name.startswith(_NODE))
        seen = f"; {', '.join(fused)} in the forward pass" if fused else ""
        if self.value is None:
            if any(config._attn_implementation != "sdpa" for config in self._configs):
                raise NotAppliedError("the program has switched its attention back")
            return f"attention of {len(self._configs)} models runs as sdpa{seen}"
        if not any(BACKENDS[self.value] in name for name in fused):
            raise NotAppliedError(f"no attention in the forward pass ran on the back-end {self.value}{seen}")
        return f"back-end {self.value}{seen}"

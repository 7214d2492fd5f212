"""Measures a fix that was planted into targets/plain.py: `planted_fixes.py useless|harmful|wrong RESULT.json BUNDLE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import gpudiag

PLAIN = Path(__file__).with_name("plain.py")


class Useless(gpudiag.Applier):
    """Leaves a mark on the model, and changes nothing."""

    def install(self, site: Any) -> None:
        site.on_root(lambda model: setattr(model, "_marked", True))

    def evidence(self, site: Any) -> str:
        if not any(getattr(root, "_marked", False) for root in site.roots):
            raise gpudiag.NotAppliedError("no model was marked")
        return "the model is marked"


class Harmful(Useless):
    """Waits two milliseconds in each forward."""

    def install(self, site: Any) -> None:
        super().install(site)
        site.on_root(lambda model: model.register_forward_pre_hook(lambda *_: time.sleep(0.002)))


class Wrong(Useless):
    """Makes the rate 10 % higher, and claims to change rounding only."""

    def install(self, site: Any) -> None:
        super().install(site)
        build = torch.optim.AdamW.__init__

        def built(optimizer: Any, *args: Any, lr: float = 1e-3, **kwargs: Any) -> None:
            build(optimizer, *args, lr=1.1 * lr, **kwargs)

        torch.optim.AdamW.__init__ = built  # type: ignore[method-assign]


gpudiag.register_fix(Useless, gpudiag.Fix("planted-useless", "Mark the model", "exact", "model._marked = True"))
gpudiag.register_fix(Harmful, gpudiag.Fix("planted-harmful", "Wait in the forward", "exact", "time.sleep(0.002)"))
gpudiag.register_fix(Wrong, gpudiag.Fix("planted-wrong", "A higher rate", "rounding", "AdamW(..., lr=1.1 * lr)"))

if __name__ == "__main__":
    kind, result, bundle = sys.argv[1:]
    gpudiag.ab_script(PLAIN, fixes=[f"planted-{kind}"], output=bundle, looks=(4, 6)).save(result)

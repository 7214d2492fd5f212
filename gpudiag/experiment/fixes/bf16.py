"""bf16: autocast to bfloat16."""

from __future__ import annotations

from gpudiag.experiment.fixes.autocast import Autocast


class Bf16(Autocast):
    """Runs forward passes in autocast to bfloat16; its exponent is that of float32, so that no gradient has to be scaled."""

    id = "bf16"
    dtype = "bfloat16"

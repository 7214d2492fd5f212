"""Versions of the packages that decide what a training step does, of those that the process has imported."""

from __future__ import annotations

import email.parser  # noqa: F401 - importlib.metadata imports it when it reads a version; no import may happen in our thread
import re
import sys
from importlib import metadata

KNOWN = {
    "torch": "torch", "torchvision": "torchvision", "torchaudio": "torchaudio", "torchdata": "torchdata", "torchao": "torchao",
    "torchtitan": "torchtitan", "triton": "triton", "numpy": "numpy", "transformers": "transformers", "tokenizers": "tokenizers",
    "datasets": "datasets", "accelerate": "accelerate", "lightning": "lightning", "pytorch_lightning": "pytorch-lightning",
    "deepspeed": "deepspeed", "megatron": "megatron-core", "peft": "peft", "trl": "trl", "timm": "timm", "diffusers": "diffusers",
    "flash_attn": "flash-attn", "xformers": "xformers", "apex": "apex", "transformer_engine": "transformer-engine",
    "bitsandbytes": "bitsandbytes", "liger_kernel": "liger-kernel", "unsloth": "unsloth", "torch_geometric": "torch-geometric",
    "dgl": "dgl", "webdataset": "webdataset", "nvidia.dali": "nvidia-dali-cuda120", "kornia": "kornia", "composer": "mosaicml",
    "tensordict": "tensordict", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d",
    "hivemind": "hivemind", "jax": "jax", "tensorflow": "tensorflow",
}  # fmt: skip
"""Module -> the distribution that installs it."""

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
"""PEP 440, local versions included."""


def packages() -> dict[str, str]:
    """Return distribution -> version of the known packages in sys.modules; nothing is imported."""
    found = {}
    for module, distribution in KNOWN.items():
        version = _version(module, distribution) if module in sys.modules else None
        if version:
            found[distribution] = version
    return found


def _version(module: str, distribution: str) -> str | None:
    """Return what the module itself says (an attribute: lazy modules are not made to load), else what was installed."""
    version = vars(sys.modules[module]).get("__version__") if hasattr(sys.modules[module], "__dict__") else None
    if not isinstance(version, str):
        try:
            version = metadata.version(distribution)
        except (metadata.PackageNotFoundError, OSError, ValueError):
            return None
    return str(version) if _VERSION.fullmatch(str(version)) else None

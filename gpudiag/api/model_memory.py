"""Memory that training the model of a file would take: `gpudiag memory --estimate FILE.py:FUNCTION`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudiag.api.estimate import parted
from gpudiag.capture.estimate.estimate import Given, estimate
from gpudiag.capture.estimate.target import load, named
from gpudiag.errors import UsageError, nearest
from gpudiag.model.estimate import ModelEstimate

SETTINGS = ("optimizer", "autocast", "device", "accumulate")
"""What `--set` may change of what a function returns."""


def estimate_file(target: str, settings: Sequence[str] = ()) -> ModelEstimate:
    """Return the estimate of what FILE.py:FUNCTION makes, with `settings` ('autocast=bf16') laid over it; the file is executed."""
    changed = _settings(settings)
    function, name = load(target)
    return estimate(lambda: Given(**(named(function(), name) | changed)), f"{name}()")


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting, name, equals, value in parted(settings):
        if name not in SETTINGS or not equals or not value:
            hint = "" if name in SETTINGS else nearest(name, SETTINGS)
            raise UsageError(f"--set {setting}: not a setting of a model{hint}", f"NAME=VALUE with one of {', '.join(SETTINGS)}")
        found[name] = value.lower() in ("true", "yes", "1") if name == "accumulate" else value
    return found

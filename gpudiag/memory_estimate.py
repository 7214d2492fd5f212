"""Memory that training would take: from hyper-parameters alone, or of the model of a file (`gpudiag memory --estimate`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from gpudiag.capture.estimate.model_estimate import EstimateInput, load_function, name_results, run_estimate
from gpudiag.errors import UsageError, suggest_nearest
from gpudiag.model.memory import ModelEstimate
from gpudiag.roofline.transformer import PRESETS, Estimate, Transformer, estimate_transformer_memory

DEFAULT_PRESET = "playbook"

LARGEST_SIZE = 10**12
"""Of any size: a thousand times the largest batches in tokens that were ever trained with."""


class Estimated(msgspec.Struct, frozen=True):
    """What `gpudiag memory --estimate --json FILE` writes: the model that was asked about, and its memory."""

    preset: str
    model: Transformer
    memory: Estimate
    activations_bytes: int
    total_bytes: int


def estimate_transformer(preset: str = DEFAULT_PRESET, settings: Sequence[str] = ()) -> Estimated:
    """Estimate the memory of `preset` with `settings` ('batch=100', several in one text may be parted by commas) laid over it.

    Raises UsageError for a preset or a name that does not exist and a value that does not fit.
    """
    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}{suggest_nearest(preset, PRESETS)}", f"one of {', '.join(PRESETS)}")
    values: dict[str, Any] = msgspec.to_builtins(PRESETS[preset])
    for setting, name, equals, value in split_settings(settings):
        name = name.replace("-", "_")
        if name not in values:
            raise UsageError(f"--set {setting}: no such size{suggest_nearest(name, values)}", f"one of {', '.join(values)}")
        if not equals:
            raise UsageError(f"--set {setting}: no value", f"write {name}=VALUE")
        values[name] = _parse_value(setting, name, value)
    model = msgspec.convert(values, Transformer)
    for name, size in msgspec.to_builtins(model).items():
        if type(size) is int and size < (0 if name in ("zero_stage", "optimizer_bytes") else 1):
            raise UsageError(f"--set {name}={size}: must be at least 1")
        if type(size) is int and size > LARGEST_SIZE:
            raise UsageError(f"--set {name}: must be at most {LARGEST_SIZE:,}")
    memory = estimate_transformer_memory(model)
    return Estimated(preset, model, memory, memory.activations_bytes, memory.total_bytes)


def _parse_value(setting: str, name: str, value: str) -> Any:
    field = next(item for item in msgspec.structs.fields(Transformer) if item.name == name)
    try:
        return msgspec.convert(value, field.type, strict=False)
    except UnicodeEncodeError:  # an argument that is no UTF-8: half surrogate pairs, which msgspec cannot read
        raise UsageError(f"--set {setting}: {name} takes no such text") from None
    except msgspec.ValidationError as error:
        choices = [str(choice) for choice in get_args(field.type)] if get_origin(field.type) is Literal else []
        if choices:
            raise UsageError(f"--set {setting}: {value!r} is none of {', '.join(choices)}{suggest_nearest(value, choices)}") from None
        raise UsageError(f"--set {setting}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def split_settings(settings: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (setting, name, '=' or '', value) of each 'name=value' in `settings`; several in one text are parted by commas."""
    for setting in (part.strip() for text in settings for part in text.split(",")):
        name, equals, value = (part.strip() for part in setting.partition("="))
        yield setting, name, equals, value


SETTINGS = ("optimizer", "autocast", "device", "accumulate")
"""What `--set` may change of what a function returns."""


def estimate_file(target: str, settings: Sequence[str] = ()) -> ModelEstimate:
    """Estimate the memory of what FILE.py:FUNCTION makes, with `settings` ('autocast=bf16') laid over it; the file is executed."""
    changed: dict[str, Any] = {}
    for setting, key, equals, value in split_settings(settings):
        if key not in SETTINGS or not equals or not value:
            hint = "" if key in SETTINGS else suggest_nearest(key, SETTINGS)
            raise UsageError(f"--set {setting}: not a setting of a model{hint}", f"NAME=VALUE with one of {', '.join(SETTINGS)}")
        changed[key] = value.lower() in ("true", "yes", "1") if key == "accumulate" else value
    function, name = load_function(target)
    return run_estimate(lambda: EstimateInput(**(name_results(function(), name) | changed)), f"{name}()")

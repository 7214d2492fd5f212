"""What `build` can be asked to do otherwise: its knobs, and the fixes that turn one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes.dataloader import BatchSize, parse_batch_size
from gpudiag.fixes.fix import OWN_LOOP, Applier, Fix, NotAppliedError, Site, parse_whole_number

Turn = Callable[[Any], Any]
"""Takes the value of a knob as it would be, and returns the one that it is to have."""

ACCUM, BATCH_SIZE = "accum", "batch_size"

STANDARD_KNOBS: Mapping[str, Any] = {ACCUM: 1, "amp": None, "compile": False}
"""Knobs that have a default of their own; and `device` and `seed`, which the arm knows."""


class Knobs:
    """The configuration that `build` is given: `cfg.get("width", 512)`, or `cfg.width` for a knob that has a default already.

    A knob is anything with a name. Where an experiment does not turn it, it has its default: that of a keyword parameter of build
    (`def build(cfg, width=512)`), of the reading (`cfg.get("width", 512)`), or one of the standard ones: `accum` 1, `amp` None, `compile`
    False, `device` "cuda" where there is one, `seed`. `values`: set for this arm; `turns`: what fixes make of a value.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], turns: Mapping[str, Turn]) -> None:
        self._values, self._turns = dict(values), dict(turns)
        self._defaults = {**STANDARD_KNOBS, **defaults}
        self.read: dict[str, tuple[Any, Any]] = {}
        """Name -> (the value without any fix, the value), as build has read it."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the knob `name`, `default` where nothing else says."""
        before = self._values.get(name, self._defaults.get(name, default))
        value = self._turns[name](before) if name in self._turns else before
        self.read[name] = (before, value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in {**self._defaults, **self._values}:
            raise AttributeError(f'the knob {name!r} has no default: write cfg.get("{name}", DEFAULT), or def build(cfg, {name}=DEFAULT)')
        return self.get(name)

    def check_all_read(self) -> None:
        """Raise NotAppliedError for a knob that was set for this arm and never read: it changed nothing."""
        name = next((name for name in self._values if name not in self.read), None)
        if name is not None:
            near = suggest_nearest(name, list(self.read))
            raise NotAppliedError(f'nothing reads the knob {name!r}{near}; write cfg.get("{name}", DEFAULT) in build')


def call_build(build: Callable[..., Any], make: Callable[[Mapping[str, Any]], Knobs]) -> tuple[Any, Knobs]:
    """Return what `build` makes, and the knobs, which `make` makes of the defaults that build declares.

    A parameter without a default is given the knobs; those with one are knobs themselves. Raises InputError for several without.
    """
    parameters = inspect.signature(build).parameters.values()
    of_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {known.name: known.default for known in parameters if known.default is not known.empty and known.kind in of_name}
    plain = [known for known in parameters if known.default is known.empty and known.kind not in (known.VAR_POSITIONAL, known.VAR_KEYWORD)]
    if len(plain) > 1 or any(known.kind is known.KEYWORD_ONLY for known in plain):
        names = ", ".join(known.name for known in plain)
        raise InputError(f"build({names}) has parameters that nobody gives it", "one takes the knobs; give each other one a default")
    knobs = make(named)
    return build(*([knobs] if plain else []), **{name: knobs.get(name) for name in named}), knobs


class KnobState(msgspec.Struct):
    """What the fixes of this process and its factory know of one another."""

    turns: dict[str, Turn] = {}
    knobs: Knobs | None = None
    loop: Any = None
    """The experiment.task.Loop that trains."""


KNOB_STATE = KnobState()
"""Of this process."""


class KnobFix(Applier):
    """A fix that turns a knob of build."""

    knob: ClassVar[str]

    def install(self, site: Site) -> None:
        KNOB_STATE.turns[self.knob] = self.turn

    def turn(self, before: Any) -> Any:
        """Return the value that the knob is to have in place of `before`: the same, unless a fix says otherwise."""
        return before

    def values(self) -> tuple[Any, Any]:
        """Return the value without the fix and with it. Raises NotAppliedError where build has not read the knob."""
        read = None if KNOB_STATE.knobs is None else KNOB_STATE.knobs.read.get(self.knob)
        if read is None:
            raise NotAppliedError(f'build does not read the knob {self.knob}: write cfg.get("{self.knob}", DEFAULT) where it is used')
        return read


class BatchSizeKnob(KnobFix):
    """Another `cfg.batch_size`. `value`: x2 (the default) or a number of samples."""

    fix = BatchSize.fix
    knob = BATCH_SIZE

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._size, self._factor = parse_batch_size(value)

    def turn(self, before: Any) -> Any:
        """Return the size that was asked for; `before` where that is no number and cannot be multiplied."""
        if self._size is not None:
            return self._size
        return max(1, round(before * self._factor)) if isinstance(before, int) else before

    def evidence(self, site: Site) -> str:
        """Return the size that was read, and the samples of the batches that came of it."""
        before, after = self.values()
        samples = None if KNOB_STATE.loop is None else KNOB_STATE.loop.samples
        if before == after:
            raise NotAppliedError(f"cfg.batch_size is {before!r} as it is")
        if samples == before:
            raise NotAppliedError(f"build reads cfg.batch_size, but its batches have {samples} samples still")
        return f"cfg.batch_size {before} -> {after}, batches of {samples} samples" if samples else f"cfg.batch_size {before} -> {after}"


class AccumulationKnob(KnobFix):
    """Each batch in `value` micro-batches (2), their gradients added up: by build where it reads `cfg.accum`, else by the loop."""

    fix = Fix(
        "accumulation", "Gradient accumulation", "rounding", "loss = loss / n; step every n micro-batches",
        values="a number of micro-batches, 2 by default; only gpudiag.ab(build) can apply it", injected=False, by_hand=OWN_LOOP,
    )  # fmt: skip
    knob = ACCUM

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._count = parse_whole_number(self.id, value, least=2) or 2

    def turn(self, before: Any) -> int:
        return self._count

    def evidence(self, site: Site) -> str:
        """Return how many micro-batches a step had."""
        loop = KNOB_STATE.loop
        if loop is None:
            raise NotAppliedError("no step was trained")
        if loop.accumulation == 1:  # build does it
            before, after = self.values()
            return f"cfg.accum {before} -> {after}, read by build"
        if loop.refused:
            raise NotAppliedError(loop.refused)
        return f"{loop.parts} micro-batches in each step of {loop.samples} samples"


KNOB_FIXES: tuple[type[KnobFix], ...] = (BatchSizeKnob, AccumulationKnob)

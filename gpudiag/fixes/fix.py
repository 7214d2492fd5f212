"""What a fix is: a descriptor, and an Applier that changes a program at a Site and shows evidence; values of --fix, changed arguments.

A fix is applied to a program that knows nothing of it: it wraps the constructors that the program will call, or changes the outermost
modules before their first call. It then has to show that it took effect; without evidence the verdict is `not_applied`, never x1.00.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gpudiag.capture.hooks import Patches, skip_frame
from gpudiag.errors import InputError
from gpudiag.model.experiment import ParityKind

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode


class Fix(msgspec.Struct, frozen=True):
    """A change that can be tried: its id, what it does, how far results may differ, what it cannot be combined with."""

    id: str
    title: str
    parity: ParityKind
    change: str
    """The code change that a user would make."""
    conflicts: tuple[str, ...] = ()
    """It is enough that one of two names the other."""
    values: str = ""
    """What `--fix ID=VALUE` takes, for a person: 'x2, or a number of samples'; '' for nothing."""
    verified: tuple[str, ...] = ("cpu",)
    """Device kinds on which an experiment has shown it to work: of a fix without "gpu" is said `not verified on a GPU`."""
    injected: bool = True
    """Whether `gpudiag ab --fix ID` can put it into a running program; else a copy of the script has to hold the change."""
    by_hand: str = ""
    """Why only a person can make it; '' of one that is injected."""
    needs_value: bool = False
    """Whether `--fix ID` is refused without a value."""


OWN_LOOP = "the program's own loop decides what a batch or a micro-batch is, and when the optimizer steps"
"""Why a fix of batches is left to the program."""

INSIDE, COMPILED, GRAPHED, OUTSIDE = range(4)
"""Layers of a root's forward pass: weights and inner modules, what is compiled, what is captured as a graph, what goes round all of it
(autocast stands round a compiled module, as users write it; the graphs and breaks are the same as with autocast inside)."""


class NotAppliedError(Exception):
    """The fix does not suit this program or machine, or left no trace. The message says why, in one line."""


class NoPlaceError(Exception):
    """The place of a change in the source of a script cannot be found for certain. The message says why; `line`: where to look, 0: not in
    this file."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


class Site:
    """Where fixes are applied: one process of an arm, before it trains.

    Hooks are called in the order of the fixes. What a hook raises as NotAppliedError ends the arm with the verdict `not_applied`; any other
    exception with `failed: crash`: these are trials, no training runs.
    """

    def __init__(self, patches: Patches) -> None:
        self.patches = patches
        """For constructors and functions that the program will call."""
        self.roots: list[Any] = []
        """The outermost modules that were called in training mode with gradients, in the order of their first call."""
        self.optimizers: list[Any] = []
        """All torch optimizers that the program has made."""
        self.loaders: list[Any] = []
        """All torch DataLoaders that the program has made."""
        self.compiles = False
        """Whether the program itself, or a fix, compiles: global module hooks would have its graphs compiled twice."""
        self.root_changes: list[Callable[[Any], None]] = []
        """What on_root() was given, in the order of the layers."""
        self._layers: list[int] = []
        self.optimizer_changes: list[Callable[[Any], None]] = []

    def on_root(self, change: Callable[[Any], None], *, layer: int = INSIDE) -> None:
        """Call change(module) for each root before its first call, which is changed too; a DDP or FSDP wrapper is given as it is.

        Changes of a lower layer come first, whatever the order of the fixes is: INSIDE, COMPILED, GRAPHED, OUTSIDE.
        """
        place = bisect_right(self._layers, layer)
        self._layers.insert(place, layer)
        self.root_changes.insert(place, change)

    def on_optimizer(self, change: Callable[[Any], None]) -> None:
        """Call change(optimizer) after each torch optimizer was made."""
        self.optimizer_changes.append(change)

    def add(self, known: list[Any], changes: list[Callable[[Any], None]], made: Any) -> None:
        """Keep in `known` a root that is about to be called for the first time, or an optimizer that was made, and change it."""
        known.append(made)
        for change in changes:
            change(made)


class Applier(ABC):
    """How one fix is applied. A fix of this package has its descriptor here; one of your own is registered with it."""

    fix: ClassVar[Fix]
    id: str = ""
    """Of its descriptor."""
    environ: Mapping[str, str] = MappingProxyType({})
    """Variables that the process must be started with (they are read before Python runs)."""
    needs_gpu = False
    kind = ""
    """What fails alike in all fixes of this kind, where one of them crashes; '' for a fix of its own."""
    frameworks: Mapping[str, str] = MappingProxyType({})
    """Full name of a constructor of a framework -> the argument of it that makes the change: where a script calls it, a person is told."""
    slow_dtype = ""
    """A type that the fix computes in and this processor has no instructions for, once there is evidence."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "fix" in vars(cls):
            cls.id = cls.fix.id

    def __init__(self, value: str | None = None) -> None:
        """Take the value of `--fix ID=VALUE`. Raises InputError for one that the fix does not take."""
        self.value = value

    @abstractmethod
    def install(self, site: Site) -> None:
        """Put the change in place, when torch has just been imported. Raises NotAppliedError."""

    @abstractmethod
    def evidence(self, site: Site) -> str:
        """Return what shows that the change is in effect, after the warm-up: a value read back, never what was asked for.

        Raises NotAppliedError where nothing shows it.
        """

    def patch(self, code: TrainingCode) -> None:
        """Make the change in the source of a script: by edits of `code`, which sees the file without them.

        Raises NoPlaceError where the place, or what to write, is not certain: nothing is written then, and what to change is said.
        """
        raise NoPlaceError("where it belongs is for a person to say")


_MAX_DIGITS = 18
"""Of a number in 64 bits: int() refuses a text of thousands of digits with an error of its own."""


def parse_whole_number(fix: str, value: str | None, least: int, most: int = 10**9) -> int | None:
    """Parse a whole number from `least` to `most`; None where no value was given. Raises InputError for what is none."""
    if value is None:
        return None
    number = int(value) if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else -1
    if not least <= number <= most:
        raise InputError(f"{fix} takes a whole number from {least} to {most:,}, not {value!r}", f"for example --fix {fix}={max(4, least)}")
    return number


def require_used_gpu(why: str) -> None:
    """Do nothing where this process has used a GPU. Raises NotAppliedError with `why` where it has not."""
    import torch

    if not torch.cuda.is_initialized():
        raise NotAppliedError(f"{why}, and the program uses none")


def around(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the maker, for Patches.wrap, of a function that runs call(original, *args, **kwargs).

    That is one frame more: for what is called once a step or less.
    """
    skip_frame(call)

    def make(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return wrapper

    return make


ArgumentChange = Callable[[Any, dict[str, Any]], None]
"""Called with the object and the arguments that were given, by name; it changes them in place."""


def wrap_arguments(change: ArgumentChange) -> Callable[[Any], Any]:
    """Return the maker, for Patches.wrap, of a constructor or method that runs with the arguments that `change` leaves.

    A call that does not fit the signature is passed on as it is: its error is then the one that the program would get without us.
    """

    def call(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = inspect.signature(original).bind(owner, *args, **kwargs)
        except TypeError:
            return original(owner, *args, **kwargs)
        change(owner, bound.arguments)
        return original(*bound.args, **bound.kwargs)

    return around(call)

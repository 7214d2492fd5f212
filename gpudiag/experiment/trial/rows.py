"""How many samples a step has where no DataLoader tells: the rows that the outermost module is given."""

from __future__ import annotations

from typing import Any

from gpudiag.capture.samples import samples_of

STEPS = 8
"""Steps that are looked at; batches of a plain list rarely change their size, and a hook costs each module call some microseconds."""


class Rows:
    """Counts the rows of the first module call after each backward pass, over the first steps.

    `compiles`: the program has called torch.compile, and nothing is counted: Dynamo looks at the global hooks of modules, and would
    compile again once they are gone.
    """

    def __init__(self, *, compiles: bool) -> None:
        self._waiting = True
        self._rows = self._steps = 0
        self._known = False
        self._handle: Any = None
        if not compiles:
            from torch.nn.modules import module

            self._handle = module.register_module_forward_pre_hook(self._called)

    def _called(self, _: Any, inputs: Any) -> None:
        if self._waiting:
            self._waiting = False
            rows = samples_of(inputs)
            if rows is not None:
                self._rows += rows
                self._known = True

    def backward(self) -> None:
        """A backward pass begins: the next module call belongs to another micro-batch."""
        self._waiting = True

    def step(self) -> None:
        """A whole step has ended."""
        if self._handle is not None:
            self._steps += 1
            if self._steps >= STEPS:
                self.end()

    def forget(self) -> None:
        """What ran since the last mark was no whole step."""
        if self._handle is not None:
            self._rows = self._steps = 0
            self._known = False

    def end(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def per_step(self) -> float | None:
        """Return the mean rows of a step; None where no module was called with a tensor."""
        return self._rows / self._steps if self._known and self._steps else None

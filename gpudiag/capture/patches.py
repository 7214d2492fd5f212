"""Attributes of torch that are replaced while a session records, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from gpudiag.capture.untraced import skip_frame


class StandIn:
    """A method that is called in place of another one. Whoever asks the class for the method gets the original.

    torch hands `torch.Tensor.backward` to `__torch_function__`, where subclasses and modes look it up in their tables or compare it
    by identity: they must find what they found without us. Only a call on an instance comes to `wrapper`.
    """

    def __init__(self, original: Any, wrapper: Callable[..., Any]) -> None:
        self._original, self.wrapper = original, wrapper

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._original if instance is None else MethodType(self.wrapper, instance)


class Patches:
    """Replaced attributes; `restore` puts every original back unless someone else has replaced it since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any], *, homes: Sequence[Any] = ()) -> None:
        """Replace `owner.name` by make(original); does nothing where this version of torch has no such attribute.

        `homes`: where else the same object stands under this name. pickle looks a function up where it was defined, and refuses it where
        it finds another one.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(original))
        skip_frame(wrapper)
        for place in (owner, *homes):
            if getattr(place, name, None) is original:
                self._set(place, name, original, wrapper)

    def wrap_method(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Have make(original) called for `instance.name()`, while `owner.name` stays what it is; does nothing where there is none."""
        original, own = getattr(owner, name, None), vars(owner).get(name)
        if original is None:
            return
        wrapper = functools.wraps(original)(make(own.wrapper if isinstance(own, StandIn) else original))
        skip_frame(wrapper)
        skip_frame(StandIn.__get__)
        method = StandIn(original, wrapper)
        setattr(owner, name, method)

        def undo() -> None:
            if vars(owner).get(name) is not method:
                return
            if own is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the originals are put back."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put the originals back, the last one first."""
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, original: Any, wrapper: Any) -> None:
        setattr(owner, name, wrapper)

        def undo() -> None:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

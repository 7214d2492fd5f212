"""Constructors and methods of torch whose arguments are changed on the way in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Change = Callable[[Any, dict[str, Any]], None]
"""Called with the object and the arguments that were given, by name; it changes them in place."""


def with_arguments(change: Change) -> Callable[[Any], Any]:
    """Return the maker, for Patches.wrap, of a constructor or method that runs with the arguments that `change` leaves.

    A call that does not fit the signature is passed on as it is: its error is then the one that the program would get without us.
    """

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(owner, *args, **kwargs)
            except TypeError:
                return original(owner, *args, **kwargs)
            change(owner, bound.arguments)
            return original(*bound.args, **bound.kwargs)

        return call

    return make

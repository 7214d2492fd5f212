"""Which of many examples of one thing the fast part of the tests looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sample(examples: Iterable[Any], every: int = 4) -> list[Any]:
    """Return the examples, all but every fourth (`every`) of them marked slow. A tuple is an example of several values."""
    found = [
        example if isinstance(example, ParameterSet) else pytest.param(*(example if type(example) is tuple else (example,)))
        for example in examples
    ]
    return [one._replace(marks=[*one.marks, pytest.mark.slow]) if row % every else one for row, one in enumerate(found)]

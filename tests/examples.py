"""Which of many examples of one thing the fast part of the tests looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(examples: Iterable[Any], every: int = 3) -> list[Any]:
    """Return the examples, all but every third of them marked slow."""
    return [example if row % every == 0 else pytest.param(example, marks=pytest.mark.slow) for row, example in enumerate(examples)]

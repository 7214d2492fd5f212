"""A warning stands at the line that led to it, and stops nothing."""

from __future__ import annotations

import inspect
import warnings

import pytest

from gpudiag.errors import warn_user


def _within(stacklevel: int) -> int:
    warn_user("not recorded", stacklevel)
    return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]


def test_it_stands_at_the_line_of_the_caller_or_further_up() -> None:
    with pytest.warns(RuntimeWarning, match="not recorded") as caught:  # noqa: PT031 - both lines are looked at
        inner = _within(1)
        _within(2)
    assert [one.filename for one in caught] == [__file__, __file__]
    assert caught[0].lineno == inner
    assert caught[1].lineno > inner  # in the test


def test_where_warnings_are_errors_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_user("not recorded", 1)
    assert [(record.name, record.message) for record in caplog.records] == [("gpudiag", "not recorded")]


def test_one_that_cannot_be_shown_is_lost() -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("I/O operation on closed file")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = fail
        warn_user("not recorded", 1)

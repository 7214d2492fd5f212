"""Wrong options are refused in one clear line, before any training."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from gpudiag.capture.schedule import Options, check_options
from gpudiag.capture.session import Session
from gpudiag.errors import UsageError


def test_what_is_given_is_kept_and_the_rest_has_defaults() -> None:
    found = check_options({"skip": 0, "at_steps": [30, 10, 30], "on_signal": signal.SIGUSR1, "on_slow": 0.3})
    assert found == Options(skip=0, at_steps=(10, 30), on_signal=int(signal.SIGUSR1), on_slow=0.3)
    assert check_options({"at_steps": 7}).at_steps == (7,)
    assert check_options({"at_steps": range(5, 7)}).at_steps == (5, 6)
    assert check_options({}) == Options()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"skip": -1}, "skip=-1 is not a number of steps"),
        ({"repeat": 1.0}, "repeat=1.0 is not a number of windows"),
        ({"max_windows": 0}, "at least 1"),
        ({"wait": None}, "wait=None"),
        ({"at_steps": (1, -2)}, "at_steps=(1, -2) are not step numbers"),
        ({"at_steps": "100"}, "at_steps='100'"),
        ({"at_steps": None}, "at_steps=None"),
        ({"at_steps": True}, "at_steps=True"),
        ({"on_signal": signal.SIGKILL}, "SIGUSR1"),
        ({"on_signal": signal.SIGTERM}, "SIGUSR1"),
        ({"on_signal": signal.SIGINT}, "SIGUSR1"),
        ({"on_signal": "SIGUSR1"}, "on_signal='SIGUSR1'"),
        ({"on_slow": 30}, "0.3 is 30 %"),
        ({"on_slow": 0.0}, "on_slow=0.0"),
        ({"on_slow": float("nan")}, "on_slow=nan"),
        ({"on_slow": True}, "on_slow=True"),
        ({"repeat": 9}, "raise max_windows"),
        ({"repeat": 0}, "leaves nothing to profile"),
        ({"recrod": 3}, "did you mean 'record'?"),
        ({"on_step": 3}, "did you mean 'at_steps'?"),
        ({"colour": "red"}, "it takes at_steps, "),
    ],
)
def test_wrong_ones_are_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [-1, "a", True, 1.0])
def test_a_wrong_rank_is_refused_in_one_line(rank: Any) -> None:
    with pytest.raises(UsageError, match="is not the rank of a process"):
        Session("run", rank=rank)

"""Machines of a run are told apart without the name of a host."""

from __future__ import annotations

import platform

import pytest

from gpudiag.capture.environment import name_node


def test_the_launcher_counts_machines() -> None:
    assert name_node(16, {"GROUP_RANK": "1", "RANK": "9", "LOCAL_RANK": "1"}) == "node 1"
    assert name_node(16, {"SLURM_NODEID": "3"}) == "node 3"


def test_a_run_of_one_process_has_one_machine() -> None:
    assert name_node(1, {"GROUP_RANK": "0"}) == ""


def test_without_a_launcher_a_digest_tells_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["alpha.secret.org", "alpha.secret.org", "beta.secret.org", ""])
    monkeypatch.setattr(platform, "node", lambda: next(names))
    first, same, other, none = (name_node(2, {}) for _ in range(4))
    assert first == same != other
    assert none == ""
    assert "alpha" not in first
    assert "secret" not in first


@pytest.mark.parametrize("text", ["", "first", "-1", "1" * 20, "\u0663", "0; rm"])
def test_what_is_no_number_is_not_taken_for_one(text: str) -> None:
    assert name_node(2, {"GROUP_RANK": text}).startswith("host ")

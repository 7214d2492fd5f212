"""What a check of `gpudiag doctor` is: what was found, what it costs, and what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "missing", "limited", "not applicable", "unknown"]
Need = Literal["core", "train", "gpu", "compile", "telemetry", "dashboard", "cluster"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    status: Status
    found: str
    """Version, path or figure; why, where it is not known or does not apply."""
    costs: str = ""
    """What does not work, or is not known, because of it."""
    fix: str = ""
    """One command or sentence."""
    needs: tuple[Need, ...] = ()
    """What fails with it: where it is missing; where it was asked for, also where it is not known or does not apply."""


def ok(name: str, found: str) -> Check:
    """Return that nothing is to be done."""
    return Check(name=name, status="ok", found=found)


def missing(name: str, found: str, costs: str, fix: str, *needs: Need) -> Check:
    """Return that something is not there, or does not work."""
    return Check(name=name, status="missing", found=found, costs=costs, fix=fix, needs=needs)


def limited(name: str, found: str, costs: str, fix: str) -> Check:
    """Return that something works, but not as well as it could."""
    return Check(name=name, status="limited", found=found, costs=costs, fix=fix)


def idle(name: str, why: str, *needs: Need) -> Check:
    """Return that there is nothing to check."""
    return Check(name=name, status="not applicable", found=why, needs=needs)


def unknown(name: str, why: str, fix: str = "", *needs: Need) -> Check:
    """Return that it could not be found out."""
    return Check(name=name, status="unknown", found=why, fix=fix, needs=needs)

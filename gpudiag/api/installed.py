"""Versions of what is installed."""

from __future__ import annotations

from importlib import metadata


def version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

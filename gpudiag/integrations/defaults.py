"""The options of gpudiag.profile: which belong to the session and which to its standard parts, and what holds without them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from gpudiag.capture.launch import default_path
from gpudiag.capture.options import SESSION_OPTIONS, unknown
from gpudiag.capture.parts import Part
from gpudiag.capture.session import Session
from gpudiag.capture.standard import standard_parts
from gpudiag.hardware.peaks_cache import cached_peaks

AnyPath = str | os.PathLike[str]


def session_path(path: AnyPath) -> Path:
    """Return `path`, or the default one where it is empty: runs/<time>, the same for all ranks of one torchrun."""
    return Path(os.fspath(path)) if os.fspath(path) else default_path()


def session_options(options: Mapping[str, Any], what: str = "gpudiag.profile", more: Sequence[Part] = ()) -> dict[str, Any]:
    """Return the keyword arguments of a Session for the `options` given to `what`; the parts in `more` hear of events last.

    Without `parts` these are the standard ones, without `peaks` those measured before. Raises UsageError for an unknown option.
    """
    of_parts = signature(standard_parts).parameters.keys()
    for name in options:
        if name not in SESSION_OPTIONS and name not in of_parts:
            raise unknown(name, (*SESSION_OPTIONS, *of_parts), what)
    chosen = {"peaks": cached_peaks, **options}
    own = {name: chosen.pop(name) for name in of_parts & chosen.keys()}
    parts = chosen.pop("parts") if "parts" in chosen else standard_parts(**own)
    return {**chosen, "parts": [*parts, *more]}


def new_session(path: AnyPath, options: Mapping[str, Any], what: str, more: Sequence[Part] = ()) -> Session:
    """Return a session as gpudiag.profile(path, **options) makes it, with the parts in `more`. Raises UsageError."""
    return Session(session_path(path), **session_options(options, what, more))

"""Warnings of a training that goes on, whatever becomes of them."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress


def warn(text: str, stacklevel: int) -> None:
    """Return None; `text` is a RuntimeWarning at the line `stacklevel` frames up (1: that of the caller). Raises nothing.

    Under -W error, where a warning would stop the training, it is logged; where neither can be shown (a closed stderr, a showwarning of
    the program's own that fails), it is lost.
    """
    with suppress(Exception):
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
        except Warning:
            logging.getLogger("gpudiag").warning(text)

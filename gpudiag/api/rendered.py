"""What the results of the public functions have in common: they save, print and show themselves."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

AnyPath = str | os.PathLike[str]


class Rendered(ABC):
    """A result with its renderings; the methods of a subclass may take options."""

    @abstractmethod
    def text(self) -> str:
        """Return it for a terminal."""

    @abstractmethod
    def markdown(self) -> str:
        """Return it as GitHub Markdown."""

    @abstractmethod
    def html(self) -> str:
        """Return it as one self-contained HTML page."""

    @abstractmethod
    def json(self) -> bytes:
        """Return it as JSON."""

    def save(self, path: AnyPath) -> None:
        """Write it in the format that the suffix of `path` names: .html, .md or .json; the whole file or none of it.

        Raises UsageError for another suffix, InputError where the file cannot be written.
        """
        from gpudiag.report.files import save

        save(path, {".html": lambda: self.html().encode(), ".md": lambda: self.markdown().encode(), ".json": self.json})

    def __str__(self) -> str:
        return self.text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the text in an IPython terminal (and as a notebook's text/plain) instead of the object's address."""
        printer.text(f"gpudiag.{type(self).__name__}(...)" if cycle else self.text())

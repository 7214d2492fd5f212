"""The templates of HTML pages, and the policy that keeps a page from fetching anything."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: these scripts by their hashes (CSP level 2), inline styles, no request of any kind."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    allowed = hashes or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def asset(name: str) -> str:
    """Return the text of a file beside the templates."""
    return (files("gpudiag.report.html") / "templates" / name).read_text(encoding="utf-8")


@cache
def plotly_js() -> str:
    """Return plotly's script, about 5 MB."""
    from plotly.offline import get_plotlyjs

    # An HTML parser turns CR LF into LF; the hash is of what it sees.
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


@cache
def template(name: str) -> Template:
    """Return a template: values are escaped, a name that is not given is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(asset)
    )
    return environment.get_template(name)

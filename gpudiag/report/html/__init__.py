"""A report as one HTML file that needs no network: scripts and styles inside, nothing fetched, nothing evaluated from the trace."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from gpudiag.model.report import ReportData
from gpudiag.report.escape import json_for_script
from gpudiag.report.html.figures import roofline, roofline_note
from gpudiag.report.html.page import context

if TYPE_CHECKING:
    from jinja2 import Template


def render(report: ReportData) -> str:
    """Return the page. plotly.js (about 5 MB) is inside only where there is a figure to draw."""
    figure = roofline(report)
    scripts = [*([_plotly_js()] if figure else []), _asset("report.js")]
    return _template().render(
        **context(report),
        csp=_policy(scripts),
        css=_asset("report.css"),
        scripts=scripts,
        figure=json_for_script(figure) if figure else "",
        roofline_note=roofline_note(report),
    )


def _policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: these scripts by their hashes (CSP level 2), inline styles, no request of any kind."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def _asset(name: str) -> str:
    return (files("gpudiag.report.html") / "templates" / name).read_text(encoding="utf-8")


@cache
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    # An HTML parser turns CR LF into LF; the hash is of what it sees.
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("report.html.j2"))

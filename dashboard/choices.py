"""Links of which one is the present choice."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts


def choices(name: str, links: Sequence[tuple[str, str, bool]]) -> Component:
    """Return the choices under a name: (label, address, whether it is the present one) of each."""
    inside = [html.Span(parts.link(label, href, css="chosen" if chosen else ""), **_current(chosen)) for label, href, chosen in links]
    return html.Div([html.Span(name, className="name"), *inside], className="choices", role="group", **{"aria-label": name})


def _current(chosen: bool) -> dict[str, str]:
    return {"aria-current": "true"} if chosen else {}

"""Experiments as one HTML file that needs no network: the interval chart, every change with its figures, the recipe, what is missing."""

from __future__ import annotations

from typing import Any

from gpudiag.model.experiment import ExperimentData
from gpudiag.report.escape import clean, json_for_script, prose
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.figures import intervals
from gpudiag.report.experiment.page import context as outcomes_context
from gpudiag.report.html.templating import asset, plotly_js, policy, template

_LONGEST = 2_000


def html(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the page; plotly.js (about 5 MB) is inside only where there is a chart to draw. `bundle`: where experiments lie, if known."""
    figure = intervals(data.experiments)
    scripts = [*([plotly_js()] if figure else []), asset("report.js")]
    return template("experiment.html.j2").render(
        **_context(data, bundle),
        csp=policy(scripts),
        css=asset("report.css"),
        scripts=scripts,
        figure=json_for_script(figure) if figure else "",
        height=figure["layout"]["height"] if figure else 0,
    )


def _context(data: ExperimentData, bundle: str) -> dict[str, Any]:
    """Return the values of the page's template: every text is cleaned here, the template escapes it."""
    device = data.baseline.device if data.baseline else ""
    baseline = [(topic, clean(said, _LONGEST), topic == "command") for topic, said in summary.baseline_rows(data.baseline)]
    recipe = data.recipe
    return {
        "device": clean(device),
        "headline": prose(summary.headline(data)),
        "leads": [prose(said) for said in summary.leads(data, bundle)],
        "baseline": baseline,
        "as_is": summary.AS_IS[:1].upper() + summary.AS_IS[1:],
        "proved": recipe.proved,
        "changes": [(clean(item.fix), clean(item.title), _code(item.code)) for item in summary.changes(recipe)],
        "as_it_is": summary.as_it_is(data, bundle),
        "further": [_code(text) for text in summary.further(recipe)],
        "experiments": outcomes_context(data.experiments),
    }


def _code(text: str) -> str:
    return "\n".join(summary.code_lines(text))

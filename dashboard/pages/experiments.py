"""Experiments: choose a fix that a finding names, see the exact command, start and stop it, watch the pairs arrive, read the results."""

from __future__ import annotations

import atexit
import os
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import experiment_parts, jobs, orphans, parts, starting
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.recordings import Recordings
from gpudiag_dashboard.security import run_refusal
from gpudiag_dashboard.view import View

from gpudiag.api.offers import Offer
from gpudiag.api.trials import Series
from gpudiag.errors import GpudiagError
from gpudiag.report.experiment.summary import duration
from gpudiag.units import format_share

BUSY_MS, QUIET_MS = 2_000, 10_000
"""How often the folder is looked at while something runs, and else: an experiment may be started in a terminal too."""

MOST_LINES = 40

EXTENSION = "gpudiag_jobs"
"""Under this name the server keeps its jobs.Jobs."""

_COURSE = "The program is run as it is and with the change in turns, in 4 to 12 pairs of processes; that takes some minutes."
_BY_HAND = "What gpudiag fixes lists can still be tried in a terminal: gpudiag ab --fix ID."
_HIDDEN: dict[str, str] = {"display": "none"}
_SHOWN: dict[str, str] = {}
_ENDINGS = {
    0: "It has come to its end.",
    4: "It has come to its end: a change is faster, but does not train the same.",
    5: "It has ended: nothing could be measured.",
}
_STOPPED = {130, 143, -2, -15}


class Experiments:
    """The page, and the callbacks that start and stop."""

    path, title, needs_bundle, needs_analysis = "/experiments", "Experiments", True, True

    def layout(self, view: View) -> Component:
        """Return the places that the callbacks fill. Buttons stay while the rest changes: the keyboard must not lose them."""
        job = html.Div(
            [
                html.Div(id="experiments-job"),
                html.Button("Stop this experiment", id="experiments-stop", className="button stop", style=_HIDDEN),
                html.Div(id="experiments-stopped"),
                html.Div(id="experiments-log"),
            ],
            className="job",
        )
        start = html.Div(
            [
                html.Div(id="experiments-plan"),
                html.Button("Start this experiment", id="experiments-go", className="button", style=_HIDDEN),
                html.Div(id="experiments-answer"),
            ]
        )
        return html.Div(
            [
                html.H1("Experiments"),
                dcc.Interval(id="experiments-clock", interval=BUSY_MS),
                dcc.Store(id="experiments-digest"),
                dcc.Store(id="experiments-seen"),
                dcc.Store(id="experiments-begun"),
                job,
                start,
                html.Div(parts.quiet("Reading ..."), id="experiments-results"),
            ],
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks; the process that runs is ended with the dashboard."""
        recordings, running = Recordings(library), jobs.Jobs()
        app.server.extensions[EXTENSION] = running
        atexit.register(running.close)
        self._choose(app, library)
        self._begin(app, library, running)
        self._end(app, running)
        self._follow(app, library, recordings, running)

    def _choose(self, app: dash.Dash, library: Library) -> None:
        @app.callback(
            Output("experiments-plan", "children"), Output("experiments-go", "style"), Output("experiments-digest", "data"),
            Output("experiments-answer", "children", allow_duplicate=True), Input(ADDRESS, "search"), State(ADDRESS, "pathname"),
            prevent_initial_call="initial_duplicate",
        )  # fmt: skip
        def choose(search: str | None, pathname: str | None) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 4
            return (*_chosen(view, library), "")

    def _begin(self, app: dash.Dash, library: Library, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-answer", "children"), Output("experiments-begun", "data"), Input("experiments-go", "n_clicks"),
            State(ADDRESS, "search"), State(ADDRESS, "pathname"), State("experiments-digest", "data"), prevent_initial_call=True,
        )  # fmt: skip
        def begin(clicks: int | None, search: str | None, pathname: str | None, digest: str | None) -> tuple[Any, ...]:
            if not clicks:
                return no_update, no_update
            refused = run_refusal()
            if refused is not None:
                return parts.error(refused), no_update
            try:
                return "", started(library, running, View.parse(pathname, search), digest)
            except GpudiagError as error:
                return parts.error(error.message, error.hint or ""), no_update

    def _end(self, app: dash.Dash, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-stopped", "children"), Output("experiments-begun", "data", allow_duplicate=True),
            Input("experiments-stop", "n_clicks"), prevent_initial_call=True,
        )  # fmt: skip
        def end(clicks: int | None) -> tuple[Any, ...]:
            if not clicks:
                return no_update, no_update
            refused = run_refusal()
            if refused is not None:
                return parts.error(refused), no_update
            return ("" if running.stop() else parts.error("nothing runs any more")), clicks

    def _follow(self, app: dash.Dash, library: Library, recordings: Recordings, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-job", "children"), Output("experiments-stop", "style"), Output("experiments-log", "children"),
            Output("experiments-results", "children"), Output("experiments-seen", "data"), Output("experiments-clock", "interval"),
            Output("experiments-go", "disabled"),
            Input("experiments-clock", "n_intervals"), Input("experiments-begun", "data"),
            State(ADDRESS, "search"), State(ADDRESS, "pathname"), State("experiments-seen", "data"),
        )  # fmt: skip
        def follow(_: int | None, _begun: Any, search: str | None, pathname: str | None, seen: Any) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 7
            job = running.now()
            found, warnings = recordings.trials(view.bundle).read() if library.entry(view.bundle).kind == "bundle" else ((), ())
            now = _version(view, found, warnings)
            shown = no_update if seen == now else experiment_parts.results(found, _ceilings(library, view.bundle), warnings)
            taken = job is not None and job.status != "ended"
            busy = taken or any(not one.ended and not experiment_parts.silent(one) for one in found)
            return (*_job(job, view), shown, now, BUSY_MS if busy else QUIET_MS, taken)


def started(library: Library, running: jobs.Jobs, view: View, digest: str | None) -> float:
    """Return when the experiment was started that the view names. Raises GpudiagError where nothing was: see starting.checked."""
    made = starting.checked(library, view.bundle or "", view.query.get("fix", ""), digest or "")
    orphans.refuse()
    job = running.start(made.argv, bundle=view.bundle or "", fix=str(made.offer.call), shown=made.shown)
    return job.started_unix


def _version(view: View, found: tuple[Series, ...], warnings: tuple[str, ...]) -> list[Any]:
    """Return what changes when the results do."""
    told = [[one.name, one.changed_unix_ns, one.ended, experiment_parts.silent(one)] for one in found]
    return [view.bundle, told, list(warnings)]


def _ceilings(library: Library, name: str) -> dict[str, float | None]:
    return {str(offer.call): offer.ceiling_share for offer in starting.found_offers(library, name)}


# -- choosing ---------------------------------------------------------------------------------------------------------------


def _chosen(view: View, library: Library) -> tuple[Any, dict[str, str], str]:
    """Return the list of fixes with the plan of the chosen one, the style of the button, and the digest of the command."""
    found = starting.found_offers(library, view.bundle or "")
    if not found:
        return parts.empty("No finding of this recording names a fix", _BY_HAND), _HIDDEN, ""
    listed = parts.card("Fixes that the findings name", _listed(found, view))
    fix = view.query.get("fix", "")
    if not fix:
        return [listed, parts.quiet("Choose one to see what would be run.")], _HIDDEN, ""
    try:
        made = starting.plan(library, view.bundle or "", fix)
    except GpudiagError as error:
        return [listed, parts.error(error.message, error.hint or "")], _HIDDEN, ""
    refused = run_refusal()
    ready = not made.why_not and refused is None
    device = library.report(view.bundle or "").data.device
    shown = _plan(made, refused, on_gpu=device is not None and device.kind == "gpu")
    return [listed, shown], _SHOWN if ready else _HIDDEN, made.digest if ready else ""


def _listed(found: tuple[Offer, ...], view: View) -> Component:
    columns = [parts.Column("fix"), parts.Column("saves at most", numeric=True), parts.Column("named by")]
    rows = [_row(offer, view) for offer in found]
    return parts.table(columns, rows, "Fixes that the findings name, those that promise most first", css="few")


def _row(offer: Offer, view: View) -> list[parts.Cell | parts.Child]:
    told = [offer.fix.title]
    if offer.why_not:
        told.append(f"cannot be tried: {parts.text(offer.why_not, 400)}")
    elif view.query.get("fix") == offer.fix.id:
        told.append("chosen")
    name = parts.Cell(offer.fix.id, tuple(told), "" if offer.why_not else view.href(fix=offer.fix.id))
    ceiling = "unknown" if offer.ceiling_share is None else format_share(offer.ceiling_share)
    return [name, ceiling, parts.text("; ".join(offer.findings), 400)]


def _plan(made: starting.Plan, refused: str | None, *, on_gpu: bool) -> Component:
    """Return what would be run, word by word, and why it cannot be started from here where it cannot."""
    fix = made.offer.fix
    verified = " It was not verified on a GPU yet." if on_gpu and "gpu" not in fix.verified else ""
    inside: list[Component] = [
        html.P(f"{fix.title}. The change of the code:"),
        parts.code(fix.change),
        html.P(f"{_COURSE}{verified}"),
        parts.code(made.shown),
    ]
    if made.why_not:
        inside.append(parts.error(f"it cannot be started from here: {made.why_not}", made.hint))
    elif refused is not None:
        inside.append(parts.quiet(f"{refused[:1].upper()}{refused[1:]}. In a terminal, the command above does the same."))
    else:
        place = parts.text(os.getcwd(), 400)
        inside.append(parts.quiet(f"It runs the program that the recording names, on this machine, in {place}. Start only what you know."))
    return parts.card(f"Try {fix.id}", *inside, anchor="plan")


# -- the job ----------------------------------------------------------------------------------------------------------------


def _job(job: jobs.Job | None, view: View) -> tuple[Any, dict[str, str], Any]:
    """Return what is said of the job, the style of the button that stops it, and the end of its output."""
    if job is None:
        return "", _HIDDEN, ""
    where = [] if job.bundle == view.bundle else [" on ", parts.link(parts.text(job.bundle, 120), View(view.page, job.bundle).href())]
    head = html.P([html.Strong(job.fix), *where, f": {_status(job)}"], className="lead", role="status")
    return head, _HIDDEN if job.status == "ended" else _SHOWN, _log(job)


def _status(job: jobs.Job) -> str:
    if job.status == "running":
        return f"running for {duration(job.seconds)}."
    if job.status == "stopping":
        return "stopping: its processes are ended, what was measured is kept."
    return f"{_ending(job.exit_code)} It took {duration(job.seconds)}."


def _ending(code: int | None) -> str:
    if code in _STOPPED:
        return "It was stopped; what was measured until then is kept."
    failed = f"It failed (exit code {code}); what it said last stands below."
    return failed if code is None else _ENDINGS.get(code, failed)


def _log(job: jobs.Job) -> Component | str:
    """Return the last lines of its output, each harmless: a program's own words may be in them."""
    lines = [line for line in (parts.text(line, 500) for line in job.output.splitlines()) if line][-MOST_LINES:]
    if not lines:
        return ""
    shown = html.Pre("\n".join(lines), className="output", tabIndex=0)
    return html.Details([html.Summary("What it prints"), shown], open=job.status != "ended" or job.exit_code not in {0, *_STOPPED})


PAGE = Experiments()

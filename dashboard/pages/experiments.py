"""Experiments: choose a fix, see the command, start and stop it, watch the pairs arrive, read the results."""

from __future__ import annotations

import atexit
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import dash
import msgspec
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, jobs
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library, Recordings
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.security import explain_run_refusal

from gpudiag.api.candidates import Offer
from gpudiag.api.live_experiment import Series, Trial
from gpudiag.errors import GpudiagError
from gpudiag.model.experiment import Outcome
from gpudiag.report.experiment import summary, verdicts
from gpudiag.report.experiment.intervals import draw_intervals
from gpudiag.report.experiment.summary import format_duration
from gpudiag.report.experiment.verdicts import build_outcome_row
from gpudiag.units import format_share

MOST_ROWS = 60
MOST_SERIES = 20

SILENT_S = 600.0
"""A series that has written nothing for so long was ended, or measures something very slow: one pair takes a minute or two."""

_LABEL = "Throughput of each variant over that of the baseline, with its interval; the same figures stand in the table"
_NOTHING = "Choose a fix above, or type its command in a terminal: the pairs show up here as they come."
_MEMORY = "peak memory"
_COLUMNS = ("change", "verdict", "throughput", "upper bound and measured", "based on, or reason", "parity", _MEMORY, "break-even")


def build_results(found: Sequence[Series], ceilings: Mapping[str, float | None], warnings: Sequence[str]) -> list[Component]:
    """Return what runs, then all results together, then each call. `ceilings`: of fixes whose experiment knew none."""
    running = [one for one in found if not one.ended]
    ended = [one for one in found if one.ended]
    made = [_build_running(one, ceilings) for one in running]
    outcomes = [_add_promise(trial.outcome, ceilings) for one in ended for trial in one.trials]
    if outcomes:
        made.append(_build_all_outcomes(outcomes))
    if ended:
        made.append(components.build_card("Each call of gpudiag ab", *(_build_call(one) for one in ended[:MOST_SERIES])))
    if not found:
        made.append(components.build_empty("Nothing was tried on this recording yet", _NOTHING))
    return made + [components.build_quiet(components.clean_text(warning)) for warning in warnings]


def _add_promise(outcome: Outcome, ceilings: Mapping[str, float | None]) -> Outcome:
    """Return the outcome with the ceiling of the finding where the experiment was made without one."""
    if outcome.ceiling_share is not None or outcome.variant:
        return outcome
    return msgspec.structs.replace(outcome, ceiling_share=ceilings.get(outcome.fix))


def _build_all_outcomes(outcomes: Sequence[Outcome]) -> Component:
    figure = draw_intervals(outcomes)
    drawn = [] if figure is None else [_build_chart("experiments-intervals", figure)]
    shown = [found for group in verdicts.group_outcomes(outcomes) for found in group][:MOST_ROWS]
    more = [components.build_quiet(f"{len(outcomes) - MOST_ROWS} more are not shown.")] if len(outcomes) > MOST_ROWS else []
    legend = [components.build_quiet(components.clean_text(said)) for said in summary.format_experiments_legend(outcomes)]
    table = _build_outcome_table([(found, "") for found in shown], "Results of all experiments")
    return components.build_card(f"Results, against {summary.AS_IS}", *drawn, table, *more, *legend)


def is_silent(one: Series) -> bool:
    """Return whether a series without a result has written nothing for so long that it was probably ended."""
    return not one.ended and _measure_silence_s(one) > SILENT_S


def _measure_silence_s(one: Series) -> float:
    return time.time() - one.changed_unix_ns / 1e9


def _build_running(one: Series, ceilings: Mapping[str, float | None]) -> Component:
    """Return a series without a result: the pairs of each change so far. Before its end nothing has a verdict."""
    known = [
        (_make_undecided_outcome(trial, ceilings), "" if trial.over else f"{verdicts.format_pair_count(trial.outcome.pairs)} so far")
        for trial in one.trials
    ]
    figure = draw_intervals([outcome for outcome, _ in known])
    inside: list[Component] = [components.build_quiet(_format_progress(one))]
    if is_silent(one):
        gone = f"Nothing was written for {summary.format_duration(_measure_silence_s(one))}: it was ended, or takes very long."
        inside.append(html.P(f"{gone} gpudiag ab --resume goes on."))
    if figure is not None:
        inside.append(_build_chart(f"experiments-live-{_make_id(one.name)}", figure))
    if known:
        inside.append(_build_outcome_table(known, f"Pairs so far of {one.name}"))
    asked = ", ".join(one.fixes) or one.name
    title = f"Running: {asked}" if not is_silent(one) else f"Without a result: {asked}"
    return components.build_card(components.clean_text(title, 200), *inside, tone="info")


def _format_progress(one: Series) -> str:
    if one.trials:
        return "No verdict before the last pair."
    if one.data.baseline is None:
        return "The baseline runs once: its steps are found and timed."
    return "The first pair of processes is measured: baseline and variant, in turns."


def _make_undecided_outcome(trial: Trial, ceilings: Mapping[str, float | None]) -> Outcome:
    outcome = _add_promise(trial.outcome, ceilings)
    return outcome if trial.over else msgspec.structs.replace(outcome, verdict="inconclusive")


def _make_id(name: str) -> str:
    """Return a part of an id: a file's name may hold what ids may not."""
    return "".join(character for character in name if character.isalnum() or character == "-")[:60]


def _build_chart(identity: str, figure: dict[str, Any]) -> Component:
    layout = {**figure["layout"], "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    return components.build_figure(identity, {"data": figure["data"], "layout": layout}, _LABEL, style={"height": f"{layout['height']}px"})


def _build_outcome_table(found: Sequence[tuple[Outcome, str]], caption: str) -> Component:
    """Return the changes as a table; beside each an own word for its verdict, or ''."""
    columns = [components.Column(title, numeric=title == _MEMORY) for title in _COLUMNS]
    return components.build_table(
        columns, [_build_outcome_cells(outcome, verdict) for outcome, verdict in found], components.clean_text(caption, 200)
    )


def _build_outcome_cells(outcome: Outcome, verdict: str) -> list[components.Cell | components.Child]:
    made = build_outcome_row(outcome)
    told = html.B(components.clean_text(verdict or made.verdict), className=f"verdict {made.tone}")
    texts = (made.ratio, made.promised, made.told, made.parity, made.memory, made.pays_back)
    return [components.clean_text(made.name, 200), told, *(components.clean_text(text) for text in texts)]


def _build_call(one: Series) -> Component:
    """Return one call: what came out in a sentence, the command, the program as it is, notes and the recipe."""
    rows = [(topic, components.clean_text(said)) for topic, said in summary.build_baseline_rows(one.data.baseline)]
    leads = [html.P(components.clean_text(said)) for said in summary.list_leads(one.data)]
    recipe = [
        components.build_code("\n".join(summary.split_code_lines(change.code))) for change in summary.list_recipe_changes(one.data.recipe)
    ]
    asked = [components.build_code(components.clean_text(f"gpudiag ab ... {shlex.join(one.command)}"))] if one.command else []
    inside = [
        html.P(components.clean_text(summary.format_experiments_headline(one.data))),
        *leads,
        *recipe,
        *asked,
        components.build_terms(rows),
    ]
    title = f"{components.clean_text(one.name, 60)}: {components.clean_text(', '.join(one.fixes) or 'no change', 200)}"
    return html.Details([html.Summary(title), *inside])


BUSY_MS, QUIET_MS = 2_000, 10_000
"""How often the folder is looked at while something runs, and else: an experiment may be started in a terminal too."""

MOST_LINES = 40

EXTENSION = "gpudiag_jobs"
"""Under this name the server keeps its jobs.Jobs."""

_COURSE = "Baseline and variant run in turns, in 4 to 12 pairs of processes; that takes some minutes."
_BY_HAND = "What gpudiag fixes lists can still be tried in a terminal: gpudiag ab --fix ID."
_HIDDEN: dict[str, str] = {"display": "none"}
_SHOWN: dict[str, str] = {}
_ENDINGS = {
    0: "It has ended.",
    4: "It has ended: a variant is faster, but parity differs.",
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
                html.Div(components.build_quiet("Reading ..."), id="experiments-results"),
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
            return (*_build_choice(view, library), "")

    def _begin(self, app: dash.Dash, library: Library, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-answer", "children"), Output("experiments-begun", "data"), Input("experiments-go", "n_clicks"),
            State(ADDRESS, "search"), State(ADDRESS, "pathname"), State("experiments-digest", "data"), prevent_initial_call=True,
        )  # fmt: skip
        def begin(clicks: int | None, search: str | None, pathname: str | None, digest: str | None) -> tuple[Any, ...]:
            if not clicks:
                return no_update, no_update
            refused = explain_run_refusal()
            if refused is not None:
                return components.build_error(refused), no_update
            try:
                return "", start_experiment(library, running, View.parse(pathname, search), digest)
            except GpudiagError as error:
                return components.build_error(error.message, error.hint or ""), no_update

    def _end(self, app: dash.Dash, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-stopped", "children"), Output("experiments-begun", "data", allow_duplicate=True),
            Input("experiments-stop", "n_clicks"), prevent_initial_call=True,
        )  # fmt: skip
        def end(clicks: int | None) -> tuple[Any, ...]:
            if not clicks:
                return no_update, no_update
            refused = explain_run_refusal()
            if refused is not None:
                return components.build_error(refused), no_update
            return ("" if running.stop() else components.build_error("nothing runs any more")), clicks

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
            told = [[one.name, one.changed_unix_ns, one.ended, is_silent(one)] for one in found]
            now = [view.bundle, told, list(warnings)]
            shown = (
                no_update
                if seen == now
                else build_results(
                    found, {str(offer.call): offer.ceiling_share for offer in jobs.list_offers(library, view.bundle)}, warnings
                )
            )
            taken = job is not None and job.status != "ended"
            busy = taken or any(not one.ended and not is_silent(one) for one in found)
            return (*_build_job(job, view), shown, now, BUSY_MS if busy else QUIET_MS, taken)


def start_experiment(library: Library, running: jobs.Jobs, view: View, digest: str | None) -> float:
    """Return when the experiment was started that the view names. Raises GpudiagError where nothing was: see starting.checked."""
    made = jobs.check_run_plan(library, view.bundle or "", view.query.get("fix", ""), digest or "")
    jobs.refuse_second_run()
    job = running.start(made.argv, bundle=view.bundle or "", fix=str(made.offer.call), shown=made.shown)
    return job.started_unix


# -- choosing ---------------------------------------------------------------------------------------------------------------


def _build_choice(view: View, library: Library) -> tuple[Any, dict[str, str], str]:
    """Return the list of fixes with the plan of the chosen one, the style of the button, and the digest of the command."""
    found = jobs.list_offers(library, view.bundle or "")
    if not found:
        return components.build_empty("No finding of this recording names a fix", _BY_HAND), _HIDDEN, ""
    listed = components.build_card("Fixes that the findings name", _build_offer_list(found, view))
    fix = view.query.get("fix", "")
    if not fix:
        return [listed, components.build_quiet("Choose one to see what would be run.")], _HIDDEN, ""
    try:
        made = jobs.plan_run(library, view.bundle or "", fix)
    except GpudiagError as error:
        return [listed, components.build_error(error.message, error.hint or "")], _HIDDEN, ""
    refused = explain_run_refusal()
    ready = not made.why_not and refused is None
    device = library.report(view.bundle or "").data.device
    shown = _build_plan(made, refused, on_gpu=device is not None and device.kind == "gpu")
    return [listed, shown], _SHOWN if ready else _HIDDEN, made.digest if ready else ""


def _build_offer_list(found: tuple[Offer, ...], view: View) -> Component:
    columns = [components.Column("fix"), components.Column("upper bound", numeric=True), components.Column("named by")]
    rows = [_build_offer_row(offer, view) for offer in found]
    return components.build_table(columns, rows, "Fixes that the findings name, the largest upper bound first", css="few")


def _build_offer_row(offer: Offer, view: View) -> list[components.Cell | components.Child]:
    told = [offer.fix.title]
    if offer.why_not:
        told.append(f"cannot be tried: {components.clean_text(offer.why_not, 400)}")
    elif view.query.get("fix") == offer.fix.id:
        told.append("chosen")
    name = components.Cell(offer.fix.id, tuple(told), "" if offer.why_not else view.href(fix=offer.fix.id))
    ceiling = "unknown" if offer.ceiling_share is None else format_share(offer.ceiling_share)
    return [name, ceiling, components.clean_text("; ".join(offer.findings), 400)]


def _build_plan(made: jobs.RunPlan, refused: str | None, *, on_gpu: bool) -> Component:
    """Return what would be run, word by word, and why it cannot be started from here where it cannot."""
    fix = made.offer.fix
    verified = " It was not verified on a GPU yet." if on_gpu and "gpu" not in fix.verified else ""
    inside: list[Component] = [
        html.P(f"{fix.title}. The change of the code:"),
        components.build_code(fix.change),
        html.P(f"{_COURSE}{verified}"),
        components.build_code(made.shown),
    ]
    if made.why_not:
        inside.append(components.build_error(f"it cannot be started from here: {made.why_not}", made.hint))
    elif refused is not None:
        inside.append(components.build_quiet(f"{refused[:1].upper()}{refused[1:]}. In a terminal, the command above does the same."))
    else:
        place = components.clean_text(os.getcwd(), 400)
        inside.append(
            components.build_quiet(f"It runs the program that the recording names, on this machine, in {place}. Start only what you know.")
        )
    return components.build_card(f"Try {fix.id}", *inside, anchor="plan")


# -- the job ----------------------------------------------------------------------------------------------------------------


def _build_job(job: jobs.Job | None, view: View) -> tuple[Any, dict[str, str], Any]:
    """Return what is said of the job, the style of the button that stops it, and the end of its output."""
    if job is None:
        return "", _HIDDEN, ""
    where = (
        []
        if job.bundle == view.bundle
        else [" on ", components.build_link(components.clean_text(job.bundle, 120), View(view.page, job.bundle).href())]
    )
    head = html.P([html.Strong(job.fix), *where, f": {_format_status(job)}"], className="lead", role="status")
    return head, _HIDDEN if job.status == "ended" else _SHOWN, _build_log(job)


def _format_status(job: jobs.Job) -> str:
    if job.status == "running":
        return f"running for {format_duration(job.seconds)}."
    if job.status == "stopping":
        return "stopping: its processes are ended, what was measured is saved."
    return f"{_format_ending(job.exit_code)} It took {format_duration(job.seconds)}."


def _format_ending(code: int | None) -> str:
    if code in _STOPPED:
        return "It was stopped; what was measured until then is saved."
    failed = f"It failed (exit code {code}); what it said last stands below."
    return failed if code is None else _ENDINGS.get(code, failed)


def _build_log(job: jobs.Job) -> Component | str:
    """Return the last lines of its output, each harmless: a program's own words may be in them."""
    lines = [line for line in (components.clean_text(line, 500) for line in job.output.splitlines()) if line][-MOST_LINES:]
    if not lines:
        return ""
    shown = html.Pre("\n".join(lines), className="output", tabIndex=0)
    return html.Details([html.Summary("What it prints"), shown], open=job.status != "ended" or job.exit_code not in {0, *_STOPPED})


PAGE = Experiments()

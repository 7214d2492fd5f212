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
from gpudiag_dashboard.components import View, build_quiet, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.security import explain_run_refusal

from gpudiag.errors import GpudiagError
from gpudiag.experiment import offers
from gpudiag.experiment.live import Series
from gpudiag.model.experiment import Outcome
from gpudiag.report.blocks import PAGE as PAGE_AMOUNT
from gpudiag.report.blocks import Cell, Column, Row, Table, build_row
from gpudiag.report.console import split_code_lines
from gpudiag.report.experiment import summary, verdicts
from gpudiag.report.experiment.intervals import draw_intervals
from gpudiag.report.labels import capitalize
from gpudiag.units import format_share

MOST_ROWS = 60

_NOTHING = "The pairs of an experiment show up here as they come, also of one that was started in a terminal."


def build_results(series: Sequence[Series], ceilings: Mapping[str, float | None], warnings: Sequence[str]) -> list[Component]:
    """Return all results together, then each call. `ceilings`: of fixes whose experiment knew none."""
    ended = [one for one in series if one.ended]
    made: list[Component] = []
    outcomes = [_add_ceiling(trial.outcome, ceilings) for one in ended for trial in one.trials]
    if outcomes:
        figure = draw_intervals(outcomes)
        shown = [outcome for group in verdicts.group_outcomes(outcomes) for outcome in group][:MOST_ROWS]
        made.append(
            components.build_card(
                f"Results, against {summary.AS_IS}",
                None if figure is None else _build_chart("experiments-intervals", figure),
                _build_outcome_table(shown, "Results of all experiments"),
                build_quiet(f"{len(outcomes) - MOST_ROWS} more are not shown.") if len(outcomes) > MOST_ROWS else None,
                *(build_quiet(clean_text(line)) for line in summary.format_experiments_legend(outcomes)),
            )
        )
    calls = []
    for one in ended[:20]:  # what came out in a sentence, the recipe, the command, and the program as it is
        title = f"{clean_text(one.name, 60)}: {clean_text(', '.join(one.fixes) or 'no change', 200)}"
        recipe = ["\n".join(split_code_lines(change.code)) for change in summary.list_recipe_changes(one.data.recipe)]
        command = [clean_text(f"gpudiag ab ... {shlex.join(one.command)}")] if one.command else []
        inside = [
            html.P(clean_text(summary.format_experiments_headline(one.data))),
            *(html.P(clean_text(line)) for line in summary.list_leads(one.data)),
            *map(components.build_code, (*recipe, *command)),
            components.build_terms([(topic, clean_text(text)) for topic, text in summary.build_baseline_rows(one.data.baseline)]),
        ]
        calls.append(html.Details([html.Summary(title), *inside]))
    if calls:
        made.append(components.build_card("Each call of gpudiag ab", *calls))
    if not series:
        made.append(components.build_empty("Nothing was tried on this recording yet", _NOTHING))
    return made + [build_quiet(clean_text(warning)) for warning in warnings]


def build_news(series: Sequence[Series], ceilings: Mapping[str, float | None]) -> list[Component]:
    """Return the plain verdict on each change whose experiment has ended, what is proved first, then what runs."""
    outcomes = [trial.outcome for one in series if one.ended for trial in one.trials]
    told = components.build_blocks(summary.build_verdicts(outcomes), View())
    return told + [_build_running(one, ceilings) for one in series if not one.ended]


def _add_ceiling(outcome: Outcome, ceilings: Mapping[str, float | None]) -> Outcome:
    if outcome.ceiling_share is not None or outcome.variant:
        return outcome
    return msgspec.structs.replace(outcome, ceiling_share=ceilings.get(outcome.fix))


def is_silent(one: Series) -> bool:
    """Return whether a series has no result, and nothing measures any more."""
    return not one.ended and not one.alive


def _build_running(one: Series, ceilings: Mapping[str, float | None]) -> Component:
    """Return a series without a result: the pairs of each change so far. Before its end nothing has a verdict."""
    over = [_add_ceiling(trial.outcome, ceilings) for trial in one.trials if trial.over]
    measured = [
        msgspec.structs.replace(_add_ceiling(trial.outcome, ceilings), verdict="inconclusive") for trial in one.trials if not trial.over
    ]
    known = [*over, *measured]
    figure = draw_intervals(known)
    silent = is_silent(one)
    if silent:
        silence = summary.format_duration(time.time() - one.changed_unix_ns / 1e9)
        found = "what it found stands below" if known else "nothing was measured"
        progress = f"It ended {silence} ago before its plan was done; {found}. gpudiag ab --resume goes on."
    elif measured:
        ranges = "; ".join(verdicts.format_so_far(outcome) for outcome in measured)
        progress = f"So far: {ranges}. No verdict before the last pair."
    elif one.data.baseline is None:
        progress = "The baseline runs once: its steps are found and timed."
    else:
        progress = "The first pair of processes is measured: baseline and variant, in turns."
    proved = [outcome for outcome in over if verdicts.is_proof(outcome)]
    inside: list[Component] = [*components.build_blocks(summary.build_verdicts(proved), View()), html.P(clean_text(progress))]
    if figure is not None:
        identity = "".join(letter for letter in one.name if letter.isalnum() or letter == "-")[:60]  # ids may hold no others
        inside.append(_build_chart(f"experiments-live-{identity}", figure))
    if known:
        caption = f"Pairs so far of {one.name}"
        ranked = [outcome for group in verdicts.group_outcomes(over) for outcome in group]
        inside += [_build_outcome_table(ranked, caption)] if over else []
        inside += [_build_outcome_table([outcome], caption, _count_pairs(outcome)) for outcome in measured]
    title = f"{'Not complete' if silent else 'Running'}: {', '.join(one.fixes) or one.name}"
    return components.build_card(clean_text(title, 200), *inside, tone="info")


def _build_chart(identity: str, figure: dict[str, Any]) -> Component:
    layout = {**figure["layout"], "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    return components.build_figure(
        identity, {"data": figure["data"], "layout": layout}, summary.CHART_LABEL, style={"height": f"{layout['height']}px"}
    )


def _count_pairs(outcome: Outcome) -> str:
    return f"{verdicts.format_pair_count(outcome.pairs)} so far"


def _build_outcome_table(outcomes: Sequence[Outcome], caption: str, verdict: str = "") -> Component:
    table = summary.build_outcomes_table(outcomes, PAGE_AMOUNT, verdict=verdict)
    return components.build_table(msgspec.structs.replace(table, caption=clean_text(caption, 200)), View(), css="outcomes")


BUSY_MS, QUIET_MS = 2_000, 10_000
"""How often the folder is looked at while something runs, and else: an experiment may be started in a terminal too."""

EXTENSION = "gpudiag_jobs"

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
                html.Div(id="experiments-news"),
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
        running = jobs.Jobs()
        app.server.extensions[EXTENSION] = running
        atexit.register(running.close)

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

        self._register_buttons(app, library, running)
        self._follow(app, library, running)

    def _register_buttons(self, app: dash.Dash, library: Library, running: jobs.Jobs) -> None:
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
            view = View.parse(pathname, search)
            bundle = view.bundle or ""
            try:
                plan = jobs.check_run_plan(library, bundle, view.query.get("fix", ""), digest or "")
                return "", running.start(plan.argv, bundle=bundle, fix=str(plan.offer.call), shown=plan.shown).started_unix
            except GpudiagError as error:
                return components.build_error(error.message, error.hint or ""), no_update

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
            return ("" if running.stop() else build_quiet("Nothing runs any more.")), clicks

    def _follow(self, app: dash.Dash, library: Library, running: jobs.Jobs) -> None:
        @app.callback(
            Output("experiments-job", "children"), Output("experiments-stop", "style"), Output("experiments-log", "children"),
            Output("experiments-results", "children"), Output("experiments-seen", "data"), Output("experiments-clock", "interval"),
            Output("experiments-go", "disabled"), Output("experiments-news", "children"),
            Input("experiments-clock", "n_intervals"), Input("experiments-begun", "data"),
            State(ADDRESS, "search"), State(ADDRESS, "pathname"), State("experiments-seen", "data"),
        )  # fmt: skip
        def follow(_: int | None, _begun: Any, search: str | None, pathname: str | None, seen: Any) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 8
            job = running.now()
            kind = library.entry(view.bundle).kind
            series, warnings = library.trials(view.bundle).read() if kind in ("bundle", "experiments") else ((), ())
            stamps = [[one.name, one.changed_unix_ns, one.ended, is_silent(one)] for one in series]
            now, shown, told = [view.bundle, stamps, list(warnings)], no_update, no_update
            if seen != now:
                named = offers.list_offers(library.report(view.bundle).data) if kind != "experiments" else []
                ceilings = {str(offer.call): offer.ceiling_share for offer in named}
                told, shown = build_news(series, ceilings), build_results(series, ceilings, warnings)
            taken = job is not None and job.status != "ended"
            busy = taken or any(not one.ended and not is_silent(one) for one in series)
            return (*_build_job(job, view), shown, now, BUSY_MS if busy else QUIET_MS, taken, told)


def _build_choice(view: View, library: Library) -> tuple[Any, dict[str, str], str]:
    if library.entry(view.bundle or "").kind == "experiments":  # results alone: no finding names a fix
        return "", _HIDDEN, ""
    report = library.report(view.bundle or "").data
    named = offers.list_offers(report)
    if not named:
        return components.build_empty("No finding of this recording names a fix", _BY_HAND), _HIDDEN, ""
    fix = view.query.get("fix", "")
    rows: list[Row] = []
    for offer in named:
        state = f"cannot be tried: {offer.why_not}" if offer.why_not else "chosen" if fix == offer.fix.id else ""
        link = None if offer.why_not else ("href", view.href(fix=offer.fix.id))
        name = Cell(offer.fix.id, None, (offer.fix.title, state), link=link)
        ceiling = "unknown" if offer.ceiling_share is None else format_share(offer.ceiling_share)
        rows.append(build_row(name, Cell(ceiling, offer.ceiling_share), "; ".join(offer.findings)))
    bound = Column("finding's bound", "number", "upper bound of the finding that names it: several fixes may share it")
    columns = (Column("fix"), bound, Column("named by"))
    caption = "Fixes that the findings name, the largest bound of a finding first"
    table = components.build_table(Table(columns, tuple(rows), caption), view, css="few")
    card = components.build_card("Fixes that the findings name", table)
    if not fix:
        return [card, build_quiet("Choose one to see what would be run.")], _HIDDEN, ""
    try:
        plan = jobs.plan_run(library, view.bundle or "", fix)
    except GpudiagError as error:
        return [card, _build_refusal(error.message, error.hint or "")], _HIDDEN, ""
    refused = explain_run_refusal()
    shown = _build_plan(plan, refused, on_gpu=report.device is not None and report.device.kind == "gpu")
    if plan.why_not or refused is not None:
        return [card, shown], _HIDDEN, ""
    return [card, shown], _SHOWN, plan.digest


def _build_refusal(why: str, hint: str) -> Component:
    """Return why something is not started here: a normal state, which no alarm is raised for."""
    return html.P(clean_text(f"{capitalize(why)}{f' ({hint})' if hint else ''}."))


def _build_plan(plan: jobs.RunPlan, refused: str | None, *, on_gpu: bool) -> Component:
    fix = plan.offer.fix
    verified = " It was not verified on a GPU yet." if on_gpu and "gpu" not in fix.verified else ""
    if plan.why_not:
        last = _build_refusal(f"it cannot be started from here: {plan.why_not}", plan.hint)
    elif refused is not None:
        last = build_quiet(f"{capitalize(refused)}. In a terminal, the command above does the same.")
    else:
        place = clean_text(os.getcwd(), 400)
        last = build_quiet(f"It runs the program that the recording names, on this machine, in {place}. Start only what you know.")
    return components.build_card(
        f"Try {fix.id}",
        html.P(f"{fix.title}. The change of the code:"),
        components.build_copied("change", fix.change),
        html.P(f"{_COURSE}{verified}"),
        components.build_copied("test", plan.shown),
        last,
        anchor="plan",
    )


def _build_job(job: jobs.Job | None, view: View) -> tuple[Any, dict[str, str], Any]:
    if job is None:
        return "", _HIDDEN, ""
    ended, code = job.status == "ended", job.exit_code
    took = summary.format_duration(job.seconds)
    if job.status == "running":
        status = f"running for {took}."
    elif job.status == "stopping":
        status = "stopping: its processes are ended, what was measured is saved."
    elif code in _STOPPED:
        status = f"It was stopped; what was measured until then is saved. It took {took}."
    else:
        failed = f"It failed (exit code {code}); what it said last stands below."
        status = f"{failed if code is None else _ENDINGS.get(code, failed)} It took {took}."
    where = []
    if job.bundle != view.bundle:
        where = [" on ", components.build_link(clean_text(job.bundle, 120), View(view.page, job.bundle).href())]
    head = html.P([html.Strong(job.fix), *where, f": {status}"], className="lead", role="status")
    # The last lines of its output, each harmless: a program's own words may be in them
    lines = [line for line in (clean_text(line, 500) for line in job.output.splitlines()) if line][-40:]
    log: Any = ""
    if lines:
        output = html.Pre("\n".join(lines), className="output", tabIndex=0)
        log = html.Details([html.Summary("What it prints"), output], open=not ended or code not in {0, *_STOPPED})
    return head, _HIDDEN if ended else _SHOWN, log


PAGE = Experiments()

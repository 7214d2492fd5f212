"""Experiments as parts of a page: those that run with the pairs so far, all results with their intervals, each call by itself."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts

from gpudiag.api.trials import Series, Trial
from gpudiag.model.experiment import Outcome
from gpudiag.report.experiment import summary, words
from gpudiag.report.experiment.figures import intervals
from gpudiag.report.experiment.rows import row

MOST_ROWS = 60
MOST_SERIES = 20

SILENT_S = 600.0
"""A series that has written nothing for so long was ended, or measures something very slow: one pair takes a minute or two."""

_LABEL = "Throughput of each change over that of the program as it is, with its interval; the same figures stand in the table"
_NOTHING = "Choose a fix above, or type its command in a terminal: the pairs show up here as they come."
_MEMORY = "peak memory"
_COLUMNS = ("change", "verdict", "throughput", "promised and measured", "rests on, or reason", "trains the same?", _MEMORY, "pays back")


def results(found: Sequence[Series], ceilings: Mapping[str, float | None], warnings: Sequence[str]) -> list[Component]:
    """Return what runs, then all results together, then each call. `ceilings`: of fixes whose experiment knew none."""
    running = [one for one in found if not one.ended]
    ended = [one for one in found if one.ended]
    made = [_running(one, ceilings) for one in running]
    outcomes = [_promised(trial.outcome, ceilings) for one in ended for trial in one.trials]
    if outcomes:
        made.append(_together(outcomes))
    if ended:
        made.append(parts.card("Each call of gpudiag ab", *(_call(one) for one in ended[:MOST_SERIES])))
    if not found:
        made.append(parts.empty("Nothing was tried on this recording yet", _NOTHING))
    return made + [parts.quiet(parts.text(warning)) for warning in warnings]


def _promised(outcome: Outcome, ceilings: Mapping[str, float | None]) -> Outcome:
    """Return the outcome with the ceiling of the finding where the experiment was made without one."""
    if outcome.ceiling_share is not None or outcome.variant:
        return outcome
    return msgspec.structs.replace(outcome, ceiling_share=ceilings.get(outcome.fix))


def _together(outcomes: Sequence[Outcome]) -> Component:
    figure = intervals(outcomes)
    drawn = [] if figure is None else [_chart("experiments-intervals", figure)]
    shown = [found for group in words.groups(outcomes) for found in group][:MOST_ROWS]
    more = [parts.quiet(f"{len(outcomes) - MOST_ROWS} more are not shown.")] if len(outcomes) > MOST_ROWS else []
    legend = [parts.quiet(parts.text(said)) for said in summary.legend(outcomes)]
    table = _table([(found, "") for found in shown], "Results of all experiments")
    return parts.card(f"Results, against {summary.AS_IS}", *drawn, table, *more, *legend)


def silent(one: Series) -> bool:
    """Return whether a series without a result has written nothing for so long that it was probably ended."""
    return not one.ended and _silent_s(one) > SILENT_S


def _silent_s(one: Series) -> float:
    return time.time() - one.changed_unix_ns / 1e9


def _running(one: Series, ceilings: Mapping[str, float | None]) -> Component:
    """Return a series without a result: the pairs of each change so far. Before its end nothing has a verdict."""
    known = [(_undecided(trial, ceilings), "" if trial.over else f"{words.pairs_text(trial.outcome.pairs)} so far") for trial in one.trials]
    figure = intervals([outcome for outcome, _ in known])
    inside: list[Component] = [parts.quiet(_progress(one))]
    if silent(one):
        gone = f"Nothing was written for {summary.duration(_silent_s(one))}: it was ended, or takes very long."
        inside.append(html.P(f"{gone} gpudiag ab --resume goes on."))
    if figure is not None:
        inside.append(_chart(f"experiments-live-{_identity(one.name)}", figure))
    if known:
        inside.append(_table(known, f"Pairs so far of {one.name}"))
    asked = ", ".join(one.fixes) or one.name
    title = f"Running: {asked}" if not silent(one) else f"Without a result: {asked}"
    return parts.card(parts.text(title, 200), *inside, tone="info")


def _progress(one: Series) -> str:
    if one.trials:
        return "No verdict is told before the last pair."
    if one.data.baseline is None:
        return "The program runs once as it is: its steps are found, and how long they take."
    return "The first pair of processes is measured: the program as it is and changed, in turns."


def _undecided(trial: Trial, ceilings: Mapping[str, float | None]) -> Outcome:
    outcome = _promised(trial.outcome, ceilings)
    return outcome if trial.over else msgspec.structs.replace(outcome, verdict="inconclusive")


def _identity(name: str) -> str:
    """Return a part of an id: a file's name may hold what ids may not."""
    return "".join(character for character in name if character.isalnum() or character == "-")[:60]


def _chart(identity: str, figure: dict[str, Any]) -> Component:
    layout = {**figure["layout"], "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    return parts.figure(identity, {"data": figure["data"], "layout": layout}, _LABEL, style={"height": f"{layout['height']}px"})


def _table(found: Sequence[tuple[Outcome, str]], caption: str) -> Component:
    """Return the changes as a table; beside each an own word for its verdict, or ''."""
    columns = [parts.Column(title, numeric=title == _MEMORY) for title in _COLUMNS]
    return parts.table(columns, [_cells(outcome, verdict) for outcome, verdict in found], parts.text(caption, 200))


def _cells(outcome: Outcome, verdict: str) -> list[parts.Cell | parts.Child]:
    made = row(outcome)
    told = html.B(parts.text(verdict or made.verdict), className=f"verdict {made.tone}")
    texts = (made.ratio, made.promised, made.told, made.parity, made.memory, made.pays_back)
    return [parts.text(made.name, 200), told, *(parts.text(text) for text in texts)]


def _call(one: Series) -> Component:
    """Return one call: what came out in a sentence, the command, the program as it is, notes and the recipe."""
    rows = [(topic, parts.text(said)) for topic, said in summary.baseline_rows(one.data.baseline)]
    leads = [html.P(parts.text(said)) for said in summary.leads(one.data)]
    recipe = [parts.code("\n".join(summary.code_lines(change.code))) for change in summary.changes(one.data.recipe)]
    asked = [parts.code(parts.text(f"gpudiag ab ... {shlex.join(one.command)}"))] if one.command else []
    inside = [html.P(parts.text(summary.headline(one.data))), *leads, *recipe, *asked, parts.terms(rows)]
    title = f"{parts.text(one.name, 60)}: {parts.text(', '.join(one.fixes) or 'no change', 200)}"
    return html.Details([html.Summary(title), *inside])

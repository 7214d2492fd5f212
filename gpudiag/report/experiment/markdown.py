"""Experiments as GitHub Markdown: the same content as the terminal's, for issues and pull requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.report.escape import code
from gpudiag.report.escape import markdown as escaped
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.rows import Row, rows

_HEADER = ("change", "verdict", "throughput", "rests on, or reason", "trains the same?", "peak memory", "pays back")
_TITLE = f"Experiments: changes measured against {summary.AS_IS}"


def markdown(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the experiments as Markdown; `bundle`: where they lie, if known."""
    blocks = [
        "# gpudiag ab",
        f"**{escaped(summary.headline(data))}**",
        *(escaped(said) for said in summary.leads(data, bundle)),
        section(data.experiments),
        "\n\n".join(_recipe(data, bundle)),
        _baseline(data),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def section(outcomes: Sequence[Outcome]) -> str:
    """Return the experiments of a report, '' where there are none."""
    if not outcomes:
        return ""
    found = rows(outcomes)
    parts = [f"## {_TITLE}", _table(found), _details(found), "\n\n".join(escaped(said) for said in summary.legend(outcomes))]
    return "\n\n".join(part for part in parts if part)


def _table(found: Sequence[Row]) -> str:
    lines = [_line(_HEADER), _line(["---"] * len(_HEADER))]
    for row in found:
        name = code(row.name, cell=True)
        verdict = f"**{escaped(row.verdict)}**" if row.tone != "weak" else escaped(row.verdict)
        others = (row.ratio, row.told, row.parity, row.memory, row.pays_back)
        lines.append(_line([name, verdict, *map(escaped, others)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _details(found: Sequence[Row]) -> str:
    """Return what the table has no room for: what was promised, evidence, notes."""
    told = [(row.name, [text for text in (row.promised, *row.more) if text]) for row in found]
    lines = [f"- {code(name)}: {escaped(said)}" for name, texts in told for said in texts]
    return "\n".join(lines)


def _recipe(data: ExperimentData, bundle: str) -> Iterator[str]:
    recipe = data.recipe
    if not recipe.fixes and not recipe.changes:
        return
    yield "## Recipe" if recipe.proved else "## Recipe (not proved)"
    for change in summary.changes(recipe):
        yield f"{code(change.fix)}{f': {escaped(change.title)}' if change.title else ''}"
        if change.code:
            yield _fenced(change.code)
    for text in summary.further(recipe):
        yield _fenced(text)
    yield escaped(summary.as_it_is(data, bundle))


def _fenced(text: str) -> str:
    """Return a block of code that no run of backticks in it can end."""
    lines = summary.code_lines(text)
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    language = "diff" if any(line.startswith(("+++ ", "@@ ")) for line in lines) else "python"
    return "\n".join((f"{fence}{language}", *lines, fence))


def _baseline(data: ExperimentData) -> str:
    found = summary.baseline_rows(data.baseline)
    if not found:
        return ""
    lines = [f"- {topic}: {code(said) if topic == 'command' else escaped(said)}" for topic, said in found]
    return f"## {summary.AS_IS[:1].upper()}{summary.AS_IS[1:]}\n\n" + "\n".join(lines)

"""A check as JUnit XML, which CI systems show as a table of tests (schema: github.com/testmoapp/junitxml)."""

from __future__ import annotations

from xml.etree import ElementTree

from gpudiag.model.gates import CheckData, GateResult
from gpudiag.report.escape import clean
from gpudiag.report.gates_text import told

_LONGEST = 4_000


def render(found: CheckData) -> bytes:
    """Return the XML (UTF-8): failed gates are failures, unknown ones errors, or skipped where they are not required.

    Characters that XML 1.0 forbids are taken out; the serialiser escapes the rest.
    """
    suite = ElementTree.Element("testsuite", {"name": "gpudiag check", "tests": str(len(found.results)), **_counts(found)})
    for result in found.results:
        suite.append(_case(found, result))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    xml: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


def _counts(found: CheckData) -> dict[str, str]:
    kinds = [_kind(result) for result in found.results]
    return {"failures": str(kinds.count("failure")), "errors": str(kinds.count("error")), "skipped": str(kinds.count("skipped"))}


def _kind(result: GateResult) -> str:
    """Return the element that tells the outcome, '' for passed; what is within noise passes, and its output says so."""
    if result.outcome == "failed":
        return "failure"
    if result.outcome == "unknown":
        return "error" if result.required else "skipped"
    return ""


def _case(found: CheckData, result: GateResult) -> ElementTree.Element:
    message = clean(told(result), _LONGEST)
    case = ElementTree.Element("testcase", classname="gpudiag.check", name=clean(result.name))
    if kind := _kind(result):
        element = ElementTree.SubElement(case, kind, message=message)
        element.text = clean(f"{found.path}: {message}", _LONGEST)
    else:
        ElementTree.SubElement(case, "system-out").text = message
    return case

"""Requests that no page of the dashboard sends get a short answer of kind 400, never a traceback."""

from __future__ import annotations

import json
import logging
from typing import Any

import dash
import flask
from dash.exceptions import DependencyException, InvalidResourceError
from werkzeug.exceptions import HTTPException

CALLBACKS = "/_dash-update-component"

_NO_SUCH_FILE = (DependencyException, InvalidResourceError)
"""What Dash raises where somebody asks for a script that belongs to no component."""

_log = logging.getLogger("gpudiag.dashboard")


def protect(server: flask.Flask, app: dash.Dash) -> None:
    """Refuse malformed callbacks before Dash reads them, and answer every failure with one line."""

    @server.before_request
    def check() -> flask.Response | None:
        if flask.request.path != CALLBACKS or flask.request.method != "POST":
            return None
        fault = _fault(_body(), app)
        return None if fault is None else flask.Response(f"gpudiag: {fault}\n", 400, mimetype="text/plain")

    @server.errorhandler(Exception)
    def failed(error: Exception) -> flask.Response:
        if isinstance(error, HTTPException) and error.code is not None:
            return flask.Response(f"gpudiag: {error.name}\n", error.code, mimetype="text/plain")
        if isinstance(error, _NO_SUCH_FILE):
            return flask.Response("gpudiag: Not Found\n", 404, mimetype="text/plain")
        _log.error("a request failed: %s %s", flask.request.method, flask.request.path, exc_info=error)
        return flask.Response(f"gpudiag: internal error ({type(error).__name__})\n", 500, mimetype="text/plain")


def _body() -> Any:
    """Return the request's JSON, None where it is none that could be written again."""
    try:
        body = flask.request.get_json(silent=True)
        json.dumps(body, ensure_ascii=False).encode()
    except (RecursionError, UnicodeEncodeError):  # nested deeper than any value of ours, or half a character that nothing can write
        return None
    return body


def _fault(body: Any, app: dash.Dash) -> str | None:
    """Return what is wrong with the request for a callback, None where it has the form that Dash's own script sends."""
    if not isinstance(body, dict):
        return "no JSON object"
    if not isinstance(body.get("output"), str) or body["output"] not in app.callback_map:
        return "no such callback"
    wanted = app.callback_map[body["output"]]
    for part in ("inputs", "state"):
        given = body.get(part, [])
        if not isinstance(given, list) or len(given) != len(wanted[part]) or not all(map(_fits, given, wanted[part])):
            return f"the {part} are not those of that callback"
    if not _are_outputs(body.get("outputs"), body["output"]) or not _are_texts(body.get("changedPropIds", [])):
        return "the outputs or changed properties are malformed"
    return None


def _fits(given: Any, wanted: dict[str, str]) -> bool:
    """Return whether one value of a request is the one that the callback asks for; of a pattern ('{...}') all values that match it."""
    if wanted["id"].startswith("{"):
        several = given if isinstance(given, list) else [given]
        return all(_is_place(item) and item["property"] == wanted["property"] for item in several)
    return _is_place(given) and (given["id"], given["property"]) == (wanted["id"], wanted["property"])


def _is_place(item: Any) -> bool:
    """Return whether this names a property of a component, as plain text or (of a pattern) by an object."""
    return isinstance(item, dict) and isinstance(item.get("id"), str | dict) and isinstance(item.get("property"), str)


def _are_outputs(outputs: Any, key: str) -> bool:
    """Return whether these are the outputs of the callback of this name: 'a.b', of several '..a.b...c.d..'; 'a.b@...' is a further one."""
    several = key.startswith("..")
    if several != isinstance(outputs, list):
        return False
    given, wanted = (outputs, key[2:-2].split("...")) if several else ([outputs], [key])
    return all(map(_is_place, given)) and [_bare(f"{one['id']}.{one['property']}") for one in given] == list(map(_bare, wanted))


def _bare(name: str) -> str:
    return name.partition("@")[0]


def _are_texts(texts: Any) -> bool:
    return isinstance(texts, list) and all(isinstance(text, str) for text in texts)

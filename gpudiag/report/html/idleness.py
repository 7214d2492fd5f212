"""What the HTML page shows of idle time, as plain values: places, calls that wait, queue depth, longest path, what changes give."""

from __future__ import annotations

from typing import Any

from gpudiag.model.report import ReportData
from gpudiag.report import waiting, words
from gpudiag.report.escape import clean
from gpudiag.units import format_ns, format_share

WIDTH, HEIGHT = 720, 120
"""Size of the queue chart in its own units."""

MOST = 12
"""Changes shown."""

MOST_PLACES = 6
"""Places shown of each cause; the table of all idle time stands further down."""

_WIDE_ENOUGH, _WIDE_ON_A_PHONE = 0.08, 0.17
"""Shares from which a segment has room for its percentage."""

_AS_BUCKETS = {
    **{bound: bound for bound in ("compute", "memory", "overhead", "unknown")},
    "communication": "exposed-communication",
    "copy": "exposed-copy",
}


def context(report: ReportData) -> dict[str, Any]:
    """Return the values of the template's part on idle time."""
    found = waiting.causes(report, MOST_PLACES)
    return {
        "device_word": words.device_word(report),
        "causes": [_cause(cause) for cause in found],
        "meanings": waiting.meanings(found),
        "queue_line": waiting.queue_line(report),
        "queue": _queue(report),
        "path_line": waiting.path_line(report),
        "path": _path(report),
        "changes": [
            (clean(change.label), clean(change.setting), change.then, change.gain, f"{min(max(change.share, 0.0), 1.0) * 100:.2f}")
            for change in waiting.changes(report, MOST)
        ],
    }


def _cause(cause: waiting.Cause) -> dict[str, Any]:
    """Return one cause with its places, each as (site, what happened, time, share)."""
    places = [(clean(place.site), clean(place.what, 240), format_ns(place.ns), format_share(place.share, 1)) for place in cause.places]
    figures = {"time": format_ns(cause.ns), "share": format_share(cause.share, 1)}
    return {"css": _css(cause.bucket), "label": clean(cause.label), "places": places, **figures}


def _css(bucket: str) -> str:
    """Return the class of a bucket; only words of our own reach the page's markup."""
    name = bucket.replace("_", "-")
    return f"idle {name}" if name.replace("-", "").isascii() and name.replace("-", "").isalpha() else "idle"


def _path(report: ReportData) -> list[dict[str, Any]]:
    """Return the segments of the longest path's bar."""
    return [
        {
            "css": _AS_BUCKETS.get(bound) or _css(f"idle_{bound}"),
            "label": clean(text),
            "share": format_share(share, 1),
            "percent": f"{share * 100:.4f}",
            "inside": format_share(share) if share >= _WIDE_ENOUGH else "",
            "tight": share < _WIDE_ON_A_PHONE,
        }
        for bound, text, share in waiting.path_parts(report)
        if share >= words.ROUNDS_TO_ZERO / 5
    ]


def _queue(report: ReportData) -> dict[str, str] | None:
    """Return the curve of the queue's depth as points of a line, None where it is not known or nothing was ever queued."""
    queue = report.queue
    if queue is None or len(queue.t_ns) < 2 or not max(queue.depth, default=0):
        return None
    last, most = queue.t_ns[-1] or 1, max(queue.depth)
    points = " ".join(
        f"{t / last * WIDTH:.1f},{HEIGHT - depth / most * (HEIGHT - 4):.1f}" for t, depth in zip(queue.t_ns, queue.depth, strict=False)
    )
    return {"points": points, "most": f"{most:,.0f}", "span": format_ns(last), "width": str(WIDTH), "height": str(HEIGHT)}

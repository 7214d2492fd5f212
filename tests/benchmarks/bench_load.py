"""Many who look at one dashboard: `python tests/benchmarks/bench_load.py [--clients 200] [--seconds 60]`, on 127.0.0.1 alone.

Each client asks as an open page does: every PAUSE_S for one thing of MIX, over a connection that it keeps; at first all ask at once for the
same recording, which nobody has opened yet. One of the recordings grows meanwhile. Printed: requests a second, waits, errors, memory and
open files of the server. It fails where a request failed, where the 99th percentile is above SLOW_S, or where the server grows. It stops by
itself: after the time, and after MOST_REQUESTS of a client.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from dashclient import Client, small_bundle, small_trace
from growingbundle import Bundle

HOST = "127.0.0.1"
PAUSE_S = 2.0
"""Between two requests of a client: the interval at which a page follows a run that records (dashboard/pages/telemetry.py)."""

SLOW_S = 1.5
"""Limit of the 99th percentile: below PAUSE_S, so that no page asks again before it has its last answer."""

GROWTH_SHARE, GROWTH_MB = 0.05, 20.0
"""Limits of what the server's memory may grow by from the second quarter of the time to the last, which of them is larger: its caches
are full by then, and a leak of 1 kB a request would be 6 MB a minute at 100 requests a second."""

MOST_REQUESTS = 1_000
OPENING = "opening"
TIMEOUT_S = 30.0
OPENING_S = 120.0
"""Longest time until all have seen the first recording."""


class Request(NamedTuple):
    """One thing that a page asks for."""

    method: str
    path: str
    body: dict[str, Any] | None = None


Mix = dict[str, tuple[int, Callable[[random.Random], Request]]]
"""By name the weight of each kind of request, and what makes one."""


class Answer(NamedTuple):
    """What came of it."""

    kind: str
    seconds: float
    fault: str


class Looked(NamedTuple):
    """The server at one moment."""

    at_s: float
    rss_mb: float
    files: int


class Outcome(NamedTuple):
    """What was measured."""

    clients: int
    seconds: float
    opening_s: float
    """Until the last of the clients saw the recording that all asked for at once."""
    answers: tuple[Answer, ...]
    looks: tuple[Looked, ...]

    def waits_s(self, kind: str | None = None) -> list[float]:
        return sorted(one.seconds for one in self.answers if kind is None or one.kind == kind)

    @property
    def faults(self) -> list[str]:
        return [f"{one.kind}: {one.fault}" for one in self.answers if one.fault]


def recordings(folder: Path) -> Bundle:
    """Write what is looked at, and return the bundle that grows."""
    small_trace(folder / "trace.json")
    small_bundle(folder / "finished")
    growing = Bundle(folder / "growing", created_unix_ns=time.time_ns())
    growing.steps(100)
    return growing


def mix(client: Client) -> Mix:
    """Return what an open page asks for."""

    def callback(output: str, **values: Any) -> Request:
        return Request(
            "POST", "/_dash-update-component", client.body(output, {name.replace("__", "."): one for name, one in values.items()})
        )

    def content(page: str, query: str = "") -> Request:
        return callback(f"{page}-content.children", address__search=f"?bundle=finished{query}", address__pathname=f"/{page}")

    def window(rng: random.Random) -> Request:
        ask = {"number": 1, "pixels": 1_800, "from_ns": rng.randrange(10**6), "to_ns": 2 * 10**6 + rng.randrange(10**6)}
        values = {"timeline-ask.data": ask, "address.search": "?bundle=finished"}
        return Request("POST", "/_dash-update-component", client.body("timeline-got.data", values))

    def followed(_: random.Random) -> Request:
        values = {"address.search": "?bundle=growing", "address.pathname": "/telemetry"}
        return Request("POST", "/_dash-update-component", client.body("telemetry-state.children", values))

    def listed(_: random.Random) -> Request:
        return Request("POST", "/_dash-update-component", client.body("bundles-list.children", {"bundles-clock.n_intervals": 1}))

    return {
        "page": (1, lambda rng: Request("GET", rng.choice(("/", "/overview?bundle=finished", "/ops?bundle=finished")))),
        "layout": (1, lambda _: Request("GET", "/_dash-layout")),
        "dependencies": (1, lambda _: Request("GET", "/_dash-dependencies")),
        "list": (4, listed),
        "route": (2, lambda _: routed("finished", client)),
        "overview": (2, lambda _: content("overview")),
        "findings": (1, lambda _: content("findings")),
        "ops": (4, lambda rng: content("ops", f"&find={rng.choice('abcdefgh')}&sort={rng.choice(('time', 'calls'))}")),
        "timeline": (6, window),
        "telemetry, growing": (6, followed),
    }


def routed(bundle: str, client: Client) -> Request:
    """Return the request of the frame for the page of a recording."""
    values = {"address.pathname": "/overview", "address.search": f"?bundle={bundle}"}
    return Request("POST", "/_dash-update-component", client.body("main.children", values, "address.pathname"))


class Visitor:
    """One client with its connection."""

    def __init__(self, port: int, number: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
        origin = f"http://{HOST}:{port}"
        self._headers = {"Origin": origin, "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
        self.rng, self.opened_at = random.Random(number), 0.0
        self.answers: list[Answer] = []

    def run(self, client: Client, kinds: Mix, together: threading.Barrier, seconds: float) -> None:
        """Open the recording together with all others, then look around for a time."""
        together.wait(OPENING_S)
        until = time.monotonic() + OPENING_S
        while b'"poll":{"disabled":true' not in self.ask(OPENING, routed("trace.json", client)) and time.monotonic() < until:
            time.sleep(0.5)
        self.opened_at = time.monotonic()
        together.wait(OPENING_S)
        until = time.monotonic() + seconds
        time.sleep(self.rng.uniform(0, min(PAUSE_S, seconds)))
        names, weights = list(kinds), [weight for weight, _ in kinds.values()]
        while time.monotonic() < until and len(self.answers) < MOST_REQUESTS:
            kind = self.rng.choices(names, weights)[0]
            self.ask(kind, kinds[kind][1](self.rng))
            time.sleep(max(0.0, min(PAUSE_S * self.rng.uniform(0.5, 1.5), until - time.monotonic())))
        self._connection.close()

    def ask(self, kind: str, request: Request) -> bytes:
        """Return the answer to a request, and keep how long it took."""
        data = None if request.body is None else json.dumps(request.body)
        began, body = time.perf_counter(), b""
        try:
            self._connection.request(request.method, request.path, data, self._headers)
            answer = self._connection.getresponse()
            body = answer.read()
            fault = "" if answer.status in (200, 204) else f"status {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            fault = type(error).__name__
            self._connection.close()
        fault = fault or ("error on the page" if b'"className":"error"' in body else "")
        self.answers.append(Answer(kind, time.perf_counter() - began, fault))
        return body


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Yield port and process of a dashboard of `folder`."""
    command = [sys.executable, "-m", "gpudiag", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = iter(process.stderr.readline, "")
            found = next((match for line in said if (match := re.search(rf"http://{re.escape(HOST)}:(\d+)/", line))), None)
            if found is None:
                raise SystemExit("the dashboard did not start")
            yield int(found.group(1)), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1].replace("stop it with Ctrl-C", "").strip()
            if rest:
                print(f"the dashboard said:\n{rest[-2_000:]}", file=sys.stderr)


def measure(clients: int, seconds: float) -> Outcome:
    """Return what `clients` saw of a dashboard within `seconds`."""
    from gpudiag_dashboard.app import create_app

    with tempfile.TemporaryDirectory() as name:
        growing = recordings(Path(name))
        client = Client(create_app(Path(name)))
        with server(Path(name)) as (port, process):
            return _loaded(clients, seconds, client, growing, port, process)


def _loaded(clients: int, seconds: float, client: Client, growing: Bundle, port: int, process: psutil.Process) -> Outcome:
    kinds, together = mix(client), threading.Barrier(clients)
    visitors = [Visitor(port, number) for number in range(clients)]
    threads = [threading.Thread(target=one.run, args=(client, kinds, together, seconds), daemon=True) for one in visitors]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not all(one.opened_at for one in visitors):
        time.sleep(0.05)
    opened, looks = time.monotonic(), []
    while any(thread.is_alive() for thread in threads) and time.monotonic() < opened + seconds + TIMEOUT_S:
        looks.append(Looked(time.monotonic() - opened, process.memory_info().rss / 1e6, process.num_fds()))
        growing.steps(10)
        time.sleep(min(1.0, seconds / 10))
    answers = tuple(answer for visitor in visitors for answer in visitor.answers)
    return Outcome(clients, time.monotonic() - opened, opened - began, answers, tuple(looks))


def percentiles(waits_s: list[float]) -> tuple[float, float, float]:
    """Return the 50th, 95th and 99th percentile of sorted times."""
    return tuple(waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))] for share in (0.5, 0.95, 0.99))  # type: ignore[return-value]


def growth(looks: tuple[Looked, ...]) -> tuple[float, float, float]:
    """Return the median memory in MB in the second and in the last quarter, and by how many files more are open in the last."""
    quarter = max(1, len(looks) // 4)
    early, late = looks[quarter : 2 * quarter] or looks[:1], looks[-quarter:]
    before, after = (statistics.median(one.rss_mb for one in part) for part in (early, late))
    return before, after, statistics.median(one.files for one in late) - statistics.median(one.files for one in early)


def missed(outcome: Outcome) -> list[str]:
    """Return the limits that were missed."""
    found = [f"{len(outcome.faults)} requests failed: {', '.join(sorted(set(outcome.faults)))}"] if outcome.faults else []
    p99 = percentiles(outcome.waits_s())[2]
    found += [f"the 99th percentile is {p99:.2f} s, {SLOW_S:.1f} s is the limit"] if p99 > SLOW_S else []
    before, after, files = growth(outcome.looks)
    if after - before > max(GROWTH_MB, GROWTH_SHARE * before):
        found.append(f"memory grew from {before:.0f} to {after:.0f} MB")
    return [*found, *([f"{files:.0f} more files are open"] if files > outcome.clients / 10 else [])]


def told(outcome: Outcome) -> str:
    """Return the figures as text."""
    later = [one for one in outcome.answers if one.kind != OPENING]
    first, last, (before, after, _) = outcome.looks[0], outcome.looks[-1], growth(outcome.looks)
    most = max(one.files for one in outcome.looks)
    head = [
        f"{outcome.clients} clients for {outcome.seconds:.0f} s, one request in {PAUSE_S:.0f} s each, on {HOST}",
        f"{len(later) / outcome.seconds:.0f} requests a second, {len(outcome.answers):,} in all, {len(outcome.faults)} failed",
        f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, clients included",
        f"all saw the recording that they asked for at once after {outcome.opening_s:.1f} s",
        f"memory {first.rss_mb:.0f} MB at first, {before:.0f} MB in the second quarter, {after:.0f} MB in the last",
        f"open files {first.files} at first, {most} at most, {last.files} at the end",
        f"{'':<20}{'requests':>9}{'p50':>9}{'p95':>9}{'p99':>9}  ms",
    ]
    waits = [(kind or "all", outcome.waits_s(kind)) for kind in (None, *sorted({one.kind for one in outcome.answers}))]
    rows = [f"{kind:<20}{len(times):>9,}" + "".join(f"{1e3 * one:>9.0f}" for one in percentiles(times)) for kind, times in waits]
    return "\n".join([*head, *rows])


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    outcome = measure(min(given.clients, 400), min(given.seconds, 600.0))
    print(told(outcome))
    faults = missed(outcome)
    sys.exit("\n".join(faults) if faults else None)


if __name__ == "__main__":
    main()

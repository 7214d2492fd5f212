"""A dashboard without a browser: requests as its pages send them. `from dashclient import Client`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST = "127.0.0.1:8050"
ORIGIN = {"Host": HOST, "Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}
"""Headers that a browser sends with the requests of a page of this dashboard."""


class Client:
    """Asks an app as its own pages do; `headers` replace those of a browser."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None) -> None:
        self.app, self.headers = app, ORIGIN if headers is None else headers
        self.http = app.server.test_client(use_cookies="Cookie" not in self.headers)

    def get(self, address: str) -> Any:
        """Return the answer to a GET."""
        return self.http.get(address, headers=self.headers)

    def callback(self, output: str, values: dict[str, Any], changed: str | None = None, reads: str = "") -> Any:
        """Return the answer to the callback that writes `output` ('main.children'), called with values by 'id.property'; others are None.

        `reads`: id of one of its inputs, where several callbacks write the same.
        """
        return self.http.post("/_dash-update-component", json=self.body(output, values, changed, reads), headers=self.headers)

    def written(self, output: str, values: dict[str, Any], changed: str | None = None, reads: str = "") -> dict[str, Any]:
        """Return what a callback wrote, by id: {'main': {'children': ...}}."""
        answer = self.callback(output, values, changed, reads)
        if answer.status_code == 204:  # how dash before 3.1 answers where nothing is to be changed
            return {}
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return answer.get_json()["response"]

    def body(self, output: str, values: dict[str, Any], changed: str | None = None, reads: str = "") -> dict[str, Any]:
        """Return the request for a callback."""
        matching = ((key, known) for key, known in self.app.callback_map.items() if output in _names(key))
        key, known = next((key, known) for key, known in matching if not reads or reads in {place["id"] for place in known["inputs"]})
        outputs = [{"id": name.rpartition(".")[0], "property": name.rpartition(".")[2].partition("@")[0]} for name in _keys(key)]
        sent = {
            part: [{**place, "value": values.get(f"{place['id']}.{place['property']}")} for place in known[part]]
            for part in ("inputs", "state")
        }
        given = changed or f"{known['inputs'][0]['id']}.{known['inputs'][0]['property']}"
        return {"output": key, "outputs": outputs if key.startswith("..") else outputs[0], **sent, "changedPropIds": [given]}

    def go(self, pathname: str, search: str = "", shown: Any = None) -> dict[str, Any]:
        """Return what the frame shows for an address."""
        values = {"address.pathname": pathname, "address.search": search, "shown.data": shown}
        return self.written("main.children", values, "address.pathname")

    def content(self, pathname: str, search: str) -> Any:
        """Return the content of a page made from its address."""
        place = f"{pathname.strip('/')}-content"
        return self.written(f"{place}.children", {"address.search": search, "address.pathname": pathname})[place]["children"]


def _keys(key: str) -> list[str]:
    """Return the outputs of a callback from its name ('a.b', '..a.b...c.d..')."""
    return key[2:-2].split("...") if key.startswith("..") else [key]


def _names(key: str) -> set[str]:
    return {name.partition("@")[0] for name in _keys(key)}


def texts(component: Any) -> str:
    """Return the text of a component as Dash sent it, in its order."""
    if isinstance(component, list):
        return " ".join(filter(None, map(texts, component)))
    if isinstance(component, dict):
        return texts(component.get("props", {}).get("children"))
    return "" if component is None else str(component).replace("\xa0", " ")


def links(component: Any) -> Iterator[tuple[str, str]]:
    """Yield (text, address) of the links in a component."""
    if isinstance(component, list):
        for child in component:
            yield from links(child)
    elif isinstance(component, dict):
        props = component.get("props", {})
        if component.get("type") == "Link":
            yield texts(component), props["href"]
        yield from links(props.get("children"))


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[str]:
    """Yield the address of a dashboard of `folder` that a browser can open."""
    import threading

    import waitress
    from gpudiag_dashboard.app import create_app

    server = waitress.create_server(create_app(folder, **options).server, host="127.0.0.1", port=0, threads=8)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
        server.task_dispatcher.shutdown(cancel_pending=True, timeout=5)


def analysed(client: Client, bundle: str, limit_s: float = 120) -> None:
    """Wait until a recording has been analysed, as the frame does."""
    until = time.monotonic() + limit_s
    while client.go("/overview", f"?bundle={bundle}")["poll"]["disabled"] is False:
        assert time.monotonic() < until, "the analysis does not end"
        time.sleep(0.05)


def small_trace(path: Path, name: str = "aten::mm") -> Path:
    """Write a trace of three steps on an A100 and return `path`: each multiplies for 60 us, adds for 20 us, then waits for the host."""
    from handmade import A100_PROPERTIES, call, kernel, op, steps, write

    events = []
    for step in range(3):
        base, first = 1000 * step, 1 + 10 * step
        events += [
            op(name, base + 10, base + 40, [[512, 512], [512, 512]], dtype="float"),
            call(base + 20, first),
            kernel(base + 30, base + 90, first, "sgemm_128x128"),
        ]
        events += [
            op("aten::add", base + 50, base + 80, [[4096, 512], [4096, 512], []]),
            call(base + 60, first + 1),
            kernel(base + 95, base + 115, first + 1, "add_kernel"),
        ]
    return write(path, *steps(0, 1000, 2000, 3000), *events, deviceProperties=[A100_PROPERTIES])


def fp32_trace(path: Path) -> Path:
    """Write three steps of one product in fp32 each, for which the host waits, and return `path`: the finding CMP-01 names the op."""
    from handmade import A100_PROPERTIES, call, kernel, op, steps, write

    events = []
    for step, base in enumerate((0, 8_000, 16_000)):
        events += [
            op("aten::mm", base + 10, base + 40, [[4096, 4096], [4096, 4096]], dtype="float"),
            call(base + 20, 1 + step),
            kernel(base + 30, base + 7_600, 1 + step, "ampere_sgemm_128x128_nn"),
            call(base + 50, None, api="cudaDeviceSynchronize", end=base + 7_610),
        ]
    return write(path, *steps(0, 8_000, 16_000, 24_000), *events, deviceProperties=[A100_PROPERTIES])


def small_bundle(
    folder: Path,
    *,
    finished: bool = True,
    trace: bool = True,
    make: Callable[[Path], Path] = small_trace,
    command: tuple[str, ...] | None = None,
) -> Path:
    """Write a bundle by hand and return `folder`; `trace`: with one timing window, which `make` writes; `command`: of `gpudiag run`."""
    import gzip

    import msgspec

    from gpudiag.model.bundle import Manifest, Window
    from gpudiag.model.hardware import ObservedDevice

    (folder / "trace").mkdir(parents=True)
    windows = ()
    if trace:
        name = "trace/rank0-w0.json.gz"
        text = make(folder / "text.json")
        (folder / name).write_bytes(gzip.compress(text.read_bytes()))
        text.unlink()
        windows = (Window(0, 0, "timing", name, 7, 3, True, False, planned=3),)
    device = ObservedDevice(0, "NVIDIA A100-SXM4-80GB")
    manifest = Manifest(
        finished=finished,
        windows=windows,
        steps=50,
        device_kind="gpu",
        device=device,
        command=command,
        created_unix_ns=1_700_000_000 * 10**9,
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder

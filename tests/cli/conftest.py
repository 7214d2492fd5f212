"""A stand-in for gpudiag.api: the commands are tested without the analysis behind them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gpudiag
from gpudiag.cli import main
from gpudiag.model.hardware import Device


class FakeReport:
    """What api.Report answers, with the arguments in it."""

    def __init__(self, data: Any = None) -> None:
        self.data = data

    def text(self, width: int | None = None, top: int = 10, color: bool = False, everything: bool = False, script: str | None = "") -> str:
        given = [f"width={width}", f"top={top}", f"color={color}", *["everything"] * everything, *[f"script={script}"] * bool(script)]
        return f"text {' '.join(given)}\n"

    def brief(self, width: int | None = None, color: bool = False, script: str | None = "") -> str:
        return f"brief width={width} color={color}{f' script={script}' if script else ''}\n"

    def markdown(self, top: int = 20) -> str:
        return f"markdown top={top}\n"

    def html(self) -> str:
        return "<!doctype html>\n"

    def json(self) -> bytes:
        return b"{}\n"


class FakeDemo(msgspec.Struct):
    report: Any
    bundle: str
    html: str


class FakeApi(types.ModuleType):
    """Records the calls; `failure` is raised by diagnose."""

    def __init__(self) -> None:
        super().__init__("gpudiag.api")
        self.calls: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self.data: Any = None
        self.device = Device("cpu", "Some CPU", "cpu", "measured", "a matrix product", peaks={"fp32": 2e12}, bandwidth_byte_per_s=None)

    def diagnose(
        self,
        path: str,
        *,
        rank: int | None = None,
        window: int | None = None,
        rules_dirs: Sequence[str] = (),
        config: Any = None,
        graph_capture: Path | None = None,
        progress: Callable[[str], None] | None = None,
        modules: bool = False,
        gpu_hour_price: float | None = None,
        planned_steps: int | None = None,
        scheduler: str | None = None,
    ) -> FakeReport:
        more = {"graph_capture": graph_capture} if graph_capture else {}
        more |= {} if window is None else {"window": window}
        more |= {} if gpu_hour_price is None else {"gpu_hour_price": gpu_hour_price, "planned_steps": planned_steps}
        more |= {} if scheduler is None else {"scheduler": scheduler}
        more |= {"disabled": config.disable} if config is not None and config.path else {}
        self.calls.append({"path": path, "rank": rank, "rules_dirs": list(rules_dirs), **more})
        if progress:
            progress("reading \x1b[31m[bold]")
        if self.failure:
            raise self.failure
        return FakeReport(self.data)

    def demo(self, folder: str, log: Callable[[str], None], *, rules_dirs: Sequence[str] = (), config: Any = None) -> FakeDemo:
        log("step 3")
        return FakeDemo(FakeReport(), f"{folder}/bundle", f"{folder}/report.html")

    def calibrate(self, device: str) -> Device:
        self.calls.append({"device": device})
        return self.device


@pytest.fixture(autouse=True)
def no_width_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist exports COLUMNS to its workers, and commands heed it."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "gpudiag.api", fake)
    monkeypatch.setattr(gpudiag, "api", fake, raising=False)
    return fake


class Result(msgspec.Struct):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `gpudiag ARGUMENTS` in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["gpudiag", *map(str, arguments)])
        code = main()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run

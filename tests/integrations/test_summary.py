"""Figures for experiment trackers: keys and values, what each tracker is told, and that no failure reaches the training."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPORTS = Path(__file__).resolve().parents[1] / "report"


@pytest.fixture(autouse=True)
def _samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from gpudiag.integrations import summary

    summary._warned.clear()
    yield
    summary._warned.clear()


@pytest.fixture
def report() -> Any:
    import importlib.util

    from gpudiag import api

    spec = importlib.util.spec_from_file_location("report_sample_for_summary", REPORTS / "sample.py")
    assert spec is not None
    assert spec.loader is not None
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    return api.Report(sample.report())


class Calls:
    """An object of which every method only notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_figures_have_their_keys_units_and_values(report: Any) -> None:
    from gpudiag.integrations.summary import flat
    from gpudiag.model.timeline import BUCKETS

    values = flat(report)
    assert all(isinstance(value, float) for value in values.values())
    assert values["gpudiag/step_mean_ms"] == pytest.approx(75.0)  # 300 ms over 4 steps
    assert values["gpudiag/compute_share"] == pytest.approx(90 / 300)
    assert values["gpudiag/idle_share"] == pytest.approx((5 + 100 + 8 + 2 + 2) / 300)
    assert sum(values[f"gpudiag/{bucket}_share"] for bucket in BUCKETS) == pytest.approx(1)
    assert values["gpudiag/findings_critical_count"] == 1
    assert values["gpudiag/best_gain_share"] == pytest.approx(100 / 300)
    assert flat(report.data, prefix="x.")["x.step_mean_ms"] == values["gpudiag/step_mean_ms"]


def test_what_is_not_known_has_no_key(report: Any) -> None:
    from gpudiag.integrations.summary import flat
    from gpudiag.model.timeline import Breakdown, BucketsNs

    bare = msgspec.structs.replace(
        report.data, mfu=None, memory=None, energy=None, history=None, rules=(), findings=(), breakdown=Breakdown(0, BucketsNs())
    )
    keys = {key.removeprefix("gpudiag/") for key in flat(bare)}
    assert not keys & {"step_mean_ms", "idle_share", "compute_share", "mfu_share", "memory_peak_bytes", "findings_count", "best_gain_share"}


def test_every_key_is_documented(report: Any) -> None:
    from gpudiag.integrations import summary
    from gpudiag.model.timeline import BUCKETS

    fixed = {key.removeprefix("gpudiag/") for key in summary.flat(report)} - {f"{bucket}_share" for bucket in BUCKETS}
    fixed -= {f"findings_{severity}_count" for severity in ("critical", "warning", "info")}
    assert [key for key in fixed if key not in str(summary.__doc__)] == []


def test_wandb_gets_a_summary_or_a_point_of_its_history(report: Any) -> None:
    from gpudiag.integrations.summary import flat, log_wandb

    run = Calls()
    run.__dict__["summary"] = {}
    assert log_wandb(run, report)
    assert run.__dict__["summary"] == flat(report)
    assert run.calls == []
    assert log_wandb(run, report, step=12)
    assert run.of("log") == [((flat(report),), {"step": 12})]


def test_a_page_goes_to_wandb_by_the_module_that_the_program_imported(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.integrations.summary import log_wandb

    run = Calls()
    run.__dict__["summary"] = {}
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Html=lambda text: ("page", text[:15])))
    assert log_wandb(run, report, page=True)
    assert run.of("log") == [(({"gpudiag/report": ("page", "<!doctype html>")},), {})]


def test_mlflow_gets_metrics_and_the_report(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.integrations.summary import flat, log_mlflow

    mlflow = Calls()
    assert log_mlflow(report, mlflow=mlflow, step=3)
    assert mlflow.of("log_metrics") == [((flat(report),), {"step": 3})]
    ((text, name),) = [args for args, _ in mlflow.of("log_text")]
    assert (text, name) == (report.markdown(), "gpudiag.md")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert log_mlflow(report)
    assert log_mlflow(mlflow, report, step=4)
    assert mlflow.of("log_metrics")[-1] == ((flat(report),), {"step": 4})


def test_a_real_mlflow_takes_it_and_no_run_is_left_open(report: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    from gpudiag.integrations.summary import flat, log_mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("ours", artifact_location=str(tmp_path / "files")))
    assert log_mlflow(mlflow, report)
    assert mlflow.active_run() is None
    with mlflow.start_run() as run:
        assert log_mlflow(mlflow, report, step=2)
        assert mlflow.active_run() is not None
    assert mlflow.get_run(run.info.run_id).data.metrics == pytest.approx(flat(report))


SEND_TO_WANDB = """
import sys, wandb
from gpudiag.api import Report
from gpudiag.integrations.summary import flat, log_wandb
from gpudiag.model.report import decode_report

report = Report(decode_report(open(sys.argv[1], "rb").read()))
run = wandb.init(project="gpudiag", mode="offline")
assert log_wandb(run, report, page=True)
assert all(abs(run.summary[key] - value) <= 1e-9 * abs(value) for key, value in flat(report).items())
run.finish()
"""


def test_a_real_wandb_run_takes_it_offline(report: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    (tmp_path / "report.json").write_bytes(report.json())
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", SEND_TO_WANDB, "report.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # it talks to a service of its own
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_tensorboard_gets_scalars_and_the_report(report: Any) -> None:
    from gpudiag.integrations.summary import flat, log_tensorboard

    writer = Calls()
    assert log_tensorboard(writer, report, step=7)
    assert {args[0]: args[1] for args, _ in writer.of("add_scalar")} == flat(report)
    assert {args[2] for args, _ in writer.of("add_scalar")} == {7}
    assert [args[0] for args, _ in writer.of("add_text")] == ["gpudiag/report"]


def test_a_real_summary_writer_takes_it(report: Any, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed", exc_type=ImportError)
    from gpudiag.integrations.summary import log_tensorboard

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        assert log_tensorboard(writer, report)
    assert list(tmp_path.glob("events*"))


def test_a_tracker_that_fails_costs_one_warning(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.integrations.summary import log_mlflow, log_tensorboard

    monkeypatch.delitem(sys.modules, "mlflow", raising=False)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("no route to the server")

    with pytest.warns(RuntimeWarning, match=r"not sent to TensorBoard \(ConnectionError: no route") as seen:
        assert [log_tensorboard(Broken(), report) for _ in range(2)] == [False, False]
    assert len(seen) == 1
    assert Path(seen[0].filename) == Path(__file__)  # the line that called it
    with pytest.warns(RuntimeWarning, match="mlflow was not imported by this program"):
        assert not log_mlflow(report)


def test_warnings_as_errors_stop_no_training(report: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.integrations.summary import log_tensorboard

    monkeypatch.setattr(sys, "stderr", None)  # as where it was closed when Python started
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not log_tensorboard(None, report)
    assert "not sent to TensorBoard" in caplog.text


def test_a_report_that_is_none_costs_a_warning_too() -> None:
    from gpudiag.integrations.summary import log_tensorboard

    with pytest.warns(RuntimeWarning, match="not sent"):
        assert not log_tensorboard(Calls(), None)

"""What-ifs from a file to the answer, on small recordings of known cost and on real ones."""

from __future__ import annotations

from pathlib import Path

import handmade as h
import pytest

from gpudiag.errors import InputError
from gpudiag.queries import NOTHING_TO_REPLAY, whatif

STEPS = 6
WALL = 1000.0


def _loader_bound() -> list[h.Event]:
    """Return six steps of 1,000 us: 600 us in the loader, then a kernel of 100 us that a sync waits for."""
    events = h.steps(*(WALL * step for step in range(STEPS + 1)))
    for step in range(STEPS):
        start = WALL * step
        events += [
            h.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start + 1, start + 601),
            h.op("aten::mm", start + 700, start + 730, [[64, 64], [64, 64]]),
            h.call(start + 710, 10 * step + 1, end=start + 720),
            h.kernel(start + 725, start + 825, 10 * step + 1),
            h.call(start + 740, 10 * step + 2, api="cudaStreamSynchronize", end=start + 830),
        ]
    return events


@pytest.fixture
def loader_bound(tmp_path: Path) -> str:
    return str(h.write(tmp_path / "trace.json", *_loader_bound(), deviceProperties=[h.A100_PROPERTIES]))


def test_taking_the_loader_away_gives_its_time_back(loader_bound: str) -> None:
    (found,) = whatif(loader_bound, ["loader=0"]).what_ifs
    assert found.step_ns == pytest.approx(1_000_000, rel=0.01)
    assert found.changed_ns == pytest.approx(400_000, rel=0.02)


def test_the_table_puts_the_planted_cause_first(loader_bound: str) -> None:
    found = whatif(loader_bound)
    assert found.what_ifs[0].name == "loader=0"
    assert found.trust is not None
    assert found.trust.error_share < 0.01
    assert found.reason == ""


def test_a_wrong_setting_is_told_before_anything_is_read() -> None:
    with pytest.raises(InputError, match="no such what-if"):
        whatif("no such file", ["lunch=0"])


def test_what_the_recording_does_not_hold_is_one_clear_line(loader_bound: str) -> None:
    with pytest.raises(InputError, match="gc=0: does not apply"):
        whatif(loader_bound, ["gc=0"])


def test_without_launches_there_is_no_replay_and_it_says_why(tmp_path: Path) -> None:
    path = h.write(tmp_path / "trace.json", *h.steps(0, 100, 200), h.kernel(10, 50, None), h.kernel(110, 150, None))
    found = whatif(str(path))
    assert (found.what_ifs, found.trust) == ((), None)
    assert found.reason == NOTHING_TO_REPLAY or "not replayed" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_bert-small", "rtx2080ti_resnet18_train_noshapes", "mi300x_resnet18_ddp8_actckpt_train_rank0"])
def test_removing_costs_of_real_steps_never_lengthens_them(traces: Path, name: str) -> None:
    found = whatif(str(traces / f"{name}.json.gz"))
    assert found.what_ifs
    for what_if in found.what_ifs:
        assert what_if.share >= -1e-9, what_if.name
        assert what_if.changed_ns > 0


@pytest.mark.slow
def test_a_slow_loader_is_the_largest_gain_of_a_real_run(traces: Path) -> None:
    """The recording shows 51 % of the slowest step inside the loader (2 workers decode images)."""
    found = whatif(str(traces / "rtx2080ti_resnet18_train_noshapes.json.gz"))
    assert found.what_ifs[0].name == "loader=0"
    assert not any(what_if.name == "batch=2" for what_if in found.what_ifs)  # no shapes were recorded

"""`gpudiag ab` of two ranks (gloo): a trial is one launch of torchrun, its ranks run and stop together, and the verdict is right."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from abplace import Place, over

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")]

SAMPLE = Path(__file__).parents[2] / "samples" / "straggler" / "train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29517")
LOOK_S = 0.05

Moment = dict[int, dict[int, bool]]
"""Launcher -> rank -> whether it is stopped."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.take(SAMPLE)
    yield made
    shutil.rmtree(made.temporary, ignore_errors=True)


def moment(place: Place) -> Moment:
    """Return the ranks that live right now."""
    found: Moment = defaultdict(dict)
    for pid in place.arms():
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            environ = dict(entry.partition(b"=")[::2] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if b"RANK" in environ:
            found[int(parent)][int(environ[b"RANK"])] = state == b"T"
    return found


@pytest.mark.long
def test_a_late_rank_and_its_cure_are_measured_by_launches_that_take_turns(place: Place) -> None:
    """The late rank reads for 25 ms a step, the cured one for 2 ms: with some 3 to 8 ms of other work, a step is 2 to 5 times as fast."""
    words = ("--pairs", "1", "--no-parity", "--variant=alike=args:--fixed", "--variant=same:exact=env:A=B", "--")
    process = place.start("-o", str(place.bundle), *words, *TORCHRUN, "train.py", "--steps", "100000", warm_limit_s=4.0)
    moments = []
    while process.poll() is None:
        moments.append(moment(place))
        time.sleep(LOOK_S)
    done = over(process)
    assert done.code == 0, done.err

    cured, same = place.outcome("alike"), place.outcome("same")
    assert (cured.pairs, same.pairs) == (1, 1), (cured, same)
    assert cured.verdict in ("faster", "unstable"), cured  # unstable: other programs kept the machine from becoming steady
    assert cured.interval is not None
    assert 1.3 < cured.interval[0] < cured.interval[1] < 8
    assert same.verdict in ("no_difference", "inconclusive", "too_noisy", "unstable"), same

    launches = {launcher: ranks for seen in moments for launcher, ranks in seen.items()}
    ranks = defaultdict(set)
    for seen in moments:
        for launcher, states in seen.items():
            ranks[launcher].update(states)
    assert len(launches) >= 4  # an arm of each kind, twice
    assert all(found == {0, 1} for found in ranks.values())
    pairs = [seen for seen in moments if len(seen) == 2 and all(len(states) == 2 for states in seen.values())]
    stopped = [[set(states.values()) for states in seen.values()] for seen in pairs]
    together = [states for states in stopped if all(len(one) == 1 for one in states)]
    assert len(pairs) > 20
    assert len(together) > 0.9 * len(pairs)  # a look goes through the processes one by one while they are being stopped
    assert sum({True} in states for states in together) > 0.9 * len(together)  # never both arms at once
    place.check_clean()

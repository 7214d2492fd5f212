"""Which reader a file goes to, and what is said of files that none of them reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from handmade import op, write
from snapshots import training

from gpudiag.errors import InputError
from gpudiag.trace.trace_files import read_trace


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_says_which_command_reads_it(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(pickle.dumps(training(), protocol))
    with pytest.raises(InputError, match="gpudiag memory") as raised:
        read_trace(path)
    assert ("protocol 0 or 1" in raised.value.message) == (protocol < 2)
    assert "\n" not in str(raised.value)


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "dump.pickle", op("aten::mm", 0, 5))).ops.height == 1

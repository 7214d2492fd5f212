"""Loader workers that are killed leave no folder of sockets among the user's temporary files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpudiag.experiment.trial.side_effects import MAX_SOCKETS_PATH

SCRIPT = """
import multiprocessing, os, signal, sys
from multiprocessing import util
from gpudiag.experiment.trial.side_effects import move_sockets
move_sockets(sys.argv[1])

def work():
    print(util.get_temp_dir(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
        child.join()
"""


def run(tmp_path: Path, folder: str) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), folder]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def test_workers_make_their_sockets_in_the_folder_of_the_arm() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        assert run(Path(name), name) == [f"{name}/mp"] * 2


def test_a_name_that_is_too_long_for_an_address_is_left_alone(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * MAX_SOCKETS_PATH))
    assert all(not made.startswith(long) for made in run(tmp_path, long))

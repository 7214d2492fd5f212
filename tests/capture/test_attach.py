"""A training that runs is recorded when somebody asks, computes the same, and keeps nothing of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gpudiag.attach import attach
from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.run_script import listen as listening
from gpudiag.capture.run_script.listen import Listener, check_folder
from gpudiag.errors import GpudiagError, InputError

TRAIN = """
import json, sys, time
from pathlib import Path
import torch
from torch.optim import optimizer as optimizers
import gpudiag

before = vars(torch.Tensor)["backward"]
loader_before = torch.utils.data.DataLoader.__iter__
if "--listen" in sys.argv:
    gpudiag.listen()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8, shuffle=True)
most, losses = int(sys.argv[1]), []
while len(losses) < most and not Path("stop").exists():
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if "--listen" in sys.argv:
            time.sleep(0.002)
left = [vars(torch.Tensor)["backward"] is not before, torch.utils.data.DataLoader.__iter__ is not loader_before]
left += [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
print(json.dumps([losses, left]))
"""


def ask_for_steps(pid: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Attach to a process as a person does in `folder`."""
    command = [sys.executable, "-m", "gpudiag", "attach", str(pid), "--no-report", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
def test_an_attached_training_computes_the_same_and_nothing_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    train = [sys.executable, "train.py"]
    child = subprocess.Popen([*train, "1000000", "--listen"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not listening.find_socket(child.pid).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        done = ask_for_steps(child.pid, tmp_path, "--steps", "3", "-o", "run")
        given_up = ask_for_steps(child.pid, tmp_path, "--steps", "1000000", "--wait", "2", "-o", "long")
        time.sleep(1)
        assert child.poll() is None
        (tmp_path / "stop").touch()
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    losses, left = json.loads(out)
    assert (err, left) == ("", [False, False, 0, 0])
    assert not listening.find_socket(child.pid).exists()
    (tmp_path / "stop").unlink()
    alone = subprocess.run([*train, str(len(losses))], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout)[0] == losses
    bundle = open_bundle(tmp_path / "run")
    assert bundle.manifest.finished
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 3), ("sites", 2)]
    assert f"process {child.pid} goes on unrecorded" in done.stderr
    assert "the recording is run" in done.stderr
    assert open_bundle(tmp_path / "long").manifest.finished
    assert "the recording is long" in given_up.stderr


ATTACHES = pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="a program that does not listen is asked by Python 3.14")


@ATTACHES
@pytest.mark.slow
def test_a_program_that_knows_nothing_of_gpudiag_is_recorded_and_computes_the_same(tmp_path: Path) -> None:
    plain = TRAIN.replace("import gpudiag\n", "import time\n").replace("gpudiag.listen()", "pass")
    (tmp_path / "train.py").write_text(plain)
    train = [sys.executable, "train.py"]
    child = subprocess.Popen([*train, "1000000", "--listen"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ask_for_steps(child.pid, tmp_path, "--steps", "3", "-o", "run")
        (tmp_path / "stop").touch()
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    losses, left = json.loads(out)
    assert (err, left) == ("", [False, False, 0, 0])
    (tmp_path / "stop").unlink()
    alone = subprocess.run([*train, str(len(losses))], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout)[0] == losses
    assert [window.steps for window in open_bundle(tmp_path / "run").manifest.windows] == [3, 2]


NO_GPUDIAG = "import sys; sys.modules['gpudiag'] = None; import time; print(flush=True); [time.sleep(0.01) for _ in range(3000)]"
BUSY = "import hashlib; print(flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 6_000_000); print('done')"


@ATTACHES
@pytest.mark.parametrize(
    ("program", "reason"),
    [(NO_GPUDIAG, "cannot listen: ModuleNotFoundError: import of gpudiag halted"), (BUSY, "its main thread ran no Python for 0 s")],
    ids=["without gpudiag", "in a long call"],
)
def test_a_program_that_cannot_be_made_to_listen_is_told_and_sees_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr("gpudiag.attach.ASK_S", 0.1 if program == BUSY else 30)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(InputError, match=reason):
            attach(child.pid, wait_s=1, tell=print)
        if program == BUSY:
            assert child.communicate(timeout=60) == ("done\n", "")
    finally:
        child.kill()
    assert child.communicate()[1] == ""


def test_who_cannot_be_asked_is_one_line_on_how(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        if hasattr(sys, "remote_exec"):
            pytest.skip("this Python asks the process to listen")
        with pytest.raises(InputError, match=rf"process {child.pid} does not listen \(call gpudiag.listen\(\)"):
            attach(child.pid, wait_s=1, tell=print)
    finally:
        child.communicate(b"\n")
    with pytest.raises(InputError, match=f"there is no process {child.pid}"):
        attach(child.pid, wait_s=1, tell=print)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir(mode=0o700)
    check_folder(own)
    link.symlink_to(own)
    with pytest.raises(GpudiagError, match="not a folder of this user alone"):
        check_folder(link)
    own.chmod(0o750)
    with pytest.raises(GpudiagError, match="not a folder of this user alone"):
        check_folder(own)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """Listen in this process, at a place of its own."""
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(listening, "find_socket", lambda pid: folder / f"{pid}.sock")
    return Listener()


@pytest.mark.parametrize("request_", [b"\n", b"{}\n", b"\xff\xfe\n", b'{"path":7}\n', b"[" * 70_000, b"no end"])
def test_whatever_is_asked_the_process_goes_on_and_answers_the_next(listener: Listener, request_: bytes) -> None:
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(listener.path))
            asking.settimeout(10)
            with suppress(ConnectionError):  # of what is too long the rest is not read
                asking.sendall(request_)
                asking.shutdown(socket.SHUT_WR)
                assert b'"refused":""' not in asking.recv(1000)
    listener.close()
    assert not listener.path.exists()


def test_a_forked_child_leaves_the_socket_alone(listener: Listener) -> None:
    child = os.fork()
    if not child:
        listener.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert listener.path.exists()
    listener.close()


def test_a_program_that_cannot_listen_is_warned_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setattr(listening, "find_socket", lambda pid: tmp_path / "shared" / f"{pid}.sock")
    monkeypatch.setattr(listening, "_listener", None)
    with pytest.warns(RuntimeWarning, match=r"gpudiag.listen\(\) does not listen"):
        listening.listen()

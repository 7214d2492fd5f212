"""`gpudiag run` as a person uses it: the script behaves as without it, and what it trained is in the bundle."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from gpudiag.bundle.reader import OpenedBundle, open_bundle
from gpudiag.capture.run_script.plan import JournalEntry
from gpudiag.cli import app
from gpudiag.cli.run import _collect_fixes, _speaks_for_ranks, report_outcome
from gpudiag.errors import InputError
from gpudiag.model.experiment import FixCall
from gpudiag.script_runner import RunResult, build_run_command

AWKWARD = Path(__file__).parents[1] / "awkward"
GPUDIAG = [sys.executable, "-m", "gpudiag", "run"]
QUICK = ["--no-report", "--skip", "2", "--warm", "1", "--record", "3", "--sites", "1"]
TRAIN = """
    import torch
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    """


def run(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return _done([*GPUDIAG, *arguments], cwd=cwd, **options)


def _done(command: list[str | Path], *, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    if options["stdin"] is None:
        del options["stdin"]
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, timeout=240, **options)


def write(folder: Path, code: str, name: str = "train.py") -> Path:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(map(textwrap.dedent, code.split("\f"))))
    return target


def training(code: str) -> str:
    """Return a script that can `train(steps)`, then does `code`."""
    return TRAIN + "\f" + code


def recorded(folder: Path, name: str = "run", rank: int | None = None) -> OpenedBundle:
    return open_bundle(folder / name, rank)


# -- the script's own behaviour ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + 15),
    ],
)
def test_the_exit_code_is_the_script_s_own(tmp_path: Path, code: str, expected: int) -> None:
    done = run(write(tmp_path, code), cwd=tmp_path)
    assert done.returncode == expected
    assert done.stdout == ""
    why = f"the script ended with exit code {expected} before a training step" if expected else "no Python of the command"
    assert f"gpudiag: nothing was recorded: {why}" in done.stderr


def test_a_script_sees_the_process_that_it_would_see_without(tmp_path: Path) -> None:
    code = """
        import os, sys
        def open_files():
            return sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1] if os.path.isdir("/proc/self/fd") else []
        mask = os.umask(0)
        print(sys.argv, sys.path, sys.flags, __name__, __file__, os.getcwd(), mask, sorted(os.environ.items()), sys.meta_path[-1])
        print(open_files(), sys.stdin.read(), sys.stdout.isatty())
        import signal
        print({name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)})
        print("to stderr", file=sys.stderr)
        """
    script = write(tmp_path, code)
    environ = {**os.environ, "PYTHONPATH": "some:where"}
    arguments = ["-o", "--skip", "-m", "--", "ä b"]
    bare = _done([sys.executable, script, *arguments], cwd=tmp_path, input="typed", env=environ, umask=0o027)
    ours = run(script, *arguments, cwd=tmp_path, input="typed", env=environ, umask=0o027)
    assert ours.stdout == bare.stdout
    assert bare.stdout.count("typed") == 1
    assert ours.stderr.startswith("to stderr\n")


@pytest.mark.slow
def test_ctrl_c_stays_ignored_in_the_background(tmp_path: Path) -> None:
    """A shell script starts what runs in the background with SIGINT ignored; libraries that we load may catch it."""
    script = write(tmp_path, "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)")
    command = shlex.join([*GPUDIAG, str(script)])
    found = _done(["/bin/sh", "-c", f"trap '' INT; {command}"], cwd=tmp_path)
    assert found.stdout == "True\n"


@pytest.mark.slow
def test_modules_run_as_python_runs_them(tmp_path: Path) -> None:
    write(tmp_path, "word = 'relative'", "pkg/other.py")
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, "import sys\nfrom .other import word\nprint(word, sys.argv[1:], __package__)", "pkg/__main__.py")
    bare = _done([sys.executable, "-m", "pkg", "--skip", "9"], cwd=tmp_path)
    assert run("--skip", "3", "-m", "pkg", "--skip", "9", cwd=tmp_path).stdout == bare.stdout == "relative ['--skip', '9'] pkg\n"


@pytest.mark.parametrize("arguments", [["missing.py"], ["-o", "x", "no-such-program"], ["folder"]])
def test_what_cannot_be_started_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert arguments[-1] in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_nothing_to_run_is_one_line(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing to run" in done.stderr


@pytest.mark.slow
def test_a_signal_sent_to_the_command_reaches_the_script(tmp_path: Path) -> None:
    code = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\nprint('ready', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen(
        [*GPUDIAG, write(tmp_path, code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 5
    process.stdout.close()


@pytest.mark.slow
def test_ctrl_c_reaches_the_script_once(tmp_path: Path) -> None:
    code = """
        import sys, time
        seen = []
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            seen.append(1)
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            seen.append(2)
        print("seen", seen, flush=True)
        sys.exit(4)
        """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(  # noqa: S606
            sys.executable, [*GPUDIAG, str(write(tmp_path, code))]
        )
    output = b""
    pressed = False
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
        if b"ready" in output and not pressed:
            pressed = True
            time.sleep(0.3)
            os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert b"seen [1]" in output


def test_options_end_at_the_module() -> None:
    def parse(*words: str) -> tuple[str | None, list[str]]:
        given = get_command(app).commands["run"].make_context("run", list(words)).params  # type: ignore[attr-defined]
        return given["module"], list(given["words"] or ())

    assert parse("--skip", "1", "-m", "mod", "--skip", "2") == ("mod", ["--skip", "2"])
    assert parse("--no-report", "--module=mod", "-x") == ("mod", ["-x"])
    assert parse("-o", "x", "-mmod", "-o", "y") == ("mod", ["-o", "y"])
    assert parse("-o", "x", "train.py", "-m", "mod") == (None, ["train.py", "-m", "mod"])
    assert parse("--", "-m") == (None, ["-m"])


def test_scripts_and_programs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "", "no_suffix")
    program = write(tmp_path, "#!/bin/sh\n", "program.sh")
    program.chmod(0o755)
    write(tmp_path, "", "app/__main__.py")
    assert build_run_command(["no_suffix", "x"]) == [sys.executable, "no_suffix", "x"]
    assert build_run_command(["app"]) == [sys.executable, "app"]
    assert build_run_command(["./program.sh", "x"])[-2:] == ["./program.sh", "x"]
    assert build_run_command(["env"]) == [shutil.which("env")]
    assert build_run_command(["a"], "mod") == [sys.executable, "-m", "mod", "a"]
    script.unlink()
    with pytest.raises(InputError, match="no such file"):
        build_run_command(["no_suffix"])


def test_fixes_by_name_are_applied_beside_those_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text('schema = 1\n[[fix]]\nid = "tf32"\n')
    assert _collect_fixes(None, [], []) == ()
    assert _collect_fixes(str(tmp_path / "recipe.toml"), ["bf16", "batch-size=x2"], []) == (
        FixCall("tf32"), FixCall("bf16"), FixCall("batch-size", "x2"),
    )  # fmt: skip
    assert capsys.readouterr().err == "gpudiag: fixes: tf32, bf16, batch-size=x2\n"
    with pytest.raises(InputError, match="bf16 and fp16 cannot be combined"):
        _collect_fixes(None, ["bf16", "fp16"], [])
    with pytest.raises(InputError, match="b16"):
        _collect_fixes(None, ["b16"], [])


# -- what is said afterwards --------------------------------------------------------------------------------------------------


def _told(capsys: pytest.CaptureFixture[str], *entries: JournalEntry, report: bool = True) -> list[str]:
    report_outcome(RunResult(0, entries), report=report)
    return capsys.readouterr().err.splitlines()


def test_many_bundles_are_counted_and_a_hint_can_be_pasted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entries = [JournalEntry("bundle", str(tmp_path / f"a run-{number}"), number) for number in range(12)]
    others, place = _told(capsys, *entries, report=False)
    assert others.endswith(f"{tmp_path / 'a run-4'} and 7 more")
    assert others.count("a run-") == 4
    assert f"`gpudiag report '{tmp_path / 'a run-0'}'`" in place


def test_what_a_session_warns_of_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [JournalEntry("warned", "telemetry was switched off")] * 2
    assert _told(capsys, *said, JournalEntry("bundle", str(tmp_path)), report=False)[:-1] == ["gpudiag: telemetry was switched off"]


@pytest.mark.parametrize(
    ("environ", "bundle", "speaks"),
    [
        ({}, False, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, False, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, True, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True, True),  # the first of another machine
        ({"RANK": "8", "LOCAL_RANK": "0"}, False, False),
    ],
)
def test_one_process_of_a_machine_speaks_for_its_ranks(environ: dict[str, str], bundle: bool, speaks: bool) -> None:
    assert _speaks_for_ranks(RunResult(0, (JournalEntry("bundle", "/nowhere/run", 8),) if bundle else ()), environ) == speaks


def test_a_rank_without_steps_does_not_cost_the_report_on_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path] = []

    def report_on(bundle: Path, **_: object) -> None:
        asked.append(bundle)
        raise InputError("planted")

    monkeypatch.setattr("gpudiag.script_runner.write_bundle_report", report_on)
    both = [JournalEntry("bundle", str(tmp_path), 0), JournalEntry("bundle", str(tmp_path), 1)]
    _told(capsys, *both, JournalEntry("note", "no steps were found", 1))
    assert asked == [tmp_path]
    lines = _told(capsys, *both, JournalEntry("note", "no steps were found", 1), JournalEntry("note", "no steps were found", 0))
    assert asked == [tmp_path]
    assert lines == ["gpudiag: no steps were found", f"gpudiag: the recording is {tmp_path}"]


@pytest.mark.parametrize(
    ("error", "reason", "hint"),
    [
        (KeyboardInterrupt(), "interrupted", True),
        (RuntimeError("broken"), "RuntimeError: broken", True),
        (InputError("no window", "lower skip= and max_windows="), "lower --skip and --max-windows", False),
    ],
)
def test_without_a_report_the_recording_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, reason: str, hint: bool
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gpudiag.script_runner.write_bundle_report", fails)
    lines = _told(capsys, JournalEntry("bundle", str(tmp_path)))
    assert reason in lines[-2]
    assert lines[-1] == f"gpudiag: the recording is {tmp_path}" + (f"; `gpudiag report {tmp_path}` reports on it" if hint else "")


# -- what is recorded -------------------------------------------------------------------------------------------------------


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_output_files_and_losses_are_those_of_the_bare_script(tmp_path: Path) -> None:
    folders = [tmp_path / "bare", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    arguments = [AWKWARD / "plain.py", "--steps", "24", "--out", "losses.txt"]
    bare = _done([sys.executable, *arguments], cwd=folders[0])
    ours = run(*QUICK, "-o", tmp_path / "run", *arguments, cwd=folders[1])
    assert (ours.returncode, ours.stdout) == (0, bare.stdout)
    assert _digests(folders[0]) == _digests(folders[1])
    assert ours.stderr == "gpudiag: the recording is " + str(tmp_path / "run") + f"; `gpudiag report {tmp_path / 'run'}` reports on it\n"
    bundle = recorded(tmp_path)
    assert bundle.manifest.command == tuple(map(str, arguments))
    assert bundle.step_records["samples"].to_list() == [4] * 20


@pytest.mark.slow
def test_the_report_follows_on_stderr_and_lies_in_the_bundle(tmp_path: Path) -> None:
    done = run("--sites", "1", AWKWARD / "gan.py", "40", cwd=tmp_path, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert (done.returncode, done.stdout) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"gpudiag: the recording is runs/{folder.name}; the page is runs/{folder.name}/report.html\n" in done.stderr
    assert "\nWhere a step goes\n" in done.stderr
    assert {"report.html", "report.json"} <= {path.name for path in folder.iterdir()}
    assert done.stderr.count("gpudiag ab ") <= 1  # what a report asks to measure, once
    assert "USDT" not in done.stderr


@pytest.mark.slow
def test_a_script_that_raises_leaves_its_traceback_and_a_finished_bundle(tmp_path: Path) -> None:
    script = write(tmp_path, training("train(20)\nraise ValueError('late')"))
    done = run(*QUICK, "-o", "run", script, cwd=tmp_path)
    assert done.returncode == 1
    bare = _done([sys.executable, script], cwd=tmp_path)
    assert done.stderr.startswith(bare.stderr)
    assert bare.stderr.endswith("ValueError: late\n")
    manifest = recorded(tmp_path).manifest
    assert manifest.finished
    assert "the training loop ended with ValueError" in manifest.warnings
    assert len(manifest.windows) == 2


@pytest.mark.slow
def test_a_script_that_ends_at_once_leaves_what_was_recorded(tmp_path: Path) -> None:
    code = "import time\ntrain(20)\ntime.sleep(1)\ntrain(1)\ntime.sleep(0.5)\nimport os; os._exit(9)"
    done = run(*QUICK, "-o", "run", write(tmp_path, training(code)), cwd=tmp_path)
    assert done.returncode == 9
    bundle = recorded(tmp_path)
    assert not bundle.manifest.finished
    assert [window.kind for window in bundle.manifest.windows] == ["timing", "sites"]


@pytest.mark.slow
def test_too_few_steps_are_told_in_one_line(tmp_path: Path) -> None:
    done = run("-o", "run", write(tmp_path, training("train(2)")), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("no steps were found (2 backward passes, 2 optimizer steps)") == 1
    assert recorded(tmp_path).manifest.finished


@pytest.mark.slow
@pytest.mark.parametrize("steps", [7, 9])
def test_a_loop_too_short_for_its_window_says_what_fits_and_that_is_recorded(tmp_path: Path, steps: int) -> None:
    script = write(tmp_path, training(f"train({steps})"))
    done = run("-o", "run", script, cwd=tmp_path)
    assert done.stderr.startswith(f"gpudiag: {steps} steps were too few to profile any (4 to tell what a step is, 5 that are skipped, ")
    fitting = re.search(r"gpudiag run (--skip 0 [-\w ]+\d)", done.stderr)
    assert fitting is not None
    run(*fitting[1].split(), "--no-report", "-o", "again", script, cwd=tmp_path)
    assert recorded(tmp_path, "again").timing_window() is not None


def test_an_option_of_the_script_before_its_name_says_where_it_belongs(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert "(options of the script stand behind its name; gpudiag run --help)" in run("--stpes", "5", "train.py", cwd=tmp_path).stderr


def test_a_name_like_that_of_the_script_names_it(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert "trian.py: no such file; did you mean 'train.py'? (" in run("trian.py", cwd=tmp_path).stderr


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_torch_without_training_leaves_no_bundle(tmp_path: Path) -> None:
    done = run("-o", "run", write(tmp_path, "import torch; print(torch.ones(2).sum().item())"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert "torch was imported, but no backward pass" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("plain.py", ["--steps", "30", "--accumulation", "4"]),
        pytest.param("lbfgs.py", ["30"], marks=pytest.mark.long),
        ("in_backward.py", ["30"]),
        pytest.param("steps_while_built.py", ["30"], marks=pytest.mark.long),
        pytest.param("by_hand.py", ["30"], marks=pytest.mark.long),
        pytest.param("huggingface.py", ["40", "out"], marks=pytest.mark.long),
        pytest.param("lightning_fit.py", ["60", "out"], marks=pytest.mark.long),
    ],
)
def test_awkward_loops_from_the_command_line(tmp_path: Path, script: str, arguments: list[str]) -> None:
    needed = {"huggingface.py": "transformers", "lightning_fit.py": "lightning"}.get(script)
    if needed:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    done = run(*QUICK, "-o", "run", AWKWARD / script, *arguments, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    bundle = recorded(tmp_path)
    assert bundle.manifest.finished
    assert len(bundle.manifest.windows) == 2
    assert bundle.step_records.height >= 24


# -- several processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["program", pytest.param("module", marks=pytest.mark.long), pytest.param("inside", marks=pytest.mark.long)])
def test_ranks_of_torchrun_share_one_bundle(tmp_path: Path, way: str) -> None:
    launch = ["--standalone", "--nproc-per-node", "2"]
    script = [AWKWARD / "ranks.py", "24"]
    if way == "inside":
        torchrun = [sys.executable, "-m", "torch.distributed.run", *launch, "--no-python"]
        done = _done([*torchrun, *GPUDIAG, *QUICK, "-o", "run", *script], cwd=tmp_path)
    else:
        start = ["torchrun"] if way == "program" else ["-m", "torch.distributed.run"]
        done = run(*QUICK, "-o", "run", *(["--"] if way == "program" else []), *start, *launch, *script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gpudiag: the recording is run") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    for rank in (0, 1):
        bundle = recorded(tmp_path, rank=rank)
        assert (bundle.manifest.rank, bundle.manifest.world_size, bundle.manifest.finished) == (rank, 2, True)
        assert bundle.step_records.height >= 18
        assert set(bundle.step_records["samples"].to_list()) == {4}


@pytest.mark.slow
@pytest.mark.long  # tests/capture/unmodified looks at workers in this process
def test_workers_that_are_spawned_leave_no_bundle_of_their_own(tmp_path: Path) -> None:
    code = """
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            import torch
            data = TensorDataset(torch.randn(96, 8))
            for (x,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="spawn"):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        """
    done = run(*QUICK, "-o", "run", write(tmp_path, training(code)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "train.py"]
    assert recorded(tmp_path).step_records.height == 20
    assert recorded(tmp_path).manifest.settings.loader is not None


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_processes_that_train_each_for_themselves_have_a_bundle_each(tmp_path: Path, method: str) -> None:
    code = f"""
        import multiprocessing
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            processes = [context.Process(target=train, args=(20,)) for _ in range(2)]
            for process in processes: process.start()
            for process in processes: process.join()
        """
    done = run(*QUICK, "-o", "run", write(tmp_path, training(code)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "train.py"]
    assert all(recorded(tmp_path, name).manifest.finished for name in ("run", "run-2"))
    assert "other processes trained too" in done.stderr

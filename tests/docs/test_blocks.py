"""Every fenced block of the documents is run as a reader would, in one folder; what cannot run stands in a list, with the reason."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from sitepages import load_script

from gpudiag.capture.demo import train_demo
from gpudiag.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("README.md", "CONTRIBUTING.md", "rules/README.md", "samples/README.md", "samples/SCORE.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
LANGUAGES = {"bash", "console", "json", "python", "toml", "yaml", "text"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    "make ": "sets up .venv anew; tests/docs/test_docs.py holds that the target exists",
    "pip install ": "fetches packages; tests/architecture/test_packaging.py builds and installs a wheel",
    "gpudiag ab ": "takes minutes; tests/experiment runs it, test_options_in_documents_exist holds its options",
    "gpudiag run -o runs/ddp torchrun ": "wants eight processes; tests/capture/unmodified runs torchrun with two",
    "gpudiag report traces/ --scheduler tcp": "wants a cluster; tests/api/test_cluster.py has one on this machine",
    "gpudiag dashboard ": "serves until it is stopped; tests/dashboard and tests/browser open it",
    "git apply ": "wants the diff of an experiment; tests/cli/test_apply.py has them",
    "gpudiag attach ": "wants a training that runs; tests/capture/test_attach.py has one",
    ".venv/bin/python samples/score.py ": "takes minutes; tests/samples runs it on less",
}
"""Beginnings of commands that no test runs as they stand, with the reason, and with what is tested instead."""

PYTHON_NOT_RUN = {
    "gpudiag.ab(": "takes ten minutes; tests/experiment runs it, its arguments are held below",
    "GpudiagCallback": "imports transformers; it has a test of its own below",
}
"""Words of Python blocks that no test runs as they stand, with the reason."""

BEFORE_THE_LOOP = """
import torch

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(2048, 64), batch_size=32)
"""
"""What stands in a script before the README's eight lines."""

TRAIN = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(parser.parse_args().steps):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
"""
"""What the documents call train.py."""


picture = load_script("picture")


class Block(NamedTuple):
    """One fenced block."""

    document: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """Return the command lines without their comments; of a `console` block those behind a `$`."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line and not line.startswith("#")]


BLOCKS = [Block(name, *found) for name in NAMES for found in FENCE.findall((ROOT / name).read_text(encoding="utf-8"))]


def of(language: str, *documents: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and (not documents or block.document in documents)]


def reason(command: str) -> str | None:
    return next((why for start, why in NOT_RUN.items() if f"{command} ".startswith(start)), None)


COMMANDS = {command: block.document for block in (*of("bash"), *of("console")) for command in block.commands()}
RUN = {command: document for command, document in COMMANDS.items() if reason(command) is None}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents speak of: train.py, runs/first (by the README's own code), trace.json.gz, gates.toml, two runs."""
    pytest.importorskip("torch", reason="torch is not installed: nothing can be recorded")
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(TRAIN)
    (folder / "samples").symlink_to(ROOT / "samples")
    (recording,) = of("python", "README.md")
    done = shell(folder, f"{shlex.quote(sys.executable)} -c {shlex.quote(BEFORE_THE_LOOP + recording.text)}")
    assert done.returncode == 0, done.stderr
    window = next((folder / "runs" / "first" / "trace").glob("rank0-w0.json.gz"))
    for target in ("trace.json.gz", "traces/rank0.json.gz"):
        (folder / target).parent.mkdir(exist_ok=True)
        shutil.copy(window, folder / target)
    for name in ("base", "base2", "now", "bf16"):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
    (gates,) = of("toml", "docs/start/ci.md")
    (folder / "gates.toml").write_text(gates.text)
    return folder


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as a shell does, with `gpudiag` and `.venv/bin/` those of this Python."""
    python = shlex.quote(sys.executable)
    line = re.sub(r"^((?:\w+=\S+ )?)(?:\.venv/bin/)?gpudiag\b", rf"\1{python} -m gpudiag", command)
    line = re.sub(r"^\.venv/bin/python\b", python, line)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=environ)


class Done(NamedTuple):
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def answer(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Done]:
    """Run a command line in the folder: one of gpudiag in this process, another as a shell does; `run` starts a process anyway."""

    def run(command: str) -> Done:
        words = shlex.split(command.removeprefix(".venv/bin/"))
        if words[0] != "gpudiag" or words[1] == "run":
            done = shell(place, command)
            return Done(done.returncode, done.stdout, done.stderr)
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", words)
        code = main()
        return Done(code, *capsys.readouterr())

    return run


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert all(any(f"{command} ".startswith(start) for command in COMMANDS) for start in NOT_RUN), "the list names what no document has"
    assert all(any(word in block.text for block in of("python")) for word in PYTHON_NOT_RUN), "the list names what no document has"
    assert len(RUN) >= 30


def test_the_entry_for_a_client_is_json_that_starts_the_server() -> None:
    (entry,) = of("json")
    server = json.loads(entry.text)["mcpServers"]["gpudiag"]
    assert (server["command"], server["args"][0], len(server["args"])) == ("gpudiag", "mcp", 2)
    assert len(entry.text.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("known_peaks")
@pytest.mark.parametrize(("command", "document"), RUN.items(), ids=list(RUN))
def test_the_command_runs(place: Path, answer: Callable[[str], Done], command: str, document: str) -> None:
    done = answer(command)
    fine = (0, 1) if "check" in command or "--fail-if-slower" in command else (0,)  # 1: a limit was missed, which is an answer
    assert done.returncode in fine, f"{document}: {command}\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}"
    assert "Traceback" not in done.stderr
    for written in re.findall(r"(?: -o|--junit) (\S+\.\w+)", command):
        assert (place / written).stat().st_size


PYTHON = {name: [block.text for block in of("python", name) if not any(word in block.text for word in PYTHON_NOT_RUN)] for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("document", [name for name, found in PYTHON.items() if found and name != "README.md"])  # `place` runs that one
def test_the_python_of_a_document_runs_from_top_to_bottom(place: Path, document: str) -> None:
    done = shell(place, f"{shlex.quote(sys.executable)} -c {shlex.quote(''.join(PYTHON[document]))}")
    assert done.returncode == 0, f"{document}\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}"


def calls(code: str) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


def test_the_calls_of_gpudiag_in_python_blocks_have_the_arguments_that_they_are_given() -> None:
    """`gpudiag.ab` takes ten minutes: it is not run, but its arguments must be some that it takes."""
    import gpudiag

    named = [(block.text, call) for block in of("python") for call in calls(block.text) if ast.unparse(call.func).startswith("gpudiag.")]
    assert {ast.unparse(call.func) for _, call in named} >= {"gpudiag.ab", "gpudiag.profile"}
    for text, call in named:
        function = getattr(gpudiag, ast.unparse(call.func).removeprefix("gpudiag."))
        inspect.signature(function).bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords}), text


@pytest.mark.slow
def test_the_callback_of_the_documents_is_made(place: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    (block,) = [block for block in of("python") if "GpudiagCallback" in block.text]
    done = shell(place, f"{shlex.quote(sys.executable)} -c {shlex.quote(block.text + 'print(len(callbacks))')}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_tables_of_settings_parse() -> None:
    assert all(tomllib.loads(block.text) for block in of("toml"))


@pytest.mark.slow
def test_the_settings_of_the_documents_are_heeded(place: Path) -> None:
    (settings,) = [block.text for block in of("toml", "docs/settings.md")]
    project = place / "project"
    project.mkdir()
    (project / "gpudiag.toml").write_text(settings)
    done = shell(project, "gpudiag report ../trace.json.gz -o report.json")
    assert done.returncode == 0, done.stderr
    told = {rule["id"]: rule["reason"] for rule in json.loads((project / "report.json").read_text())["rules"]}
    assert [told[rule] for rule in tomllib.loads(settings)["disable"]] == ["switched off in gpudiag.toml"]


@pytest.mark.slow
def test_the_rule_the_fact_and_the_settings_of_the_guide_work_together(place: Path) -> None:
    project = place / "lab"
    folder = project / "our_rules"
    folder.mkdir(parents=True, exist_ok=True)
    rule, fact = [block.text for block in of("yaml", "rules/README.md")][:2]  # then parts of a rule
    (settings,) = (block.text for block in of("toml", "rules/README.md"))
    (folder / "LAB-01.yaml").write_text(rule + fact)
    (project / "gpudiag.toml").write_text(settings)
    for command in ("gpudiag rules test our_rules", "gpudiag rules check our_rules", "gpudiag report ../trace.json.gz -o report.json"):
        done = shell(project, command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert '"LAB-01"' in (project / "report.json").read_text()


HEADING = re.compile(r"(?<=\n\n)([A-Z][\w :-]+?)(?: \(.*\))?\n")


@pytest.mark.slow
def test_the_reports_of_the_documents_are_laid_out_as_one_is_today(tmp_path: Path) -> None:
    """Their figures are of one machine; headings, columns and the words of the margin are those of today's demo, cut by the same script."""
    pytest.importorskip("torch", reason="torch is not installed: nothing can be recorded")
    train_demo(tmp_path / "demo", seconds=0, device="cpu", log=lambda _: None)
    today = shell(tmp_path, "COLUMNS=100 gpudiag report demo").stdout
    words = " ".join(today.replace("--set ", "").split())
    for document, cut, least in (
        ("README.md", picture.cut_short, {"Where a step goes", "Findings"}),
        ("docs/start/report.md", picture.cut_long, {"Where a step goes", "Findings", "Data quality"}),
    ):
        shown = next(block.text for block in of("text", document))
        headings = set(HEADING.findall(shown))
        assert least <= headings, document
        sure = headings - {"What-if: potential speed-up"}  # beside other work nothing may be sure to gain
        assert sure <= set(HEADING.findall(cut(today))), document
        margin = re.findall(r"^(\w+) {2,}(?=[A-Z])", shown.partition("Data quality")[2], re.MULTILINE)
        columns = re.findall(r"^(change +(?:--set +)?step +gain at most|\s+time +share)$", shown, re.MULTILINE)
        assert len(columns) == (2 if margin else 1)
        assert not margin or {"coverage", "device"} <= set(margin)
        columns = columns if "--set" in today.replace("--set NAME=VALUE", "") else columns[:1]
        for text in (*margin, *(" ".join(line.replace("--set", "").split()) for line in columns)):  # a narrow table has it in the rows
            assert text in words, f"{document}: {text}"
    assert len(picture.cut_short(today).splitlines()) <= picture.MOST_LINES

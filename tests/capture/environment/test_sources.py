"""Which files are of the program, what they are called, and that their digests are of the files as they were recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture.environment import sources
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.environment.sources import digest_sources
from gpudiag.capture.session import Session
from gpudiag.files import digest_content


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has run other tests has imported more files than a program."""
    monkeypatch.setattr(sources, "MAX_FILES", 1_000_000)


def imported(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n")
    module = ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def test_files_are_named_below_the_folder_that_python_imports_them_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "mynet", tmp_path / "src" / "mynet" / "__init__.py")
    imported(monkeypatch, "mynet.blocks", tmp_path / "src" / "mynet" / "blocks.py")
    imported(monkeypatch, "__main__", tmp_path / "scripts" / "train.py")
    imported(monkeypatch, "installed", tmp_path / "site-packages" / "installed.py")
    imported(monkeypatch, "compiled", tmp_path / "compiled.so")
    found = digest_sources({})
    assert {"mynet/__init__.py", "mynet/blocks.py", "train.py"} <= found.keys()
    assert found["train.py"] == digest_content(b"x = 1\n")
    assert not {"installed.py", "compiled.py", "compiled.so"} & found.keys()
    assert not [name for name in found if name.startswith(("torch/", "json/"))]


def test_what_is_known_keeps_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "mynet", tmp_path / "mynet.py")
    before = digest_sources({})
    (tmp_path / "mynet.py").write_text("x = 2\n")
    assert digest_sources(before)["mynet.py"] == before["mynet.py"]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bundle_holds_digests_unless_they_are_not_wanted(tmp_path: Path, make_loop: type, wanted: bool) -> None:
    loop = make_loop(batches=8)
    with Session(tmp_path / "run", parts=[Inventory(source=wanted)], skip=1, warm=1, record=2, sites=0) as prof:
        loop.epoch(prof.steps(loop.loader()))
    program = open_bundle(prof.path).manifest.program
    assert program is not None
    assert (program.sources is not None) == wanted
    if wanted:
        assert "conftest.py" in {Path(name).name for name in program.sources or ()}

"""What a process of its own can import, and what only exists in this one."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpudiag.errors import InputError
from gpudiag.fixes import code_location
from gpudiag.fixes.code_location import CodeLocation, load_code, locate_code

SCRIPT = """
import sys
from gpudiag.fixes.code_location import locate_code

def build(cfg):
    return cfg

class Fix:
    pass

if __name__ == "__main__":
    for found in (build, Fix):
        where = locate_code(found, "it")
        print(where.target, where.folder, sep="|")
"""


def _run(arguments: list[str], folder: Path) -> list[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(code_location.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_script_is_found_by_its_path_and_executed_without_its_main_part(tmp_path: Path) -> None:
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    of_build, of_class = _run(["train_it.py"], tmp_path)
    assert of_build == f"{path}:build|"
    found = load_code(CodeLocation(of_build.partition("|")[0]))
    assert found(5) == 5
    assert load_code(CodeLocation(of_class.partition("|")[0])).__name__ == "Fix"
    assert not code_location.LOADING


def test_a_module_of_a_package_is_found_by_its_name_and_the_folder_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").write_text("VALUE = 3\n")
    (package / "inner" / "made.py").write_text(
        SCRIPT.replace("return cfg", "return cfg + VALUE").replace("import sys", "import sys\nfrom . import VALUE", 1)
    )
    assert _run(["-m", "some_package.inner.made"], tmp_path)[0] == f"some_package.inner.made:build|{tmp_path}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_code(CodeLocation("some_package.inner.made:build", str(tmp_path)))(4) == 7
    sys.modules.pop("some_package", None)


def _outer() -> Any:
    def inner() -> None: ...

    return inner


class _Holder:
    def build(self) -> None: ...


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda cfg: cfg, "is a lambda"),
        (_outer(), "defined inside another one"),
        (_Holder.build, "part of a class"),
        (functools.partial(_outer), "is a partial, not a function"),
        (7, "is a int"),
    ],
)
def test_what_has_no_place_of_its_own_is_one_clear_line(found: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        locate_code(found, "build")
    assert "top level of a file" in str(caught.value)


def test_a_notebook_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = types.ModuleType("__main__")
    exec("def build(cfg): ...", vars(cell))  # noqa: S102 - as a notebook does
    monkeypatch.setitem(sys.modules, "__main__", cell)
    with pytest.raises(InputError, match="in a notebook, or at the prompt"):
        locate_code(cell.build, "build")


def test_a_name_that_means_something_else_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_module")
    exec("def build(cfg): ...\nfirst = build\ndef build(cfg): ...", vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, "some_module", module)
    with pytest.raises(InputError, match="is something else by now"):
        locate_code(module.first, "build")


def test_a_written_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert locate_code("train.py:build", "build") == CodeLocation(f"{tmp_path / 'train.py'}:build")
    assert locate_code("package.train:build", "build") == CodeLocation("package.train:build", str(tmp_path))
    for text, said in (("train.py", "names no function"), ("other.py:build", "no such file"), ("train.py:a-b", "names no function")):
        with pytest.raises(InputError, match=said):
            locate_code(text, "build")


def test_a_module_that_fails_or_lacks_the_name_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_broken.py").write_text("raise RuntimeError('planted')")
    (tmp_path / "some_whole.py").write_text("def build(cfg): ...")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError, match="some_broken cannot be imported: RuntimeError: planted"):
        load_code(CodeLocation("some_broken:build", str(tmp_path)))
    with pytest.raises(InputError, match="some_whole has no 'biuld'; did you mean 'build'"):
        load_code(CodeLocation("some_whole:biuld", str(tmp_path)))
    with pytest.raises(InputError, match=r"some_broken\.py:1: RuntimeError: planted"):
        load_code(CodeLocation(f"{tmp_path / 'some_broken.py'}:build"))
    assert not code_location.LOADING

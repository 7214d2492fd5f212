"""What is installed equals what is in the tree: an editable install hides a package that the wheel lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = CONFIG["tool"]["setuptools"]
TOP = {"gpudiag": "gpudiag", "gpudiag_dashboard": "dashboard", "gpudiag_rules": "rules"}
"""Import name -> folder."""


def _folder(package: str) -> Path:
    top, *rest = package.split(".")
    return ROOT.joinpath(TOP[top], *rest)


def _packages() -> set[str]:
    """Return the dotted name of every folder with an __init__.py."""
    return {
        ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
        for name, folder in TOP.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }


def _data_files() -> Iterator[Path]:
    for folder in TOP.values():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix not in {".py", ".pyc"} and not path.name.startswith("."):
                yield path


def _globs() -> Iterator[tuple[Path, str]]:
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            yield _folder(package), pattern


def test_the_list_of_packages_equals_the_folders() -> None:
    assert dict(TOP) == {"gpudiag": "gpudiag"} | SETUPTOOLS["package-dir"]
    assert sorted(SETUPTOOLS["packages"]) == sorted(_packages())


def test_every_folder_with_code_is_a_package() -> None:
    with_code = {path.parent for folder in TOP.values() for path in (ROOT / folder).rglob("*.py")}
    assert with_code == {_folder(package) for package in _packages()}


def test_every_data_file_is_matched_by_package_data() -> None:
    matched = {path for folder, pattern in _globs() for path in folder.glob(pattern)}
    assert sorted(set(_data_files()) - matched) == []


def test_every_package_data_pattern_matches_something() -> None:
    assert [(str(folder), pattern) for folder, pattern in _globs() if not list(folder.glob(pattern))] == []


def test_every_pinned_version_fits_the_declared_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    texts = [*CONFIG["project"]["dependencies"], *(text for extra in CONFIG["project"]["optional-dependencies"].values() for text in extra)]
    declared = {canonicalize_name(item.name): item for item in map(Requirement, texts) if item.name != "gpudiag"}
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pins: dict[str, list[str]] = {}
    for item in map(Requirement, lines):
        (pin,) = item.specifier
        assert pin.operator == "=="
        assert "+" not in pin.version, f"{item}: a local version exists in one index only"
        pins.setdefault(canonicalize_name(item.name), []).append(pin.version)
    assert set(declared) <= set(pins), f"not pinned: {set(declared) - set(pins)}"
    assert all(item.specifier.contains(version) for name, item in declared.items() for version in pins[name])


def test_the_conda_recipe_asks_for_what_the_project_asks_for() -> None:
    from packaging.requirements import Requirement

    recipe = yaml.safe_load((ROOT / "release" / "recipe.yaml").read_text(encoding="utf-8"))
    declared = {item.name: str(item.specifier) for item in map(Requirement, CONFIG["project"]["dependencies"])}
    asked = dict(text.split(" ", 1) for text in recipe["requirements"]["run"])
    assert asked.pop("python") == CONFIG["project"]["requires-python"]
    assert {name.removeprefix("python-"): bound for name, bound in asked.items()} == declared
    assert recipe["context"]["version"] == CONFIG["project"]["version"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that building leaves no folders in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*TOP.values(), "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_and_no_other_top_level_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if fnmatch(name, "gpudiag-*.dist-info/*"))
    assert {name.split("/")[0] for name in names} == {*TOP, info}
    expected = {
        "/".join([package, *path.relative_to(ROOT / folder).parts])
        for package, folder in TOP.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
    }
    assert {name for name in names if not name.startswith(info)} == expected
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_source_distribution_brings_no_documentation_and_no_picture(source: Path, tmp_path: Path) -> None:
    code = f"import setuptools.build_meta as build; print(build.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(made, tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (folder / "README.md").exists()
    assert (folder / "gpudiag" / "__init__.py").exists()
    assert not (folder / "docs").exists()
    assert list(folder.rglob("*.png")) == []


@pytest.mark.slow
def test_the_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import gpudiag, gpudiag_rules; from gpudiag.cli import main\n"
        "assert gpudiag.__file__.startswith(sys.argv[1]) and gpudiag_rules.__file__.startswith(sys.argv[1])\n"
        "sys.argv = ['gpudiag', 'rules', 'list']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rules = {path.stem.upper() for path in (ROOT / "rules").glob("*/*.yaml")}
    assert rules
    assert not [rule for rule in rules if rule not in done.stdout.upper()]

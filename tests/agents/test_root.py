"""Paths that an agent names: nothing outside of the root, by whatever way it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpudiag.agents.root import confine_path
from gpudiag.errors import InputError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a trace in it, and a secret beside it."""
    (tmp_path / "root" / "runs").mkdir(parents=True)
    (tmp_path / "root" / "runs" / "trace.json").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "root2").mkdir()
    return (tmp_path / "root").resolve()


@pytest.mark.parametrize("given", ["runs/trace.json", "./runs/../runs/trace.json", "{root}/runs/trace.json"])
def test_what_lies_inside_is_named_from_the_root(root: Path, given: str) -> None:
    assert confine_path(root, given.format(root=root)) == "runs/trace.json"


def test_the_root_itself_and_a_link_inside(root: Path) -> None:
    (root / "link").symlink_to(root / "runs")
    assert confine_path(root, ".") == "."
    assert confine_path(root, "link/trace.json") == "runs/trace.json"


@pytest.mark.parametrize("given", ["../secret.json", "{root}/../secret.json", "/etc/passwd", "runs/../../secret.json", "../root2", "~/x"])
def test_what_lies_outside_is_refused(root: Path, given: str) -> None:
    with pytest.raises(InputError, match=r"outside|no such"):
        confine_path(root, given.format(root=root))


def test_whether_there_is_something_outside_is_not_told(root: Path) -> None:
    said = set()
    for name in ("secret.json", "nothing.json"):
        with pytest.raises(InputError) as error:
            confine_path(root, f"../{name}")
        said.add(str(error.value).replace(name, "X"))
    assert len(said) == 1


def test_links_that_lead_out_are_refused_as_files_and_within_folders(root: Path) -> None:
    (root / "out.json").symlink_to(root.parent / "secret.json")
    (root / "job").mkdir()
    (root / "job" / "rank0.json").symlink_to(root.parent / "secret.json")
    with pytest.raises(InputError, match="outside"):
        confine_path(root, "out.json")
    with pytest.raises(InputError, match=r"job/rank0\.json is a link that leads out"):
        confine_path(root, "job")


@pytest.mark.parametrize("given", ["", "  ", "a\0b", "s3://bucket/trace.json", "file:///etc/passwd", "runs/*.json", "x" * 5_000])
def test_what_is_no_path_is_refused(root: Path, given: str) -> None:
    with pytest.raises(InputError):
        confine_path(root, given)


def test_what_is_neither_file_nor_folder_is_refused(root: Path) -> None:
    os.mkfifo(root / "pipe.json")
    (root / "circle").symlink_to(root / "circle")
    for name in ("pipe.json", "circle"):
        with pytest.raises(InputError):
            confine_path(root, name)

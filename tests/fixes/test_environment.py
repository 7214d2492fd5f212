"""Fixes that are variables of the environment: malloc's thresholds, and the options of the CUDA allocator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpudiag.capture.hooks import Patches
from gpudiag.fixes.fix import NotAppliedError, Site
from gpudiag.fixes.memory import AllocConf, Malloc, NoEmptyCache, build_alloc_conf

_GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})

_PROGRAM = """
from gpudiag.capture.hooks import Patches
from gpudiag.fixes.fix import NotAppliedError, Site
from gpudiag.fixes.memory import Malloc
fix, site = Malloc(), Site(Patches())
fix.install(site)
try:
    print(fix.evidence(site))
except NotAppliedError as error:
    print("no:", error)
"""


def said_with(environ: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env={**kept, **environ}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(not _GLIBC, reason="the variables are glibc's")
def test_malloc_takes_large_blocks_from_the_heap_only_with_the_variables() -> None:
    assert "still maps blocks of 192 MiB one by one" in said_with({})
    assert "still maps" in said_with({"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "268435456"})
    said = said_with(dict(Malloc.environ))
    assert said.startswith("glibc ")
    assert said.endswith("takes 192 MiB from the heap, and maps 512 MiB") or "still maps" in said  # glibc before 2.35 takes 32 MiB at most


def test_another_c_library_has_no_such_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown, raising=False)
    with pytest.raises(NotAppliedError, match="this C library is another one"):
        Malloc().install(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "conf"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128,expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"},
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:1"}, "a:1,expandable_segments:True"),
    ],
)
def test_the_option_stands_beside_what_is_configured(before: dict[str, str], conf: str) -> None:
    assert build_alloc_conf(before) == {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}


def test_an_option_that_is_set_already_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    environ = AllocConf().environ
    assert "PYTORCH_ALLOC_CONF" not in environ
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotAppliedError, match="is started with expandable_segments:True already"):
        AllocConf().install(None)  # type: ignore[arg-type]


def test_calls_that_give_memory_back_to_the_driver_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    patches, fix = Patches(), NoEmptyCache()
    site = Site(patches)
    fix.install(site)
    with pytest.raises(NotAppliedError, match="never calls"):
        fix.evidence(site)
    torch.cuda.empty_cache()
    assert fix.evidence(site).startswith("1 calls")
    patches.restore()
    torch.cuda.empty_cache()
    assert calls == [1]

"""The validation on a GPU: what it reads of other programs, how it judges, and that what could not be checked is never called right."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.model.experiment import Outcome, Pair
from gpudiag.model.hardware import Device

GPU = Path(__file__).resolve().parents[2] / "samples" / "gpu"


@pytest.fixture(autouse=True)
def _samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of samples/gpu are importable, and gone again afterwards."""
    monkeypatch.syspath_prepend(str(GPU))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(GPU) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def job(tmp_path: Path) -> Any:
    from validation.rows import Job

    return Job("part", "cuda", tmp_path, 100.0)


def verdicts(job: Any) -> dict[str, str]:
    from validation.rows import read

    return {row.claim: row.verdict for row in read(job.out)}


# -- rows -----------------------------------------------------------------------------------------------------------------


def test_rows_are_kept_one_by_one_and_a_cut_line_is_left_out(job: Any) -> None:
    from validation.rows import read

    job.add("a | b", "1", "2\n3", False, "why")
    job.not_run("c", "no GPU")
    with open(job.out / "rows" / "part.jsonl", "ab") as file:
        file.write(b'{"part": "part", "cl')
    job.add("d", "-", "1", None)
    assert [(row.claim, row.verdict) for row in read(job.out)] == [("a | b", "DOES NOT HOLD"), ("c", "not run"), ("d", "told")]
    assert "| a / b | 1 | 2 3 | DOES NOT HOLD | why |" in (job.out / "VALIDATION.md").read_text()
    assert json.loads((job.out / "results.json").read_bytes())["rows"][1]["note"] == "no GPU"


def test_what_has_no_time_left_is_not_run(tmp_path: Path) -> None:
    from validation.rows import Job

    job = Job("part", "cuda", tmp_path, 10.0)
    assert job.has_time("short", 5.0)
    assert not job.has_time("long", 20.0)
    assert verdicts(job) == {"long": "not run"}


# -- the script -----------------------------------------------------------------------------------------------------------


def test_time_that_a_part_leaves_goes_to_those_after_it() -> None:
    import validate

    names = list(validate.PARTS)
    shares, left_s = [], 540.0
    for place in range(len(names)):
        shares.append(validate.share(names[place:], left_s))
        left_s -= shares[-1]
    assert sum(shares) == pytest.approx(540.0)
    assert validate.share(names[-2:], shares[-2] + shares[-1] + 100.0) > shares[-2]


@pytest.mark.parametrize("arguments", [["--parts", "peeks"], ["--parts", ""], ["--budget", "soon"]])
def test_what_cannot_be_asked_for_is_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import validate

    assert validate.main(["--device", "cpu", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_gpu_nothing_is_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import validate

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert validate.main(["--out", str(tmp_path / "out")]) == 2
    assert "sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_is_said_and_its_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the script: its part keeps a row, then dies, or starts a process of its own and hangs."""
    import validate
    from validation.rows import read

    stand_in = tmp_path / "part.py"
    stand_in.write_text(
        textwrap.dedent(f"""
        import pathlib, subprocess, sys, os, time
        sys.path.insert(0, {str(GPU)!r})
        from validation.rows import Job
        name, out = sys.argv[3], pathlib.Path(sys.argv[7])
        Job(name, "cpu", out, 1).add("first", "1", "1", True)
        if name == "peaks":
            os.abort()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (out / "child").write_text(str(child.pid))
        time.sleep(600)
        """)
    )
    monkeypatch.setattr(validate, "__file__", str(stand_in))
    monkeypatch.setattr(validate, "GRACE_S", 0.0)
    validate.run_part("peaks", "cpu", tmp_path, 60.0)
    validate.run_part("figures", "cpu", tmp_path, 10.0)
    validate.run_part("fixes", "cpu", tmp_path, -1.0)
    found = {name: [row.verdict for row in read(tmp_path) if row.part == name] for name in ("peaks", "figures", "fixes")}
    assert found == {"peaks": ["holds", "ERROR"], "figures": ["holds", "not run"], "fixes": ["not run"]}
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


# -- Nsight Compute -------------------------------------------------------------------------------------------------------

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
HEADINGS = ["ID", "Process ID", "Kernel Name", RANGE, "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"]


def printed(kernels: list[tuple[str, tuple[str, ...]]], units: tuple[str, ...] = ("byte", "byte", "nsecond", "%", "%")) -> str:
    """Return what `ncu --csv --page raw` prints, after its documentation: lines of its own, headings, units, a row a kernel."""
    from validation.ncu import METRICS

    rows = [[*HEADINGS, *METRICS], [*([""] * len(HEADINGS)), *units]]
    for number, (name, values) in enumerate(kernels):
        nested = f'1  "<default domain>:outer:none:none:none:none:none:none"  "<default domain>:{name}:none:none:none:none:none:none"'
        rows.append([str(number), "77", 'kernel<a, "b">', nested, "", *values])
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    return "\n".join(
        ["==PROF== Connected to process 77 (/usr/bin/python3)", "of the program", *quoted, "==PROF== Disconnected from process 77"]
    )


def test_kernels_are_summed_by_the_range_of_their_op() -> None:
    from validation.ncu import counted

    found = counted(
        printed(
            [
                ("gpudiag-op.adamw for-loop", ("1,000", "500", "100", "20", "80")),
                ("gpudiag-op.adamw for-loop", ("3000", "500", "300", "60", "40")),
                ("another range", ("1", "1", "1", "1", "1")),
                ("gpudiag-op.cat bf16", ("8", "n/a", "1", "1", "1")),
            ]
        )
    )
    assert list(found) == ["adamw for-loop"]  # what lacks a figure is left out, not 0
    one = found["adamw for-loop"]
    assert (one.kernels, one.dram_bytes, one.time_ns) == (2, 5000.0, 400.0)
    assert (one.sm_share, one.dram_share) == (pytest.approx(0.5), pytest.approx(0.5))  # weighted by time


def test_units_that_ncu_chose_itself_are_converted_and_unknown_ones_are_not_guessed() -> None:
    from validation.ncu import counted

    row = ("gpudiag-op.add fp32", ("1.5", "500", "2", "10", "90"))
    found = counted(printed([row], ("Gbyte", "Mbyte", "usecond", "%", "%")))["add fp32"]
    assert (found.dram_bytes, found.time_ns) == (2e9, 2000.0)
    assert counted(printed([row], ("furlong", "Mbyte", "usecond", "%", "%"))) == {}


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters", "ERR_NVGPUCTRPERM"),
        ("==PROF== Connected\n==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", "LibraryNotLoaded"),
        ("==PROF== Connected to process 1\n==WARNING== No kernels were profiled.", None),
    ],
)
def test_why_nothing_was_counted(output: str, why: str | None) -> None:
    from validation.ncu import counted, why_not

    assert counted(output) == {}
    found = why_not(output)
    assert found is None if why is None else why in (found or "")


def test_names_of_ops_can_be_told_in_what_ncu_prints() -> None:
    from validation.ncu import counted
    from validation.ops import MARK, OPS

    assert len(OPS) >= 30
    assert list(counted(printed([(MARK + name, ("1", "1", "1", "1", "1")) for name in OPS]))) == list(OPS)


def test_counters_judge_bytes_and_class(job: Any) -> None:
    from validation.counters import Predicted, by_counters
    from validation.ncu import Counted

    memory = Predicted("memory", 1e9, 1e6, 1e6, 1.1e6, "exact")
    product = Predicted("compute", 1e9, 1e12, 1e6, 1.2e6, "exact")
    counted = {
        "add": Counted(1, 1.1e9, 1e6, 0.2, 0.9),
        "norm": Counted(2, 1.3e9, 1e6, 0.9, 0.4),
        "gemm": Counted(1, 2e9, 1e6, 0.9, 0.2),
    }
    by_counters(job, {"add": memory, "norm": memory, "gemm": product, "lost": memory}, counted)
    found = verdicts(job)
    assert found["add: DRAM bytes"] == found["add: bound"] == found["gemm: bound"] == "holds"
    assert found["norm: DRAM bytes"] == found["norm: bound"] == found["gemm: DRAM bytes"] == "DOES NOT HOLD"
    assert found["lost"] == "not run"
    assert found["judged by ncu: class right"] == "DOES NOT HOLD"  # 2 of 3
    table = (job.out / "VALIDATION.md").read_text()
    assert "1 of 2; of all 1 of 3" in table
    assert "tiles that no longer fit" in table
    assert "intermediate results of several kernels" in table


@pytest.mark.parametrize(
    ("growth", "roof_share", "flops", "expected"),
    [(7.8, 0.8, 8.0, "compute"), (4.1, 0.8, 8.0, "memory"), (2.0, 0.8, 2.0, "memory"), (2.0, 0.2, 2.0, None)],
)
def test_without_counters_the_growth_of_time_tells_or_it_is_said_that_nothing_does(
    growth: float, roof_share: float, flops: float, expected: str | None
) -> None:
    from validation.counters import Predicted, followed

    bound = "compute" if expected == "compute" else "memory"
    said = Predicted(bound, 1e9, 1e12, roof_share * 1e6, 1e6, "exact")
    larger = Predicted(bound, 2e9 if flops == 2.0 else 4e9, flops * 1e12, 8e6, 9e6, "exact")
    assert followed(said, larger, growth, 1e6)[0] == expected


# -- other parts ----------------------------------------------------------------------------------------------------------


def test_peaks_are_held_against_the_table(job: Any) -> None:
    from validation.peaks import judge

    table = Device("h200", "H200", "gpu", "datasheet", "", peaks={"bf16": 1e15, "fp8": 2e15, "fp64": 3e13}, bandwidth_byte_per_s=4.8e12)
    measured = Device(
        "h200", "H200", "gpu", "measured", "", peaks={"bf16": 8e14, "fp16": 2e14, "fp8": 2e15, "fp64": 4e13},
        bandwidth_byte_per_s=3e12, launch_floor_ns=2000.0, notes=("Not measured, from the device table: fp64_tensor, fp8.",),
        host_copy_byte_per_s={"h2d pinned": 5e10},
    )  # fmt: skip
    judge(job, measured, table)
    found = verdicts(job)
    assert found["bf16 products"] == "holds"
    assert found["fp64 products"] == "DOES NOT HOLD"  # above the table: its entry is wrong
    assert found["fp16 products"] == found["copy h2d pinned"] == "told"  # not in the table
    assert found["fp8 products"] == "not run"
    assert found["DRAM, best of copy, sum, add"] == "DOES NOT HOLD"
    assert found["launch floor"] == "holds"


def test_outcomes_are_judged_by_what_is_known_of_the_fix(job: Any) -> None:
    from validation.fixes import Group, keep

    def outcome(fix: str, verdict: str, **more: Any) -> Outcome:
        return Outcome(fix=fix, verdict=verdict, ratio=2.0, interval=(1.9, 2.1), **more)  # type: ignore[arg-type]

    group = Group("a", (), {"bf16": "faster", "checkpointing": "less memory", "tf32": "faster", "pin-memory": "applied"})
    keep(job, group, outcome("bf16", "faster", measured=(Pair((1.0,), (2.0,), "samples", together=False),)))
    keep(job, group, outcome("tf32", "inconclusive"))
    keep(job, group, outcome("checkpointing", "slower", memory_ratio=0.5))
    keep(job, group, outcome("pin-memory", "not_applied"))
    keep(job, Group("oom", (), {}, variants=("hold=args:--hold 2",)), Outcome(fix="", variant="hold", verdict="failed", reason="oom"))
    found = verdicts(job)
    assert found["a: bf16"] == found["a: checkpointing"] == found["oom: hold: out of memory is caught"] == "holds"
    assert found["a: tf32"] == found["a: pin-memory"] == found["a: bf16: two frozen CUDA contexts take turns"] == "DOES NOT HOLD"


def test_fixes_that_are_tried_exist() -> None:
    from validation.fixes import ON_A_GPU, REHEARSED

    from gpudiag.fixes import FIX_BY_ID

    tried = {fix.partition("=")[0] for group in (*ON_A_GPU, *REHEARSED) for fix in group.fixes}
    assert tried <= set(FIX_BY_ID)
    untried = {fix.id for fix in FIX_BY_ID.values() if fix.injected and not fix.verified} - tried
    assert not untried, "fixes that only a GPU can show"


def test_tests_are_read_line_by_line_with_their_reasons() -> None:
    from validation.tests import rows_of

    lines = """
    tests/gpu/test_a_gpu.py::test_the_graph[plain-x y] PASSED    [ 25%]
    tests/gpu/test_a_gpu.py::test_two PASSED [ 50%]
    tests/gpu/test_a_gpu.py::test_three FAILED [ 75%]
    tests/gpu/test_a_gpu.py::test_four SKIPPED (needs two GPUs) [100%]
    FAILED tests/gpu/test_a_gpu.py::test_three - AssertionError: 1 != 2
    ERROR tests/gpu/test_b_gpu.py::test_five - ImportError: no module
    """
    found = {row.claim: (row.verdict, row.note) for row in rows_of("tests", textwrap.dedent(lines).splitlines())}
    assert found == {
        "a_gpu: the graph[plain-x y]": ("holds", ""),
        "a_gpu: two": ("holds", ""),
        "a_gpu: four": ("not run", ""),
        "a_gpu: three": ("DOES NOT HOLD", "AssertionError: 1 != 2"),
        "b_gpu: five": ("DOES NOT HOLD", "ImportError: no module"),
    }


@pytest.mark.long
def test_the_rehearsal_on_a_cpu_runs_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / "validate.py"), "--device", "cpu", "--parts", "counters,programs", "--budget", "5m"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=400, check=False)
    rows = json.loads((tmp_path / "results.json").read_bytes())["rows"]
    assert {row["part"] for row in rows} == {"counters", "programs"}, done.stderr
    assert not [row for row in rows if row["verdict"] == "ERROR"]
    assert "needs a GPU" in next(row["note"] for row in rows if row["claim"].startswith("DRAM bytes"))

"""What a run was recorded with, as people read it."""

from __future__ import annotations

import re

import msgspec
import pytest
import report_sample as sample
from rendered import render_html, render_markdown, render_text

from gpudiag.model.bundle import (
    Code,
    CompileCall,
    Compiled,
    DistributedData,
    LoaderSettings,
    Machine,
    OptimizerSettings,
    Program,
    Settings,
    ShardedData,
    Wrappers,
)
from gpudiag.model.report import Recorded, ReportData
from gpudiag.report import environment

RECORDED = Recorded(
    machine=Machine(python="3.12.4", torch="2.7.1+cu126", cuda="12.6", driver="570.86.15", cpu_cores=16),
    settings=Settings(
        cuda_matmul_allow_tf32=False, cudnn_allow_tf32=True, cudnn_benchmark=False, autocast=("cuda:bf16",), threads=8,
        optimizers=(OptimizerSettings("AdamW", 124_439_808, 148, implementation="foreach", channels_last=True),),
        loader=LoaderSettings(4, True, False, 2, 32, drop_last=True, sampler="DistributedSampler", start_method="fork"),
        allocator={"expandable_segments": "True"}, sdp_backends=("flash", "math"),
    ),
    program=Program(
        packages={"torch": "2.7.1+cu126", "transformers": "4.44.0", "numpy": "2.0.0"},
        variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": None},
        code=Code("abcdef0123456789" * 2 + "abcdef01", dirty=True),
        compiled=Compiled(
            calls=(CompileCall(backend="inductor", mode="reduce-overhead", count=2),), graphs=2, graph_breaks=1, generated_kernels=9
        ),
        wrappers=Wrappers(ddp=(DistributedData(world_size=8, bucket_cap_bytes=25 << 20, static_graph=True),), grad_scaler=True),
        activation_checkpointing=True,
    ),
)  # fmt: skip


def report(**changes: object) -> ReportData:
    return sample.report(recorded=msgspec.structs.replace(RECORDED, **changes))


def test_each_line_in_words() -> None:
    assert dict(environment.list_environment(report())) == {
        "versions": "torch 2.7.1+cu126, Python 3.12.4, CUDA 12.6, driver 570.86.15, numpy 2.0.0, transformers 4.44.0",
        "precision": "autocast cuda:bf16, TF32 in matmul off, in convolutions on, GradScaler",
        "switches": "cuDNN benchmark off, expandable_segments True, OMP_NUM_THREADS=1, NCCL_ALGO set",
        "loader": "4 workers, batches of 32, prefetch 2, pinned memory, not persistent, DistributedSampler, last batch dropped",
        "optimizer": "AdamW, foreach (torch's choice), 124 million parameters in 148 tensors",
        "model": "DDP, 8 ranks, buckets of 26.2 MB, static_graph; torch.compile (mode reduce-overhead), 2 graphs, 9 generated kernels, "
        "1 graph break, none recompiled; activation checkpointing; channels_last",
        "code": "commit abcdef012345, with uncommitted changes",
    }  # fmt: skip


def test_a_cpu_run_says_nothing_of_a_gpu() -> None:
    device = msgspec.structs.replace(sample.device(), kind="cpu")
    said = " ".join(line for _, line in environment.list_environment(msgspec.structs.replace(report(), device=device)))
    assert "cuDNN" not in said
    assert "TF32" not in said
    assert "expandable_segments" not in said
    assert "8 threads, 16 cores" in said


def test_fsdp_and_what_is_switched_off() -> None:
    types = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    sharded = ShardedData(version=2, units=24, sharding="reshard after forward", mesh=(2, 4), **types)
    program = Program(wrappers=Wrappers(fsdp=(sharded,), deepspeed_zero_stage=3))
    settings = Settings(sdp_backends=("math",), anomaly_detection=True, cudnn_deterministic=True)
    lines = dict(environment.list_environment(report(program=program, settings=settings)))
    assert lines["model"] == "fully_shard, reshard after forward, 24 units, mesh 2 x 4, bfloat16/float32; DeepSpeed ZeRO 3"
    assert lines["switches"] == "deterministic algorithms, anomaly detection on, fused attention off"


def test_a_trace_alone_has_no_such_section() -> None:
    plain = sample.report()
    assert environment.list_environment(plain) == []
    assert "Environment" not in render_text(plain) + render_markdown(plain) + render_html(plain)


@pytest.mark.parametrize("render", [render_text, render_markdown, render_html], ids=["text", "markdown", "html"])
def test_every_format_has_the_section_after_the_ops(render: object) -> None:
    page = render(report())  # type: ignore[operator]
    assert "reduce-overhead" in page
    assert page.index("Top ops by time" if render is not render_html else "Top ops by time <span") < page.index("Environment")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_section_is_short_and_fits(width: int) -> None:
    lines = render_text(report(), width=width).splitlines()
    assert max(map(len, lines)) <= width
    section = lines[lines.index("Environment") :]
    assert width < 100 or section.index("") <= 12


@pytest.mark.parametrize("hostile", sample.HOSTILE, ids=range(len(sample.HOSTILE)))
def test_hostile_names_are_harmless(hostile: str) -> None:
    bad = msgspec.structs.replace(
        RECORDED,
        machine=Machine(torch=hostile, driver=hostile),
        program=Program(packages={hostile: hostile}, variables={hostile: hostile}, code=Code(hostile)),
        settings=Settings(
            autocast=(hostile,), optimizers=(OptimizerSettings(hostile, 1, 1),), loader=LoaderSettings(1, True, True, sampler=hostile)
        ),
    )
    made = sample.report(recorded=bad)
    plain = render_text(made)
    assert [character for character in plain if not character.isprintable() and character != "\n"] == []
    assert "<script>alert" not in render_html(made)
    assert "<img src=x" not in render_html(made)
    assert not re.search(r"(?<!\\)<(img|script)", render_markdown(made))


@pytest.mark.parametrize(
    ("dirty", "tracked", "said"),
    [
        (False, True, "commit abcdefabcdef, nothing changed since"),
        (False, False, "commit abcdefabcdef, no tracked file changed since, the script is not in git"),
        (False, None, "commit abcdefabcdef, no tracked file changed since"),
        (None, True, "commit abcdefabcdef, changes unknown"),
        (True, False, "commit abcdefabcdef, with uncommitted changes, the script is not in git"),
    ],
)
def test_a_commit_says_what_it_covers(dirty: bool | None, tracked: bool | None, said: str) -> None:
    program = Program(code=Code("abcdef" * 6 + "abcd", dirty=dirty, script_tracked=tracked))
    assert dict(environment.list_environment(report(program=program)))["code"] == said

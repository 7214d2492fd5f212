"""Facts about the exchange of gradients: planted messages with known answers, and real traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kept
import msgspec
import pytest
from factories import Work, analysis, gap, kernel, mark, op, table

from gpudiag.analysis import analyse
from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.inputs import resolve_input
from gpudiag.model.finding import Missing

MB = 1 << 20
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def send(start: float, end: float, **changes: Any) -> Work:
    return kernel(
        "record_param_comms", start, end, name=NCCL, collective=True, stream=20, bound="communication", phase="backward", **changes
    )


def back(start: float, end: float) -> Work:
    return kernel("aten::mm", start, end, phase="backward")


def facts(work: list[Work], sizes: dict[int, int], *, exposed: float = 0, **more: Any) -> Facts:
    """Return the facts of `work`; `sizes`: row of the work -> bytes of its message, in two ranks."""
    found = analysis(work, wall=1000, buckets={"exposed_communication": exposed}, **more)
    rows = [
        {"kernel": k, "name": "allreduce", "size": 2, "in_elements": b // 4, "out_elements": b // 4, "dtype": "Float"}
        for k, b in sizes.items()
    ]
    return Facts(msgspec.structs.replace(found, trace=msgspec.structs.replace(found.trace, collectives=table("collectives", rows))))


def test_one_bucket_after_the_backward_pass_is_late() -> None:
    """500 us of backward, then 400 us alone for 100 MiB: all but the last 25 MiB (a quarter) could run beside it."""
    found = facts([back(0, 500), send(500, 900)], {1: 100 * MB}, exposed=400)
    assert found.value("gradient_buckets") == "late"
    assert found.value("gradient_start_share") == pytest.approx(1.0)
    assert found.value("gradient_exposed_ns") == 400_000
    assert found.value("rebucketed_ns") == pytest.approx(300_000)
    assert found.value("rebucketed_share") == pytest.approx(0.3)


def test_a_late_bucket_gains_no_more_than_there_is_to_hide_it_under() -> None:
    found = facts([back(0, 100), send(100, 900)], {1: 100 * MB}, exposed=800)
    assert found.value("rebucketed_ns") == pytest.approx(100_000)


def test_small_messages_cost_latency_but_for_one() -> None:
    work = [back(0, 100), *(send(100 + 10 * i, 110 + 10 * i) for i in range(20))]
    found = facts(work, {i + 1: MB for i in range(20)}, exposed=200)
    assert found.value("gradient_buckets") == "small"
    assert found.value("gradient_messages_per_pass") == 20
    assert found.value("rebucketed_ns") == pytest.approx(200_000 * 19 / 20)


def test_buckets_of_the_default_size_under_the_backward_pass_are_fine() -> None:
    found = facts([back(0, 800), send(200, 400), send(800, 900)], {1: 25 * MB, 2: 25 * MB}, exposed=100)
    assert found.value("gradient_buckets") == "fine"
    assert found.value("rebucketed_ns") == 0


def test_sizes_that_were_not_recorded_are_unknown_and_not_small() -> None:
    found = facts([back(0, 800), *(send(800 + i, 801 + i) for i in range(12))], {}, exposed=12)
    assert isinstance(found.value("gradient_message_bytes"), Missing)
    assert isinstance(found.value("gradient_buckets"), Missing)


def accumulation(sent: tuple[int, ...], optimizer_after: tuple[int, ...] = (3,)) -> Facts:
    """Four micro-batches of 200 us: forward at 0, backward at 100, and a message at 150 in those of `sent`."""
    work = [back(200 * i + 100, 200 * i + 150) for i in range(4)]
    work += [send(200 * i + 150, 200 * i + 190) for i in sent]
    marks = [mark("DistributedDataParallel.forward", 200 * i, 200 * i + 50) for i in range(4)]
    marks += [mark("Optimizer.step#SGD.step", 200 * i + 195, 200 * i + 199) for i in optimizer_after]
    return facts(work, {}, exposed=40 * len(sent), marks=marks)


def test_an_exchange_after_each_micro_batch_repeats_three_of_four() -> None:
    found = accumulation((0, 1, 2, 3))
    assert found.value("exchanges_per_update") == 4
    assert found.value("repeated_exchange_ns") == pytest.approx(120_000)


def test_one_exchange_an_update_repeats_nothing() -> None:
    assert accumulation((3,)).value("exchanges_per_update") == 1
    assert accumulation((0, 1, 2, 3), optimizer_after=(0, 1, 2, 3)).value("exchanges_per_update") == 1
    assert accumulation((3,)).value("repeated_exchange_ns") == 0


def test_two_models_before_one_backward_pass_are_no_accumulation() -> None:
    marks = [mark("DistributedDataParallel.forward", at, at + 20) for at in (0, 30)] + [mark("Optimizer.step#Adam.step", 900, 950)]
    found = facts([back(100, 200), send(200, 300), send(300, 400)], {}, marks=marks)
    assert found.value("exchanges_per_update") == 1


BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def sent_before(start: float, end: float, *, at: float = 20, seen: bool = True, trains: bool = True, idle: float = 0) -> Facts:
    """A broadcast before a forward pass of 0 to 300 us whose first op that autograd numbers begins at 100 us."""
    sent = kernel("record_param_comms", start, end, name=BROADCAST, collective=True, bound="communication", phase="forward", launched=at)
    marks = [mark("DistributedDataParallel.forward", 0, 300)] if seen else []
    numbered = {**op("aten::linear", 100, 110, "forward"), "sequence": 1 if trains else None}
    waits = [gap(80, 80 + idle, cause="idle_launch")] if idle else []
    return facts([sent, kernel("aten::mm", 110, 400), back(400, 600)], {}, marks=marks, ops=[numbered], idle=waits)


def test_buffers_are_what_is_sent_before_the_forward_pass_begins() -> None:
    assert sent_before(30, 70).value("buffer_broadcast_ns") == 40_000
    assert sent_before(30, 70, idle=30).value("buffer_broadcast_ns") == 60_000, "20 of the 30 us lie before the first op of the pass"
    assert sent_before(400, 450, at=150).value("buffer_broadcast_ns") == 0, "one that the model sends itself"
    assert sent_before(30, 70, trains=False).value("buffer_broadcast_ns") == 0, "when a pass without a graph begins is not told"
    assert isinstance(sent_before(30, 70, seen=False).value("buffer_broadcast_ns"), Missing)
    assert facts([back(0, 500), send(500, 900)], {}).value("buffer_broadcast_ns") == 0


QUEUE = """
import sys, time, torch
import torch.distributed as dist
from gpudiag import profile
dist.init_process_group("gloo")

def build(**options):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    model.register_buffer("queue", torch.zeros(16_000_000))
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)

def step(model):
    began = time.perf_counter()
    model(torch.ones(64, 256)).square().mean().backward()
    model.zero_grad()
    return time.perf_counter() - began

sent, kept = build(), build(broadcast_buffers=False)
times = [(step(sent), step(kept)) for _ in range(20)][5:]
print("gain", 1 - sorted(time for _, time in times)[7] / sorted(time for time, _ in times)[7])
with profile("run", skip=5, warm=1, record=6, sites=0, telemetry_hz=0) as prof:
    for _ in prof.steps(range(30)):
        step(sent)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_queue_of_samples_that_is_sent_in_each_pass(tmp_path: Path) -> None:
    """64 MB before each pass, as a queue of keys that is a buffer: a step without it takes less than half the time."""
    (tmp_path / "train.py").write_text(QUEUE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    gain = min(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("gain"))
    found = analyse(resolve_input(str(tmp_path / "run"), 0), lambda _: None)
    share = Facts(found).value("buffer_broadcast_share")
    assert gain > 0.4
    assert isinstance(share, float)
    assert share > 0.5 * gain, "both are noisy on a busy machine"
    outcome = next(one for one in judge(found, load_rules()).outcomes if one.id == "DST-02")
    assert outcome.status == "fired"


def test_one_process_exchanges_nothing() -> None:
    found = facts([back(0, 100)], {})
    for name in ("gradient_exposed_ns", "gradient_buckets", "exchanges_per_update", "rebucketed_share", "all_to_all_exposed_ns"):
        assert isinstance(found.value(name), Missing)


def test_what_most_of_the_exchange_is_for_goes_by_time() -> None:
    other = kernel("record_param_comms", 400, 700, name="ncclDevKernel_SendRecv(x)", collective=True, phase="forward")
    assert facts([back(0, 100), send(100, 399), other], {}).value("longest_exchange") == "point_to_point"
    assert facts([back(0, 100), send(100, 401), other], {}).value("longest_exchange") == "gradients"
    early = kernel("record_param_comms", 100, 401, name=NCCL, collective=True, phase="forward")
    assert facts([back(0, 100), early, other], {}).value("longest_exchange") == "all_reduce"
    assert isinstance(facts([back(0, 100)], {}).value("longest_exchange"), Missing)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (
            "v100_ddp2_inductor_train_rank1.json.gz",
            {"gradient_messages_per_pass": 404, "gradient_buckets": "small", "longest_exchange": "gradients"},
        ),
        (
            "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz",
            {
                "gradient_messages_per_pass": 2,
                "gradient_bytes_per_step": 23_379_024,
                "gradient_buckets": "fine",
                "exchanges_per_update": 1,
                "buffer_broadcast_ns": 49_162,  # 38.4 KB and 40 numbers of batch norms, 3 steps of 18.8 ms: nothing to say
            },
        ),
        (
            "a100_dlrm_train_rank3of8.json.gz",
            {
                "gradient_messages_per_pass": 3,
                "exchanges_per_update": 1,
                "all_to_all_per_step": 7,
                "all_to_all_carries": "embeddings",
                "longest_exchange": "all_to_all",
            },
        ),
    ],
)
def test_real_traces(traces: Path, name: str, known: dict[str, Any]) -> None:
    """Counts by hand: 2,020 all-reduces over 5 steps; 6 over 3 steps of ResNet-18; 18 and 42 exchanges over 6 steps."""
    found = Facts(kept.analysis(traces / name))
    assert {fact: found.value(fact) for fact in known} == known

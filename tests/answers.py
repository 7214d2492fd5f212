"""Ask gpudiag about recordings of real GPUs whose answers are known, and print what it says beside the truth: `make answers`.

The recordings and their truths are those of ../shared/evidence (its README.md has sources and licences); none is part of the project.
Exit code 1 where an answer is missed, 2 where the recordings are not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gpudiag import api
from gpudiag.fixes import FIX_BY_ID
from gpudiag.units import format_ns, format_share

EVIDENCE = Path(__file__).resolve().parents[2] / "shared" / "evidence"

Report = dict[str, Any]
Answer = Callable[[Report], tuple[str, bool]]
"""Returns what a report says, and whether it agrees with the truth."""


class Case(NamedTuple):
    """A recording, what is known of it, what gpudiag said at commit 877df10, and how to read its answer."""

    file: str
    truth: str
    before: str
    answer: Answer


def takes(ms: float, off: float) -> Answer:
    """Return the answer that a step takes `ms`, give or take the share `off`."""

    def read(report: Report) -> tuple[str, bool]:
        found = report["breakdown"]["wall_ns"] / max(report["steps"]["count"], 1) / 1e6
        mfu = report["mfu"]
        said = f"a step takes {format_ns(found * 1e6)}" + (f", MFU {format_share(mfu['share'])}" if mfu else "")
        return said, abs(found / ms - 1) <= off and (mfu is None or mfu["share"] <= 1)

    return read


def idles(least: float, most: float, cause: str | None = None) -> Answer:
    """Return the answer that the device is idle for such a share of the time, of all causes or of one."""

    def read(report: Report) -> tuple[str, bool]:
        buckets = report["breakdown"]["buckets_ns"]
        chosen = [name for name in buckets if name.startswith("idle_") and cause in (None, name)]
        share = sum(buckets[name] for name in chosen) / report["breakdown"]["wall_ns"]
        return f"{cause or 'idle'} {format_share(share)}", least <= share <= most

    return read


def finds(rule: str, least: float = 0.0, most: float = 1.0, *, fix: str | None = None) -> Answer:
    """Return the answer that this rule fires with an upper bound within these shares, and offers `fix`."""

    def read(report: Report) -> tuple[str, bool]:
        found = next((one for one in report["findings"] if one["rule"] == rule), None)
        if found is None:
            return f"{rule} does not fire", False
        bound = found["ceiling"]["share"] if found["ceiling"] else None
        fits = bound is not None and least <= bound <= most
        offered = fix is None or fix in found["fixes"]
        return f"{rule}: up to {format_share(bound)}" + ("" if offered else f", {fix} not offered"), fits and offered

    return read


def does_not_sell(*fixes: str) -> Answer:
    """Return the answer that no finding above a note offers one of `fixes`."""
    assert FIX_BY_ID.keys() >= set(fixes), fixes

    def read(report: Report) -> tuple[str, bool]:
        sold = [f"{one['rule']} {fix}" for one in report["findings"] for fix in one["fixes"]
                if fix in fixes and one["severity"] != "info"]  # fmt: skip
        return ", ".join(sold) or f"{' or '.join(fixes)} not offered", not sold

    return read


def links_all(report: Report) -> tuple[str, bool]:
    """Return the share of the kernels that are linked to the call that launched them."""
    share = report["trust"]["linked_share"]
    return f"{format_share(share)} linked", share == 1


def runs_on(device: str) -> Answer:
    """Return the answer that this device was analysed."""
    return lambda report: (report["device"]["name"], device in report["device"]["name"])


def names_straggler(rank: int) -> Answer:
    """Return the answer that this rank of the job is late, and that the others wait for it."""

    def read(report: Report) -> tuple[str, bool]:
        facts = [fact for one in report["findings"] if one["rule"] == "DST-06" for fact in one["evidence"]]
        late = [fact["value"] for fact in facts if fact["fact"] == "late_rank"]
        return f"DST-06: rank {late[0]} is late" if late else "DST-06 does not fire", late == [str(rank)]

    return read


def gains(setting: str, least: float, most: float) -> Answer:
    """Return the answer that a what-if, one of the standard ones, gains such a share of a step."""

    def read(report: Report) -> tuple[str, bool]:
        share = next((one["share"] for one in report["what_ifs"] if one["name"] == setting), None)
        return f"{setting}: {format_share(share)}", share is not None and least <= share <= most

    return read


def both(*answers: Answer) -> Answer:
    """Return all answers as one."""

    def read(report: Report) -> tuple[str, bool]:
        parts = [answer(report) for answer in answers]
        return "; ".join(said for said, _ in parts), all(right for _, right in parts)

    return read


CASES = (
    Case("traces/rtx3060_gpt_04.json.gz", "a step takes 22.9 ms", "7.55 ms, MFU 118.9 %", takes(22.9, 0.03)),
    Case("traces/rtx3060_gpt_05.json.gz", "22.9 ms; CUDA graphs gain nothing", "2.43 ms",
         both(takes(22.9, 0.03), does_not_sell("cuda-graphs", "compile-reduce-overhead"))),
    Case("traces/rtx3060_gpt_06.json.gz", "170 ms", "2.42 ms", takes(170, 0.03)),
    Case("nsys/a100_gpt2.7b_compile_graph.sqlite", "a graph launch takes 781 ms", "616 us", takes(781, 0.01)),
    Case("nsys/a100_gpt2.7b_eager.sqlite", "841 ms, 91 % fp32 sgemm", "one step of 8.44 s, no finding",
         both(takes(841, 0.01), finds("CMP-01", 0.6, fix="tf32"))),
    Case("nsys/h100_gpt.sqlite", "fp32 sgemm", "3 % by SYN-03", finds("CMP-01", 0.3, fix="tf32")),
    Case("nsys/rtx5000ada_win.sqlite", "the kernels are on device 0 of three; busy 5 %", "95 % idle",
         both(runs_on("RTX 5000 Ada"), idles(0.85, 0.99))),
    Case("traces/mi300x_vllm_piecewise.json.gz", "busy 99.8 % from the first kernel on", "49 % idle", idles(0, 0.03)),
    Case("traces/mi300x_sglang_decode.json.gz", "held by work outside the recording", "98 % idle", idles(0, 0.03)),
    Case("traces/hta_alexnet_cuda_init.json.gz", "29.93 s of 43.4 s set the device up, 7.3 s cuDNN", "Python: 73 %",
         idles(0.68, 0.88, "idle_init")),
    Case("traces/mi300x_timesformer_video.json.gz", "268 of 391 ms are preprocessing: compile is no cure", "OVH-01 compile: up to 69 %",
         does_not_sell("compile", "cuda-graphs")),
    Case("traces/mi300x_sglang_qwen3_30b.json.gz", "a server's scheduler: compile is no cure", "no finding",
         does_not_sell("compile", "compile-reduce-overhead")),
    Case("traces/mi300x_owlv2_detection.json.gz", "loader 704 of 1,096 ms, in line; kernels 332", "INP-01: up to 64 %; roof=0.8: 0.1 %",
         both(finds("INP-01", 0.6, 0.7), finds("MEM-03", 0.1, fix="sdpa"), gains("roof=0.8", 0.1, 0.3))),
    Case("traces/v100_resnet50_papi_workers0.json.gz", "4 workers gained 22 %", "INP-01", finds("INP-01", 0.2, fix="loader-workers")),
    Case("traces/v100_resnet50_2021a_workers0.json.gz", "4 workers gained 28 %", "INP-01", finds("INP-01", 0.26, fix="loader-workers")),
    Case("traces/a100_copy_pageable.json.gz", "pinned memory gained 2.2 x", "INP-03", finds("INP-03", 0.5, fix="pin-memory")),
    Case("traces/a100_copy_pageable_sync.json.gz", "pinned memory gained 2.2 x", "INP-03", finds("INP-03", 0.5, fix="pin-memory")),
    Case("traces/a100_copy_pinned.json.gz", "pinned already", "CAP-09: up to 100 %", does_not_sell("pin-memory")),
    Case("traces/h100x8_moddednanogpt_ranks", "rank 1 is the straggler", "rank 1", names_straggler(1)),
    Case("nsys/a100_gpt_small.sqlite", "nothing tells what the host did in 188 of 633 ms", "launch=0: 93 %", gains("launch=0", 0, 0.6)),
    *(Case(f"traces/h100x8_moddednanogpt_hook_{name}.json.gz", "hooks gained 0.49 %, larger buckets and fused optimizers 0 to 4 %", "",
           does_not_sell("ddp-options", "fused-optimizer", "foreach-optimizer")) for name in ("before", "after")),
    Case("traces/rtx3060_gpt_04.json.gz", "CUDA graphs gain nothing, the optimizer is fused", "",
         does_not_sell("cuda-graphs", "compile-reduce-overhead", "fused-optimizer")),
    *(Case(f"traces/mi300x_{name}_capture.json.gz", "the capture pass is not the run", "host overhead: 90 to 98 %",
           both(does_not_sell("compile", "compile-reduce-overhead", "cuda-graphs"), idles(0, 0.1, "idle_launch")))
      for name in ("sglang_decode", "vllm_piecewise")),
    *(Case(f"traces/tracelens_unit/{name}", "every kernel can be linked", "", links_all)
      for name in sorted(path.name for path in (EVIDENCE / "traces" / "tracelens_unit").glob("*.json*"))),
)  # fmt: skip


MISSED: dict[str, str] = {}
"""Known answers that are not given yet (name of the recording), and why."""


def ask(cases: Iterable[Case]) -> list[tuple[Case, str, bool]]:
    """Return what gpudiag says of each recording, and whether that agrees with what is known."""
    found = []
    for case in cases:
        report = json.loads(api.diagnose(str(EVIDENCE / case.file)).json())
        found.append((case, *case.answer(report)))
    return found


def main() -> int:
    if not EVIDENCE.is_dir():
        print(f"the recordings are not there: {EVIDENCE}", file=sys.stderr)
        return 2
    answers = ask(CASES)
    print("| recording | truth | before | now | |\n|---|---|---|---|---|")
    for case, said, right in answers:
        print(f"| {Path(case.file).name.split('.')[0]} | {case.truth} | {case.before} | {said} | {'right' if right else 'MISSED'} |")
    missed = sum(not right for _, _, right in answers)
    print(f"\n{len(answers) - missed} of {len(answers)} known answers are given")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

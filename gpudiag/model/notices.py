"""Codes first, words last: what a reader of a report should know, as a code with parameters. The catalogue turns codes into words.

Code decides on codes and parameters, never on words. Texts that come from outside (a library's error, a message in the manifest of a
bundle) travel as the parameter `text` or `reason`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from string import Formatter
from typing import Any, Literal

import msgspec

from gpudiag.units import format_ns, format_share

Param = bool | int | float | str
NoticeSeverity = Literal["note", "warning", "invalid"]


class NoticeCode(str, Enum):
    """What a notice is about. Codes are part of the Report JSON: they are added, and never renamed."""

    OTHER = "other"
    """A code of a newer gpudiag than the one that reads it."""
    RECORDED_TEXT = "recorded_text"
    """A text without a code: of an older report."""

    # reading a trace
    HEADER_UNREADABLE = "header_unreadable"
    TRACE_BREAKS_OFF = "trace_breaks_off"
    NO_SEQUENCE_NUMBERS = "no_sequence_numbers"
    NSYS_ONE_PROCESS = "nsys_one_process"
    NSYS_NO_CALLS = "nsys_no_calls"
    NSYS_NO_RANGES = "nsys_no_ranges"
    NSYS_WHOLE_GRAPHS = "nsys_whole_graphs"
    CLOCK_SHIFTED = "clock_shifted"
    CLOCK_BOUNDED = "clock_bounded"
    CLOCK_DRIFT = "clock_drift"
    NO_STEP_MARKS = "no_step_marks"
    FEW_STEPS = "few_steps"
    OUTSIDE_STEPS = "outside_steps"
    STEPS_AT_DEVICE_PACE = "steps_at_device_pace"
    DEVICE_TIME_OUTSIDE = "device_time_outside"
    NO_OPS = "no_ops"
    NO_OPS_DEVICE_ONLY = "no_ops_device_only"
    NO_OPS_NSYS = "no_ops_nsys"
    NO_SHAPES = "no_shapes"
    NO_SHAPES_NSYS = "no_shapes_nsys"
    TYPES_FROM_NAMES = "types_from_names"
    NO_DEVICE_EVENTS = "no_device_events"

    # replayed graphs
    CAPTURE_NOT_NEEDED = "capture_not_needed"
    CAPTURE_WITHOUT_GRAPH = "capture_without_graph"
    REPLAYS_NOT_COMPARED = "replays_not_compared"
    REPLAYS_UNMATCHED = "replays_unmatched"
    REPLAYS_AMBIGUOUS = "replays_ambiguous"
    REPLAYS_BY_ORDER = "replays_by_order"

    # the device and its peaks
    DEVICES_LEFT_OUT = "devices_left_out"
    DEVICE_UNNAMED = "device_unnamed"
    DEVICE_NOT_DESCRIBED = "device_not_described"
    DEVICE_TAKEN_AS = "device_taken_as"
    DEVICE_BY_FAMILY = "device_by_family"
    DEVICE_BY_EVIDENCE = "device_by_evidence"
    DEVICE_AMBIGUOUS = "device_ambiguous"
    DEVICE_DERIVED = "device_derived"
    DEVICE_UNDERIVABLE = "device_underivable"
    DEVICE_SM_COUNT = "device_sm_count"
    DEVICE_MEMORY_SLICES = "device_memory_slices"
    DEVICE_MEMORY_OTHER = "device_memory_other"
    NO_PEAKS = "no_peaks"
    NO_BANDWIDTH = "no_bandwidth"
    NO_PEAKS_OF_CPU = "no_peaks_of_cpu"
    PEAKS_OF_OTHER_DEVICE = "peaks_of_other_device"
    CPU_OR_CUT_OFF = "cpu_or_cut_off"
    NO_ENGINE_PEAK = "no_engine_peak"
    ENGINE_SUBSTITUTED = "engine_substituted"
    ABOVE_ROOFLINE = "above_roofline"
    TELEMETRY_OF_OTHER_DEVICE = "telemetry_of_other_device"

    # memory, utilisation, replay, facts
    MEMORY_OWNERS_UNREADABLE = "memory_owners_unreadable"
    MEMORY_SNAPSHOT_UNREADABLE = "memory_snapshot_unreadable"
    NO_ALLOCATIONS = "no_allocations"
    NO_MFU = "no_mfu"
    MFU_LOWER_BOUND = "mfu_lower_bound"
    MFU_MIXED_TYPES = "mfu_mixed_types"
    NOT_REPLAYED_SIZE = "not_replayed_size"
    NOT_REPLAYED_SPAN = "not_replayed_span"
    NOT_REPLAYED_NO_OP = "not_replayed_no_op"
    NOT_REPLAYED_NO_LAUNCH = "not_replayed_no_launch"
    FACT_FAILED = "fact_failed"
    OLD_FACT_NAMES = "old_fact_names"

    # a bundle
    FROM_MANIFEST = "from_manifest"
    """A message that the recording session left, which nothing is decided by."""
    RECORDING_SWITCHED_OFF = "recording_switched_off"
    PART_SWITCHED_OFF = "part_switched_off"
    OTHER_PROFILER = "other_profiler"
    LOOP_ENDED_BY_ERROR = "loop_ended_by_error"
    WINDOW_SHORT = "window_short"
    RUN_ENDED_EARLY = "run_ended_early"
    WINDOWS_NOT_BEGUN = "windows_not_begun"
    RECORDING_UNFINISHED = "recording_unfinished"
    RANKS_UNFINISHED = "ranks_unfinished"
    BUNDLE_PART_UNREADABLE = "bundle_part_unreadable"
    OTHER_WINDOWS = "other_windows"
    TIMES_OF_SITE_WINDOW = "times_of_site_window"
    NO_SITE_WINDOW = "no_site_window"
    EXPERIMENT_UNREADABLE = "experiment_unreadable"

    # how telemetry was read
    XID_ERRORS = "xid_errors"
    BOARD_SHARED = "board_shared"
    POWER_AVERAGED = "power_averaged"

    # ranks
    ONE_RANK = "one_rank"
    RANKS_UNTOLD = "ranks_untold"
    RANKS_LEFT_OUT = "ranks_left_out"
    RANKS_TWICE = "ranks_twice"
    RANKS_MISSING = "ranks_missing"
    RANKS_NOT_READ = "ranks_not_read"
    WORLD_SIZES_DIFFER = "world_sizes_differ"
    MESSAGES_UNTOLD = "messages_untold"
    MESSAGES_UNLISTED = "messages_unlisted"
    NO_STRAGGLER = "no_straggler"
    STRAGGLER_UNKNOWN = "straggler_unknown"

    # outcomes of rules
    NO_GAIN = "no_gain"
    NO_GAIN_AT_RECORDED_PACE = "no_gain_at_recorded_pace"
    SWITCHED_OFF = "switched_off"
    WITHHELD_BY_PROFILER = "withheld_by_profiler"
    WITHHELD_BY_MEASUREMENT = "withheld_by_measurement"
    SUPPRESSED_BY_RULE = "suppressed_by_rule"
    NOT_APPLICABLE_DEVICE = "not_applicable_device"
    NOT_APPLICABLE_MISSING = "not_applicable_missing"
    NOT_APPLICABLE_UNSEEN = "not_applicable_unseen"
    RULE_FAILED = "rule_failed"

    # what ended an idle time
    FIRST_LAUNCH_LOADED = "first_launch_loaded"
    FIRST_LAUNCH_SLOW = "first_launch_slow"
    CALL_WAITED = "call_waited"
    LAUNCH_CALL_SLOW = "launch_call_slow"
    OF_SITE_WINDOW = "of_site_window"

    @classmethod
    def _missing_(cls, value: object) -> NoticeCode:
        """Return OTHER for a code of a newer gpudiag, so that its reports can be read."""
        return cls.OTHER


NSYS_COMMAND = "nsys profile --trace=cuda,nvtx,osrt --sample=process-tree"
"""What shows in a recording of Nsight Systems what the host waited for."""

C = NoticeCode

CATALOGUE: dict[NoticeCode, str] = {
    C.OTHER: "a notice of a newer gpudiag",
    C.RECORDED_TEXT: "{text}",
    C.HEADER_UNREADABLE: "the header's {key} could not be read and was left out",
    C.TRACE_BREAKS_OFF: "the file breaks off or is malformed after event {events}; what comes later is missing",
    C.NO_SEQUENCE_NUMBERS: (
        "no autograd sequence numbers were recorded: forward work that the backward pass repeats (checkpointing) cannot be told"
    ),
    C.NSYS_ONE_PROCESS: "process {process} only ({work}); not analysed: {left_out:process|processes} {others}",
    C.NSYS_NO_CALLS: ("no CUDA calls were recorded: which call started which kernel, and what the host waited for, is not known ({hint})"),
    C.NSYS_NO_RANGES: "no NVTX ranges were recorded: no op, step or phase is named ({hint})",
    C.NSYS_WHOLE_GRAPHS: (
        "{launches} CUDA graph launches were recorded as a whole, {share:share} of the device time: their kernels are not "
        "known; record with `nsys profile --cuda-graph-trace=node`"
    ),
    C.CLOCK_SHIFTED: (
        "the clocks of device and host disagree by about {shift_ns:ns}: {early:,} of {count:,} pieces of work start before the call "
        "that launches them; device times were moved by as much, so causes of idle time and the queue are less sure"
    ),
    C.CLOCK_BOUNDED: (
        "the clocks of device and host disagree by {shift_ns:ns}, give or take {error_ns:ns}: {count:,} pieces of work start before the "
        "call that launches them, or end after a call that waited for them; device times were moved by as much"
    ),
    C.CLOCK_DRIFT: (
        "the clocks of device and host disagree, by up to {shift_ns:ns}, and drift apart by {drift:.0f} us a second: {count:,} pieces of "
        "work start before the call that launches them, or end after a call that waited for them; device times were moved back"
    ),
    C.NO_STEP_MARKS: "no ProfilerStep marks: the whole trace counts as one step",
    C.FEW_STEPS: "only {steps} complete {steps:step|steps: the first and the last one count too}",
    C.OUTSIDE_STEPS: "steps are {source}; {share:share} of the recording lies before the first and after the last complete one",
    C.STEPS_AT_DEVICE_PACE: (
        "the host runs further and further ahead: its marks lie {host_ns:ns} apart, the GPU takes {device_ns:ns} for the work of a step; "
        "steps are as long as that, which is the pace of a run that goes on"
    ),
    C.DEVICE_TIME_OUTSIDE: "{share:share} of the time of the device's work lies in none of the analysed steps",
    C.NO_OPS: "no ops were recorded: nothing can be linked or modelled; {hint}",
    C.NO_OPS_DEVICE_ONLY: (
        "no ops were recorded (device activity only): nothing can be linked or modelled; record with activities=[CPU, CUDA]"
    ),
    C.NO_OPS_NSYS: (
        "no ops were recorded, so kernels stand alone and none is modelled: run the steps inside "
        "torch.autograd.profiler.emit_nvtx(record_shapes=True), or record with gpudiag.profile or torch.profiler"
    ),
    C.NO_SHAPES: "no shapes were recorded: no op can be modelled; record with record_shapes=True",
    C.NO_SHAPES_NSYS: "no shapes were recorded, so no op is modelled: use torch.autograd.profiler.emit_nvtx(record_shapes=True)",
    C.TYPES_FROM_NAMES: (
        "the recording holds sizes of tensors, but no types: for {share:share} of the kernel time of its ops they were taken from "
        "the names of the kernels, the other ops are not modelled; torch.profiler and gpudiag.profile record both"
    ),
    C.NO_DEVICE_EVENTS: (
        "no device events were recorded, though the run used an accelerator: record with activities=[CPU, CUDA] "
        "and no other profiler attached; what the device did is unknown"
    ),
    C.CAPTURE_NOT_NEEDED: "{path}: not needed, no graph is replayed in this trace",
    C.CAPTURE_WITHOUT_GRAPH: "{path}: no graph was captured while it was recorded",
    C.REPLAYS_NOT_COMPARED: (
        "{launches} of {replays} graph launches were not compared with the {graphs} captured {graphs:graph|graphs}: "
        "there are too many of both"
    ),
    C.REPLAYS_UNMATCHED: (
        "{launches} of {replays} graph launches fit none of the {graphs} captured {graphs:graph|graphs} that were recorded (kernel names "
        "agree with the captured ops in less than {least:share} of the nodes): their kernels are not modelled"
    ),
    C.REPLAYS_AMBIGUOUS: (
        "{launches} of {replays} graph launches fit several of the {graphs} captured {graphs:graph|graphs} equally well, with the same "
        "kernels on other sizes: which of them was replayed was not recorded, so their kernels are not modelled"
    ),
    C.REPLAYS_BY_ORDER: (
        "replayed kernels were matched to captured ops by order; names agree in {share:share1} of the nodes of the least certain graph"
    ),
    C.DEVICES_LEFT_OUT: "device {device} only; not analysed: {left_out:device|devices} {others}",
    C.DEVICE_UNNAMED: "the device is not named in the recording: no roofline",
    C.DEVICE_NOT_DESCRIBED: "the recording does not describe device {device}: its roofline is that of device {other}",
    C.DEVICE_TAKEN_AS: "{recorded} is taken as {device}: {reason}",
    C.DEVICE_BY_FAMILY: "{recorded} is not in the device table by that name: taken as {device}, {reason}",
    C.DEVICE_BY_EVIDENCE: "{recorded}{why}: taken as {device}, settled by {reason}",
    C.DEVICE_AMBIGUOUS: "{device} is assumed; what is recorded fits as well: {others}",
    C.DEVICE_DERIVED: "{recorded} is not in the device table: its peaks are {source}; its bandwidth is unknown",
    C.DEVICE_UNDERIVABLE: "no peaks for {recorded}: {reason}",
    C.DEVICE_SM_COUNT: (
        "{sms} SMs, {device} has {full_sms}: a partition or another part; peaks are scaled by the SM count, the peer link is unknown"
    ),
    C.DEVICE_MEMORY_SLICES: (
        "{recorded_gib:.3g} GiB of memory recorded, {device} has {full_gib:g} GiB: bandwidth and cache of {eighths}/8 of it are assumed"
    ),
    C.DEVICE_MEMORY_OTHER: (
        "{recorded_gib:.3g} GiB of memory recorded, {device} has {full_gib:g} GiB: another board, its bandwidth is unknown"
    ),
    C.NO_PEAKS: "no peaks are known for this device: no roofline",
    C.NO_BANDWIDTH: "the memory bandwidth of {device} is not known: its memory roof is missing, most bounds are unknown",
    C.NO_PEAKS_OF_CPU: "the peaks of this CPU are not known, so there is no roofline: {hint}",
    C.PEAKS_OF_OTHER_DEVICE: ("the measured peaks are of device {measured}, not of device {device}, which is analysed: they are not used"),
    C.CPU_OR_CUT_OFF: "the file breaks off before any device event: whether an accelerator was used cannot be told",
    C.NO_ENGINE_PEAK: "no {dtype} peak of {device} is known: matrix work of that type has no roof",
    C.ENGINE_SUBSTITUTED: "{device} has no {dtype} matrix path: such work is judged against its {path}",
    C.ABOVE_ROOFLINE: "{said} of the {work} time ran faster than its roof, so that it has no efficiency; most of it: {worst}",
    C.TELEMETRY_OF_OTHER_DEVICE: (
        "telemetry is of device {sampled}, not of device {device}, which is analysed: its clocks, power and energy are not used"
    ),
    C.MEMORY_OWNERS_UNREADABLE: "{file} could not be read: parameters and optimizer state are not told from other memory",
    C.MEMORY_SNAPSHOT_UNREADABLE: "{file} could not be read and is left out: {reason}",
    C.NO_ALLOCATIONS: (
        "memory=True was given, but no allocation stands in a recorded window: the site window was not recorded, or cannot be read"
    ),
    C.NO_MFU: "no model FLOPs utilisation: {reason}",
    C.MFU_LOWER_BOUND: (
        "the model FLOPs utilisation is a lower bound: the FLOP of {share:share} of the matrix kernels' time are not known"
    ),
    C.MFU_MIXED_TYPES: "the matrix work is of several types ({types}): its utilisation is of the peak of the first alone",
    C.NOT_REPLAYED_SIZE: "step {step} is not replayed: it has about {count:,} pieces of work and calls, the limit is {limit:,}",
    C.NOT_REPLAYED_SPAN: "step {step} is not replayed: the recording spans more than a day, or holds more than {limit:,} streams",
    C.NOT_REPLAYED_NO_OP: "step {step} is not replayed: no op was recorded in it",
    C.NOT_REPLAYED_NO_LAUNCH: ("step {step} is not replayed: no launch call was recorded, so what the device waited for is not known"),
    C.FACT_FAILED: "fact {fact} failed ({reason}): this is a bug of gpudiag",
    C.OLD_FACT_NAMES: "rules use old names of facts, which hold through version 0.2: {names}; `gpudiag rules check DIR` says the new ones",
    C.FROM_MANIFEST: "{text}",
    C.RECORDING_SWITCHED_OFF: "{text}",
    C.PART_SWITCHED_OFF: "{text}",
    C.OTHER_PROFILER: "{text}",
    C.LOOP_ENDED_BY_ERROR: "{text}",
    C.WINDOW_SHORT: "{text}",
    C.RUN_ENDED_EARLY: "{text}",
    C.WINDOWS_NOT_BEGUN: "{text}",
    C.RECORDING_UNFINISHED: "the run is still recording or was killed: this is what it had written until then",
    C.RANKS_UNFINISHED: "{ranks} did not finish: still recording, or killed",
    C.BUNDLE_PART_UNREADABLE: "{text}",
    C.OTHER_WINDOWS: "{text}",
    C.TIMES_OF_SITE_WINDOW: "{missing}times are those of the site window, which Python stacks slow down",
    C.NO_SITE_WINDOW: "the site window is missing: no call sites",
    C.EXPERIMENT_UNREADABLE: "{text}",
    C.XID_ERRORS: "latest Xid errors: {numbers}",
    C.BOARD_SHARED: "figures of the whole board, which several MIG instances share",
    C.POWER_AVERAGED: "power is averaged over one second",
    C.ONE_RANK: "rank {rank} only; not analysed: {others}",
    C.RANKS_UNTOLD: "neither names nor traces tell which rank they are of: they are numbered in the order of their names",
    C.RANKS_LEFT_OUT: "left out, their names tell no rank: {names}",
    C.RANKS_TWICE: "{ranks} {count:is|are} there more than once: {names}",
    C.RANKS_MISSING: "not there, though higher ranks are: {ranks}",
    C.RANKS_NOT_READ: "{ranks} {count:was|were} not read: what the others wait for them counts as transfer",
    C.WORLD_SIZES_DIFFER: "the ranks say that they are of jobs of {sizes} ranks: they may not belong together",
    C.MESSAGES_UNTOLD: "of {messages:,} messages it was not recorded between which ranks they go: they are not compared",
    C.MESSAGES_UNLISTED: "{kinds:,} more kinds of messages between groups of ranks are not listed",
    C.NO_STRAGGLER: "{text}",
    C.STRAGGLER_UNKNOWN: "{text}",
    C.NO_GAIN: "holds, but would save {share:share1} of the step at most as things are: {message}",
    C.NO_GAIN_AT_RECORDED_PACE: "holds, but would save {share:share1} of the step at most at the recorded pace: {message}",
    C.SWITCHED_OFF: "switched off in {config}",
    C.WITHHELD_BY_PROFILER: (
        "withheld: a step is {slowdown:.2f} times as long with the profiler, {added_ns:ns} more; the idle time that this is about may be "
        "no more than that"
    ),
    C.WITHHELD_BY_MEASUREMENT: "withheld: {reason} ({rule})",
    C.SUPPRESSED_BY_RULE: "{rule}: {reason}",
    C.NOT_APPLICABLE_DEVICE: "{reason}",
    C.NOT_APPLICABLE_MISSING: "{reason}",
    C.NOT_APPLICABLE_UNSEEN: "only {share:share1} of the kernel time belongs to ops with recorded shapes",
    C.RULE_FAILED: "{reason}",
    C.FIRST_LAUNCH_LOADED: "first launch of {name}: its code was loaded",
    C.FIRST_LAUNCH_SLOW: "first launch of {name}: the call itself took {detail} (the first use of a kernel loads its code)",
    C.CALL_WAITED: "{detail} waited for {name}",
    C.LAUNCH_CALL_SLOW: "the launch call itself took {detail}",
    C.OF_SITE_WINDOW: "{name} (by the site window)",
}
"""Code -> words, in the syntax of str.format; further formats of a parameter are ns, share, share1 and 'one|several' (by its number)."""

EVIDENCE = (C.FIRST_LAUNCH_LOADED, C.FIRST_LAUNCH_SLOW, C.CALL_WAITED, C.LAUNCH_CALL_SLOW, C.OF_SITE_WINDOW)
"""What ended an idle time; their words are those of the column `evidence` of the table idle, which is made of them for whole columns."""

_INVALID = frozenset({C.TRACE_BREAKS_OFF, C.NO_DEVICE_EVENTS, C.WITHHELD_BY_MEASUREMENT})

_NOTES = frozenset(
    {
        C.CAPTURE_NOT_NEEDED, C.CLOCK_SHIFTED, C.CLOCK_BOUNDED, C.CLOCK_DRIFT, C.STEPS_AT_DEVICE_PACE,
        C.DEVICES_LEFT_OUT, C.DEVICE_TAKEN_AS, C.ENGINE_SUBSTITUTED, C.MFU_MIXED_TYPES,
        C.NO_SITE_WINDOW, C.OTHER_WINDOWS, C.ONE_RANK, C.MESSAGES_UNLISTED, C.NSYS_ONE_PROCESS, C.NO_STRAGGLER, C.STRAGGLER_UNKNOWN,
        C.NO_GAIN, C.NO_GAIN_AT_RECORDED_PACE, C.SWITCHED_OFF, C.WITHHELD_BY_PROFILER, C.SUPPRESSED_BY_RULE, C.NOT_APPLICABLE_DEVICE,
        C.NOT_APPLICABLE_MISSING, C.NOT_APPLICABLE_UNSEEN, C.FIRST_LAUNCH_LOADED, C.FIRST_LAUNCH_SLOW, C.CALL_WAITED,
        C.LAUNCH_CALL_SLOW, C.OF_SITE_WINDOW, C.POWER_AVERAGED, C.BOARD_SHARED,
    }
)  # fmt: skip
"""What changes no figure."""

UNSEEN = frozenset({C.NOT_APPLICABLE_MISSING, C.NOT_APPLICABLE_UNSEEN})
"""Why a rule was not judged: what it looks at is not in the recording."""

TO_RECORD = frozenset({C.NSYS_WHOLE_GRAPHS, C.NSYS_NO_CALLS, C.NO_OPS, C.NO_OPS_DEVICE_ONLY, C.NO_OPS_NSYS, C.NO_SHAPES, C.NO_SHAPES_NSYS})
"""What leaves most rules without anything to judge; the words say what to record."""

NOT_REPLAYED = frozenset({C.NOT_REPLAYED_SIZE, C.NOT_REPLAYED_SPAN, C.NOT_REPLAYED_NO_OP, C.NOT_REPLAYED_NO_LAUNCH})
"""Why a step has no dependency graph."""

NO_ROOFLINE = frozenset({C.DEVICE_UNNAMED, C.DEVICE_UNDERIVABLE, C.NO_PEAKS, C.NO_PEAKS_OF_CPU, C.NO_DEVICE_EVENTS, C.CPU_OR_CUT_OFF})
"""Why there are no peaks to judge against."""

WITHOUT_GAIN = frozenset({C.NO_GAIN, C.NO_GAIN_AT_RECORDED_PACE})
"""The rule holds, and its finding would give nothing."""

WITHHELD = frozenset({C.WITHHELD_BY_PROFILER, C.WITHHELD_BY_MEASUREMENT})
"""A finding about the measurement's fault is not made."""


class Notice(msgspec.Struct, frozen=True):
    """Something that a reader should know."""

    code: NoticeCode
    params: dict[str, Param] = {}
    severity: NoticeSeverity = "warning"


def make_notice(code: NoticeCode, **params: Param) -> Notice:
    """Return the notice with the severity of its code."""
    return Notice(code, params, "invalid" if code in _INVALID else "note" if code in _NOTES else "warning")


class _Words(Formatter):
    """str.format with the formats that CATALOGUE documents."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "ns":
            return format_ns(value)
        if format_spec in ("share", "share1"):
            return format_share(value, 1 if format_spec == "share1" else 0)
        if "|" in format_spec:
            one, several = format_spec.split("|", 1)
            return one if value == 1 else several
        made: str = super().format_field(value, format_spec)
        return made


_WORDS = _Words()


def format_notice(notice: Notice) -> str:
    """Return the notice in words; its recorded text, or its code, where the parameters lack what the words name."""
    try:
        return _WORDS.vformat(CATALOGUE[notice.code], (), notice.params)
    except (LookupError, TypeError, ValueError):
        return str(notice.params.get("text", notice.code.value.replace("_", " ")))


def drop_repeated(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return each notice once, in order."""
    kept: list[Notice] = []
    for notice in notices:
        if notice not in kept:
            kept.append(notice)
    return tuple(kept)

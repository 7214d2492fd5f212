"""Codes first, words last: what a reader of a report should know, as a code with parameters. Each code has its words beside it.

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
    """What a notice is about: its code, its words and how grave it is.

    Codes are part of the Report JSON: they are added, and never renamed. Words are in the syntax of str.format; further formats of a
    parameter are ns, share, share1 and 'one|several' (by its number). A note changes no figure.
    """

    words: str
    severity: NoticeSeverity

    def __new__(cls, code: str, words: str = "", severity: NoticeSeverity = "warning") -> NoticeCode:  # noqa: D102
        member = str.__new__(cls, code)
        member._value_, member.words, member.severity = code, words, severity
        return member

    OTHER = "other", "a notice of a newer gpudiag"
    """A code of a newer gpudiag than the one that reads it."""
    RECORDED_TEXT = "recorded_text", "{text}"
    """A text without a code: of an older report."""

    # reading a trace
    HEADER_UNREADABLE = "header_unreadable", "the header's {key} could not be read and was left out"
    TRACE_BREAKS_OFF = (
        "trace_breaks_off",
        "the file breaks off or is malformed after event {events}; what comes later is missing",
        "invalid",
    )
    NO_SEQUENCE_NUMBERS = (
        "no_sequence_numbers",
        "no autograd sequence numbers were recorded: forward work that the backward pass repeats (checkpointing) cannot be told",
    )
    NSYS_ONE_PROCESS = "nsys_one_process", "process {process} only ({work}); not analysed: {left_out:process|processes} {others}", "note"
    NSYS_NO_CALLS = (
        "nsys_no_calls",
        "no CUDA calls were recorded: which call started which kernel, and what the host waited for, is not known ({hint})",
    )
    NSYS_NO_RANGES = "nsys_no_ranges", "no NVTX ranges were recorded: no op, step or phase is named ({hint})"
    NSYS_WHOLE_GRAPHS = (
        "nsys_whole_graphs",
        "{launches} CUDA graph launches were recorded as a whole, {share:share} of the device time: their kernels are not "
        "known; record with `nsys profile --cuda-graph-trace=node`",
    )
    CLOCK_SHIFTED = (
        "clock_shifted",
        "the clocks of device and host disagree by about {shift_ns:ns}: {early:,} of {count:,} pieces of work start before the call "
        "that launches them; device times were moved by as much, so causes of idle time and the queue are less sure",
        "note",
    )
    CLOCK_BOUNDED = (
        "clock_bounded",
        "the clocks of device and host disagree by {shift_ns:ns}, give or take {error_ns:ns}: {count:,} pieces of work start before the "
        "call that launches them, or end after a call that waited for them; device times were moved by as much",
        "note",
    )
    CLOCK_DRIFT = (
        "clock_drift",
        "the clocks of device and host disagree, by up to {shift_ns:ns}, and drift apart by {drift:.0f} us a second: {count:,} pieces of "
        "work start before the call that launches them, or end after a call that waited for them; device times were moved back",
        "note",
    )
    NO_STEP_MARKS = "no_step_marks", "no ProfilerStep marks: the whole trace counts as one step"
    FEW_STEPS = "few_steps", "only {steps} complete {steps:step|steps: the first and the last one count too}"
    OUTSIDE_STEPS = (
        "outside_steps",
        "steps are {source}; {share:share} of the recording lies before the first and after the last complete one",
    )
    STEPS_AT_DEVICE_PACE = (
        "steps_at_device_pace",
        "the host runs further and further ahead: its marks lie {host_ns:ns} apart, the GPU takes {device_ns:ns} for the work of a step; "
        "steps are as long as that, which is the pace of a run that goes on",
        "note",
    )
    DEVICE_TIME_OUTSIDE = "device_time_outside", "{share:share} of the time of the device's work lies in none of the analysed steps"
    NO_OPS = "no_ops", "no ops were recorded: nothing can be linked or modelled; {hint}"
    NO_OPS_DEVICE_ONLY = (
        "no_ops_device_only",
        "no ops were recorded (device activity only): nothing can be linked or modelled; record with activities=[CPU, CUDA]",
    )
    NO_OPS_NSYS = (
        "no_ops_nsys",
        "no ops were recorded, so kernels stand alone and none is modelled: run the steps inside "
        "torch.autograd.profiler.emit_nvtx(record_shapes=True), or record with gpudiag.profile or torch.profiler",
    )
    NO_SHAPES = "no_shapes", "no shapes were recorded: no op can be modelled; record with record_shapes=True"
    NO_SHAPES_NSYS = (
        "no_shapes_nsys",
        "no shapes were recorded, so no op is modelled: use torch.autograd.profiler.emit_nvtx(record_shapes=True)",
    )
    TYPES_FROM_NAMES = (
        "types_from_names",
        "the recording holds sizes of tensors, but no types: for {share:share} of the kernel time of its ops they were taken from "
        "the names of the kernels, the other ops are not modelled; torch.profiler and gpudiag.profile record both",
    )
    NO_DEVICE_EVENTS = (
        "no_device_events",
        "no device events were recorded, though the run used an accelerator: record with activities=[CPU, CUDA] "
        "and no other profiler attached; what the device did is unknown",
        "invalid",
    )

    # replayed graphs
    CAPTURE_NOT_NEEDED = "capture_not_needed", "{path}: not needed, no graph is replayed in this trace", "note"
    CAPTURE_WITHOUT_GRAPH = "capture_without_graph", "{path}: no graph was captured while it was recorded"
    REPLAYS_NOT_COMPARED = (
        "replays_not_compared",
        "{launches} of {replays} graph launches were not compared with the {graphs} captured {graphs:graph|graphs}: "
        "there are too many of both",
    )
    REPLAYS_UNMATCHED = (
        "replays_unmatched",
        "{launches} of {replays} graph launches fit none of the {graphs} captured {graphs:graph|graphs} that were recorded (kernel names "
        "agree with the captured ops in less than {least:share} of the nodes): their kernels are not modelled",
    )
    REPLAYS_AMBIGUOUS = (
        "replays_ambiguous",
        "{launches} of {replays} graph launches fit several of the {graphs} captured {graphs:graph|graphs} equally well, with the same "
        "kernels on other sizes: which of them was replayed was not recorded, so their kernels are not modelled",
    )
    REPLAYS_BY_ORDER = (
        "replays_by_order",
        "replayed kernels were matched to captured ops by order; names agree in {share:share1} of the nodes of the least certain graph",
    )

    # the device and its peaks
    DEVICES_LEFT_OUT = "devices_left_out", "device {device} only; not analysed: {left_out:device|devices} {others}", "note"
    DEVICE_UNNAMED = "device_unnamed", "the device is not named in the recording: no roofline"
    DEVICE_NOT_DESCRIBED = "device_not_described", "the recording does not describe device {device}: its roofline is that of device {other}"
    DEVICE_TAKEN_AS = "device_taken_as", "{recorded} is taken as {device}: {reason}", "note"
    DEVICE_BY_FAMILY = "device_by_family", "{recorded} is not in the device table by that name: taken as {device}, {reason}"
    DEVICE_BY_EVIDENCE = "device_by_evidence", "{recorded}{why}: taken as {device}, settled by {reason}"
    DEVICE_AMBIGUOUS = "device_ambiguous", "{device} is assumed; what is recorded fits as well: {others}"
    DEVICE_DERIVED = "device_derived", "{recorded} is not in the device table: its peaks are {source}; its bandwidth is unknown"
    DEVICE_UNDERIVABLE = "device_underivable", "no peaks for {recorded}: {reason}"
    DEVICE_SM_COUNT = (
        "device_sm_count",
        "{sms} SMs, {device} has {full_sms}: a partition or another part; peaks are scaled by the SM count, the peer link is unknown",
    )
    DEVICE_MEMORY_SLICES = (
        "device_memory_slices",
        "{recorded_gib:.3g} GiB of memory recorded, {device} has {full_gib:g} GiB: bandwidth and cache of {eighths}/8 of it are assumed",
    )
    DEVICE_MEMORY_OTHER = (
        "device_memory_other",
        "{recorded_gib:.3g} GiB of memory recorded, {device} has {full_gib:g} GiB: another board, its bandwidth is unknown",
    )
    NO_PEAKS = "no_peaks", "no peaks are known for this device: no roofline"
    NO_BANDWIDTH = "no_bandwidth", "the memory bandwidth of {device} is not known: its memory roof is missing, most bounds are unknown"
    NO_PEAKS_OF_CPU = "no_peaks_of_cpu", "the peaks of this CPU are not known, so there is no roofline: {hint}"
    PEAKS_OF_OTHER_DEVICE = (
        "peaks_of_other_device",
        "the measured peaks are of device {measured}, not of device {device}, which is analysed: they are not used",
    )
    CPU_OR_CUT_OFF = "cpu_or_cut_off", "the file breaks off before any device event: whether an accelerator was used cannot be told"
    NO_ENGINE_PEAK = "no_engine_peak", "no {dtype} peak of {device} is known: matrix work of that type has no roof"
    ENGINE_SUBSTITUTED = "engine_substituted", "{device} has no {dtype} matrix path: such work is judged against its {path}", "note"
    ABOVE_ROOFLINE = (
        "above_roofline",
        "{said} of the {work} time ran faster than its roof, so that it has no efficiency; most of it: {worst}",
    )
    TELEMETRY_OF_OTHER_DEVICE = (
        "telemetry_of_other_device",
        "telemetry is of device {sampled}, not of device {device}, which is analysed: its clocks, power and energy are not used",
    )

    # memory, utilisation, replay, facts
    MEMORY_OWNERS_UNREADABLE = (
        "memory_owners_unreadable",
        "{file} could not be read: parameters and optimizer state are not told from other memory",
    )
    MEMORY_SNAPSHOT_UNREADABLE = "memory_snapshot_unreadable", "{file} could not be read and is left out: {reason}"
    NO_ALLOCATIONS = (
        "no_allocations",
        "memory=True was given, but no allocation stands in a recorded window: the site window was not recorded, or cannot be read",
    )
    NO_MFU = "no_mfu", "no model FLOPs utilisation: {reason}"
    MFU_LOWER_BOUND = (
        "mfu_lower_bound",
        "the model FLOPs utilisation is a lower bound: the FLOP of {share:share} of the matrix kernels' time are not known",
    )
    MFU_MIXED_TYPES = (
        "mfu_mixed_types",
        "the matrix work is of several types ({types}): its utilisation is of the peak of the first alone",
        "note",
    )
    NOT_REPLAYED_SIZE = (
        "not_replayed_size",
        "step {step} is not replayed: it has about {count:,} pieces of work and calls, the limit is {limit:,}",
    )
    NOT_REPLAYED_SPAN = (
        "not_replayed_span",
        "step {step} is not replayed: the recording spans more than a day, or holds more than {limit:,} streams",
    )
    NOT_REPLAYED_NO_OP = "not_replayed_no_op", "step {step} is not replayed: no op was recorded in it"
    NOT_REPLAYED_NO_LAUNCH = (
        "not_replayed_no_launch",
        "step {step} is not replayed: no launch call was recorded, so what the device waited for is not known",
    )
    FACT_FAILED = "fact_failed", "fact {fact} failed ({reason}): this is a bug of gpudiag"
    OLD_FACT_NAMES = (
        "old_fact_names",
        "rules use old names of facts, which hold through version 0.2: {names}; `gpudiag rules check DIR` says the new ones",
    )

    # a bundle
    FROM_MANIFEST = "from_manifest", "{text}"
    """A message that the recording session left, which nothing is decided by."""
    RECORDING_SWITCHED_OFF = "recording_switched_off", "{text}"
    PART_SWITCHED_OFF = "part_switched_off", "{text}"
    OTHER_PROFILER = "other_profiler", "{text}"
    LOOP_ENDED_BY_ERROR = "loop_ended_by_error", "{text}"
    WINDOW_SHORT = "window_short", "{text}"
    RUN_ENDED_EARLY = "run_ended_early", "{text}"
    WINDOWS_NOT_BEGUN = "windows_not_begun", "{text}"
    RECORDING_UNFINISHED = "recording_unfinished", "the run is still recording or was killed: this is what it had written until then"
    RANKS_UNFINISHED = "ranks_unfinished", "{ranks} did not finish: still recording, or killed"
    BUNDLE_PART_UNREADABLE = "bundle_part_unreadable", "{text}"
    OTHER_WINDOWS = "other_windows", "{text}", "note"
    TIMES_OF_SITE_WINDOW = "times_of_site_window", "{missing}times are those of the site window, which Python stacks slow down"
    NO_SITE_WINDOW = "no_site_window", "the site window is missing: no call sites", "note"
    EXPERIMENT_UNREADABLE = "experiment_unreadable", "{text}"

    # how telemetry was read
    XID_ERRORS = "xid_errors", "latest Xid errors: {numbers}"
    BOARD_SHARED = "board_shared", "figures of the whole board, which several MIG instances share", "note"
    POWER_AVERAGED = "power_averaged", "power is averaged over one second", "note"

    # ranks
    ONE_RANK = "one_rank", "rank {rank} only; not analysed: {others}", "note"
    RANKS_UNTOLD = "ranks_untold", "neither names nor traces tell which rank they are of: they are numbered in the order of their names"
    RANKS_LEFT_OUT = "ranks_left_out", "left out, their names tell no rank: {names}"
    RANKS_TWICE = "ranks_twice", "{ranks} {count:is|are} there more than once: {names}"
    RANKS_MISSING = "ranks_missing", "not there, though higher ranks are: {ranks}"
    RANKS_NOT_READ = "ranks_not_read", "{ranks} {count:was|were} not read: what the others wait for them counts as transfer"
    WORLD_SIZES_DIFFER = "world_sizes_differ", "the ranks say that they are of jobs of {sizes} ranks: they may not belong together"
    MESSAGES_UNTOLD = "messages_untold", "of {messages:,} messages it was not recorded between which ranks they go: they are not compared"
    MESSAGES_UNLISTED = "messages_unlisted", "{kinds:,} more kinds of messages between groups of ranks are not listed", "note"
    NO_STRAGGLER = "no_straggler", "{text}", "note"
    STRAGGLER_UNKNOWN = "straggler_unknown", "{text}", "note"

    # outcomes of rules
    NO_GAIN = "no_gain", "holds, but would save {share:share1} of the step at most as things are: {message}", "note"
    NO_GAIN_AT_RECORDED_PACE = (
        "no_gain_at_recorded_pace",
        "holds, but would save {share:share1} of the step at most at the recorded pace: {message}",
        "note",
    )
    SWITCHED_OFF = "switched_off", "switched off in {config}", "note"
    WITHHELD_BY_PROFILER = (
        "withheld_by_profiler",
        "withheld: a step is {slowdown:.2f} times as long with the profiler, {added_ns:ns} more; the idle time that this is about may be "
        "no more than that",
        "note",
    )
    WITHHELD_BY_MEASUREMENT = "withheld_by_measurement", "withheld: {reason} ({rule})", "invalid"
    SUPPRESSED_BY_RULE = "suppressed_by_rule", "{rule}: {reason}", "note"
    NOT_APPLICABLE_DEVICE = "not_applicable_device", "{reason}", "note"
    NOT_APPLICABLE_MISSING = "not_applicable_missing", "{reason}", "note"
    NOT_APPLICABLE_UNSEEN = "not_applicable_unseen", "only {share:share1} of the kernel time belongs to ops with recorded shapes", "note"
    RULE_FAILED = "rule_failed", "{reason}"

    # what ended an idle time
    FIRST_LAUNCH_LOADED = "first_launch_loaded", "first launch of {name}: its code was loaded", "note"
    FIRST_LAUNCH_SLOW = (
        "first_launch_slow",
        "first launch of {name}: the call itself took {detail} (the first use of a kernel loads its code)",
        "note",
    )
    CALL_WAITED = "call_waited", "{detail} waited for {name}", "note"
    LAUNCH_CALL_SLOW = "launch_call_slow", "the launch call itself took {detail}", "note"
    OF_SITE_WINDOW = "of_site_window", "{name} (by the site window)", "note"

    @classmethod
    def _missing_(cls, value: object) -> NoticeCode:
        """Return OTHER for a code of a newer gpudiag, so that its reports can be read."""
        return cls.OTHER


NSYS_COMMAND = "nsys profile --trace=cuda,nvtx,osrt --sample=process-tree"
"""What shows in a recording of Nsight Systems what the host waited for."""

C = NoticeCode

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
    return Notice(code, params, code.severity)


class _Words(Formatter):
    """str.format with the formats that NoticeCode documents."""

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
        return _WORDS.vformat(notice.code.words, (), notice.params)
    except (LookupError, TypeError, ValueError):
        return str(notice.params.get("text", notice.code.value.replace("_", " ")))


def drop_repeated(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return each notice once, in order."""
    kept: list[Notice] = []
    for notice in notices:
        if notice not in kept:
            kept.append(notice)
    return tuple(kept)

"""The allow-list of a trace: every header and argument that a scrubbed copy keeps, in which form. What is not here is left out."""

from __future__ import annotations

from typing import Literal

FormName = Literal[
    "number", "numbers", "address", "version", "types", "arguments", "words", "symbol", "device", "group list", "device list"
]

FORMS: dict[FormName, str] = {
    "number": "a number, true or false",
    "numbers": "lists of numbers",
    "address": "a number or an address in memory",
    "version": "a version, which begins with a digit",
    "types": "names of data types; others become empty",
    "arguments": "numbers, truth values and lists of such; texts become empty, but for options such as 'mean' and 'same'",
    "words": "its words as far as they are in gpudiag's vocabulary; each other one becomes a digest",
    "symbol": "a name of code as it is, unless it looks like a secret (URL, e-mail address, absolute path, access token)",
    "device": "the vendor's name of the device as it is",
    "group list": "names (words), sizes and ranks of the process groups",
    "device list": "names, sizes and limits of the devices; no serial number, no UUID, no place on the bus",
}

_DEVICE_NUMBERS = """
    id totalGlobalMem computeMajor computeMinor maxThreadsPerBlock maxThreadsPerMultiprocessor regsPerBlock regsPerMultiprocessor
    warpSize sharedMemPerBlock sharedMemPerMultiprocessor numSms sharedMemPerBlockOptin maxSharedMemoryPerMultiProcessor
"""
DEVICE: dict[str, FormName] = {"name": "device", **dict.fromkeys(_DEVICE_NUMBERS.split(), "number")}
"""Keys of one entry of deviceProperties (libkineto/src/DeviceProperties.cpp, CuptiActivityProfiler)."""

GROUP: dict[str, FormName] = {
    "pg_name": "words", "pg_desc": "words", "backend_config": "words", "pg_size": "number", "ranks": "numbers",
}  # fmt: skip
DISTRIBUTED: dict[str, FormName] = {
    "backend": "words", "rank": "number", "world_size": "number", "pg_count": "number", "nccl_version": "version",
    "pg_config": "group list",
}  # fmt: skip
"""Keys of distributedInfo (torch/profiler/profiler.py)."""

_HEADER_NUMBERS = """
    schemaVersion baseTimeNanoseconds record_shapes with_stack with_modules with_flops profile_memory cuda_runtime_version
    cuda_driver_version cupti_version hip_runtime_version hip_driver_version
"""
HEADERS: dict[str, FormName] = {
    "deviceProperties": "device list",
    "displayTimeUnit": "words",
    "roctracer_version": "version",
    **dict.fromkeys(_HEADER_NUMBERS.split(), "number"),
}
"""Top-level keys besides traceEvents and distributedInfo."""

_NUMBERS_OF_EVENTS = (
    "Sequence number|Fwd thread id|correlation|device|stream|bytes|graph node id|graph id|est. achieved occupancy %|Group size|"
    "In msg nelems|Out msg nelems|Seq|Global rank start|Global rank stride|Rank|Src Rank|Dst Rank|External id|external id|Ev Idx|"
    "Python id|Python parent id|Python module id|Record function id|Op count|Trace iteration|cbid|cid|context|queued|blocks per SM|"
    "warps per SM|registers per thread|shared memory|memory bandwidth (GB/s)|num_warps|num_stages|Device Type|Device Id|Bytes|"
    "Total Allocated|Total Reserved|Profiler Event Index|sort_index|wait_on_stream|wait_on_cuda_event_record_corr_id|dur|queue|"
    "flops|Flops"
)
ARGUMENTS: dict[str, FormName] = {
    **dict.fromkeys(_NUMBERS_OF_EVENTS.split("|"), "number"),
    "Input Dims": "numbers",
    "Input dims": "numbers",
    "Input Strides": "numbers",
    "Input type": "types",
    "Concrete Inputs": "arguments",
    "grid": "numbers",
    "block": "numbers",
    "kernel": "symbol",
    "Collective name": "words",
    "Process Group Name": "words",
    "Process Group Description": "words",
    "Process Group Ranks": "numbers",
    "In split size": "numbers",
    "Out split size": "numbers",
    "dtype": "words",
    "Addr": "address",
    "name": "words",
    "labels": "words",
}
"""Keys of 'args' (MetadataFieldCatalog.h of pytorch/kineto, torch/csrc/profiler/util.cpp), of complete, instant and metadata events."""

PHASES_WITH_ARGUMENTS = frozenset("XiM")
PHASES = frozenset("XiMBEPCbneSTpFstfNODRVvcI()")

NAMES = (
    ("ops, autograd nodes", "as they are: namespace::name, or one word; others as annotations"),
    ("kernels, calls of the driver", "as they are, unless they look like a secret"),
    ("modules (nn.Module), optimizers, loaders", "the name of their class as it is"),
    ("Python frames", "file, line and function as they are; folders of libraries from site-packages on, each of your own is a digest"),
    (
        "annotations (record_function), threads, groups",
        "their words as far as they are in the vocabulary below; each other word becomes a digest, the same one throughout; "
        "--keep-names keeps them, and the names of folders",
    ),
    ("times, process and thread numbers, addresses in memory", "as they are"),
)  # fmt: skip
"""What becomes of the texts that are no arguments, in words."""

REMOVED = (
    "every other key of the header: environment variables, command lines, host names, names of the recording and of its file, trace ids",
    "every other argument of an event: call stacks as text, kernel files and hashes, addresses of copies, labels of your own",
    "arguments of flows, counters and other events that carry no times of work",
    "what cannot be read, and keys of events other than ph, cat, name, pid, tid, ts, dur, id, s, bp and args",
)

BUNDLE = (
    (
        "manifest*.json",
        "the fields that gpudiag knows, its sentences without words that are not its own; no serial number, command or commit",
    ),
    ("trace/*.json.gz", "as traces"),
    ("steps/, telemetry/, marks/", "their known columns, written anew; names of files become digests, places keep file and line"),
    ("inductor/*.json", "names of kernels, ops, nodes and buffers of the generated code, and numbers"),
    ("memory/*-owners.json", "names of parameters and numbers"),
    ("everything else", "left out: reports, experiments, snapshots of the allocator, what is kept to open faster"),
)
"""What becomes of the files of a bundle."""

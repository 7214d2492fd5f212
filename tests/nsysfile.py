"""Writes small SQLite files like exports of Nsight Systems, in two generations of the schema; also the runs of tests/simulator.py as such.

Written after NVIDIA's export schema reference, the text format of torch's emit_nvtx, and for calls of the operating system, samples and
call chains after an export of nsys 2023.4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from simulator import Simulation

Generation = Literal["2021", "2024"]

_EVERY = "start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT NOT NULL,"
_TAIL = "streamId INT NOT NULL, correlationId INT, globalPid INT,"
_CHAIN = "id INT NOT NULL, symbol INT NOT NULL, module INT NOT NULL, unresolved INT, stackDepth INT NOT NULL"
_SIZES = ", ".join(f"{what}{axis} INT NOT NULL" for what in ("grid", "block") for axis in "XYZ")

# 2021: texts of NVTX stand in their row, numbers that are missing are 0, no graph nodes; 2024: registered texts, nulls, graphs, enums.
_TABLES: dict[Generation, dict[str, str]] = {
    "2021": {
        "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{_EVERY} {_TAIL} demangledName INT NOT NULL, shortName INT NOT NULL, {_SIZES}",
        "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_EVERY} {_TAIL} bytes INT NOT NULL, copyKind INT NOT NULL, srcKind INT, dstKind INT",
        "CUPTI_ACTIVITY_KIND_MEMSET": f"{_EVERY} {_TAIL} value INT NOT NULL, bytes INT NOT NULL, memKind INT",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT NOT NULL, end INT NOT NULL, eventClass INT, globalTid INT, correlationId INT, nameId INT",
        "NVTX_EVENTS": "start INT NOT NULL, end INT NOT NULL, eventType INT NOT NULL, text TEXT, globalTid INT, domainId INT",
        "TARGET_INFO_GPU": "vmId INT, id INT, name TEXT, smCount INT, totalMemory INT, computeMajor INT, computeMinor INT",
        "TARGET_INFO_CUDA_DEVICE": "gpuId INT, cudaId INT, pid INT",
    },
    "2024": {
        "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            f"{_EVERY} greenContextId INT, {_TAIL} demangledName INT NOT NULL, shortName INT NOT NULL, {_SIZES}, graphNodeId INT"
        ),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_EVERY} {_TAIL} graphId INT NOT NULL, graphExecId INT NOT NULL",
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            f"{_EVERY} greenContextId INT, {_TAIL} bytes INT NOT NULL, copyKind INT NOT NULL, srcKind INT, dstKind INT, graphNodeId INT"
        ),
        "CUPTI_ACTIVITY_KIND_MEMSET": f"{_EVERY} {_TAIL} value INT NOT NULL, bytes INT NOT NULL, memKind INT, graphNodeId INT",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_EVERY} {_TAIL} syncType INT NOT NULL, eventId INT",
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT, correlationId INT, nameId INT NOT NULL, "
            "returnValue INT NOT NULL, callchainId INT"
        ),
        "NVTX_EVENTS": (
            "start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, text TEXT, globalTid INT, endGlobalTid INT, textId INT, "
            "domainId INT, jsonText TEXT"
        ),
        "PROFILER_OVERHEAD": "start INT NOT NULL, end INT NOT NULL, globalTid INT, correlationId INT, nameId INT NOT NULL",
        "OSRT_API": (
            "start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT, nameId INT NOT NULL, returnValue INT NOT NULL, "
            "nestingLevel INT, callchainId INT NOT NULL"
        ),
        "OSRT_CALLCHAINS": _CHAIN,
        "COMPOSITE_EVENTS": "id INT NOT NULL PRIMARY KEY, start INT NOT NULL, cpu INT, threadState INT, globalTid INT, cpuCycles INT",
        "SAMPLING_CALLCHAINS": _CHAIN,
        "ThreadNames": "nameId INT NOT NULL, priority INT, globalTid INT",
        "TARGET_INFO_GPU": (
            "vmId INT NOT NULL, id INT NOT NULL, name TEXT, smCount INT, totalMemory INT, computeMajor INT, computeMinor INT, "
            "threadsPerWarp INT, cuDevice INT, uuid TEXT"
        ),
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INT, utcTime TEXT, localTime TEXT",
    },
}
_NOT_NULL_DEFAULT = 0

_COPY_KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
_MEMORY_KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2}
_SYNC_TYPES = {"Event Sync": 1, "Stream Wait Event": 2, "Stream Sync": 3, "Context Sync": 4}

PID = 4321
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75


def global_tid(tid: int, pid: int = PID, machine: int = 0) -> int:
    """Return the serialised identifier: hardware 8 bits, virtual machine 8, process 24, thread 24; as SQLite stores it, signed."""
    number = (machine << 56) | (1 << 48) | (pid << 24) | tid
    return number - (1 << 64) if number >= 1 << 63 else number


class NsysFile:
    """Rows of an export; `write` makes the file."""

    def __init__(self, generation: Generation = "2024") -> None:
        self.generation = generation
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}

    def add(self, table: str, **values: Any) -> None:
        """Add a row; columns that the generation lacks are left out."""
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        """Return the id of `text` in StringIds."""
        return self._strings.setdefault(text, len(self._strings) + 1)

    def _work(self, table: str, start: int, end: int, correlation: int, **values: Any) -> None:
        every = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": global_tid(0, values.pop("pid", PID))}
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", start=start, end=end, correlationId=correlation, **(every | values))

    def kernel(self, name: str, start: int, end: int, correlation: int, **values: Any) -> None:
        """Add a kernel; keywords replace columns, `pid` its process."""
        sizes = {"gridX": 1080, "gridY": 1, "gridZ": 1, "blockX": 256, "blockY": 1, "blockZ": 1}
        names = {"demangledName": self.string(name), "shortName": self.string(name.partition("<")[0])}
        self._work("KERNEL", start, end, correlation, **(sizes | names | values))

    def copy(self, kind: str, source: str, target: str, start: int, end: int, correlation: int, **values: Any) -> None:
        """Add a copy, such as ('HtoD', 'Pinned', 'Device')."""
        kinds = {"copyKind": _COPY_KINDS[kind], "srcKind": _MEMORY_KINDS[source], "dstKind": _MEMORY_KINDS[target]}
        self._work("MEMCPY", start, end, correlation, **({"bytes": 1 << 20} | kinds | values))

    def memset(self, start: int, end: int, correlation: int, **values: Any) -> None:
        """Add a memset."""
        self._work("MEMSET", start, end, correlation, **({"bytes": 4096, "value": 0, "memKind": 2} | values))

    def graph(self, start: int, end: int, correlation: int, **values: Any) -> None:
        """Add a graph launch that was recorded as one piece of work."""
        self._work("GRAPH_TRACE", start, end, correlation, **({"graphId": 5, "graphExecId": 6} | values))

    def sync(self, kind: str, start: int, end: int, correlation: int, **values: Any) -> None:
        """Add CUPTI's record of a synchronisation."""
        self._work("SYNCHRONIZATION", start, end, correlation, syncType=_SYNC_TYPES[kind], **values)

    def call(self, api: str, start: int, end: int, correlation: int, tid: int = 1, pid: int = PID) -> None:
        """Add a CUDA call."""
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=global_tid(tid, pid), correlationId=correlation,
            nameId=self.string(api), returnValue=0,
        )  # fmt: skip

    def os(self, name: str, start: int, end: int, chain: Sequence[str | tuple[str, str]] = (), tid: int = 1, pid: int = PID) -> None:
        """Add a call of the operating system; `chain`: its symbols from the innermost on, or (symbol, module)."""
        number = self._chain("OSRT_CALLCHAINS", chain) if chain else 0
        self.add(
            "OSRT_API", start=start, end=end, eventClass=27, globalTid=global_tid(tid, pid), nameId=self.string(name), returnValue=0,
            callchainId=number,
        )  # fmt: skip

    def sample(self, moment: int, chain: Sequence[str | tuple[str, str]], tid: int = 1) -> None:
        """Add a sample of a thread that runs."""
        self.add("COMPOSITE_EVENTS", id=self._chain("SAMPLING_CALLCHAINS", chain), start=moment, threadState=1, globalTid=global_tid(tid))

    def _chain(self, table: str, chain: Sequence[str | tuple[str, str]]) -> int:
        number = len(self.rows.get(table, [])) + 1
        for depth, entry in enumerate(chain):
            symbol, module = entry if isinstance(entry, tuple) else (entry, "/usr/lib/libpython3.11.so.1.0")
            self.add(table, id=number, symbol=self.string(symbol), module=self.string(module), stackDepth=depth)
        return number

    def range(self, text: str, start: int, end: int | None, tid: int = 1, *, pid: int = PID, domain: int = 0, kind: int = PUSH_POP) -> None:
        """Add an NVTX event; its text is registered where the generation registers texts."""
        named = {"text": text} if self.generation == "2021" else {"textId": self.string(text)}
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=global_tid(tid, pid), domainId=domain, **named)

    def gpu(self, name: str = "NVIDIA H100 80GB HBM3", number: int = 0, **values: Any) -> None:
        """Describe a GPU."""
        every = {"smCount": 132, "totalMemory": 85_000_000_000, "computeMajor": 9, "computeMinor": 0, "threadsPerWarp": 32}
        self.add("TARGET_INFO_GPU", vmId=1, id=number, name=name, **({"cuDevice": number} | every | values))

    def write(self, path: Path, leave_out: Sequence[str] = ()) -> Path:
        """Write the export to `path`, without the tables `leave_out`, and return it. Tables without rows are not made, as nsys does."""
        self.rows["StringIds"] = [{"id": number, "value": text} for text, number in self._strings.items()]
        with closing(sqlite3.connect(path)) as connection, connection:
            for table, columns in _TABLES[self.generation].items():
                rows = self.rows.get(table, [])
                if table not in leave_out and (rows or table == "StringIds"):
                    connection.execute(f"CREATE TABLE {table} ({columns})")
                    self._insert(connection, table, rows)
        return path

    def _insert(self, connection: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
        known = [(name, required) for _, name, _, required, _, _ in connection.execute(f"PRAGMA table_info({table})")]
        places = ", ".join("?" * len(known))
        values = [[_filled(row.get(name), required) for name, required in known] for row in rows]
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", values)  # noqa: S608


def _filled(value: Any, required: int) -> Any:
    return _NOT_NULL_DEFAULT if value is None and required else value


def of_simulation(run: Simulation, generation: Generation = "2024") -> NsysFile:
    """Return `run` as nsys would have recorded it with emit_nvtx(record_shapes=True): the same events, from the same clock."""
    file = NsysFile(generation)
    file.gpu()
    for event in run.events:
        _add(file, event["cat"], event)
    return file


def _add(file: NsysFile, category: str, event: dict[str, Any]) -> None:
    start = round(event["ts"] * 1000)
    end, args = start + round(event["dur"] * 1000), event["args"]
    if category in ("cpu_op", "user_annotation"):
        file.range(_emitted(event["name"], args), start, end, int(event["tid"]))
    elif category == "cuda_runtime":
        file.call(f"{event['name']}_v7000", start, end, args["correlation"], int(event["tid"]))
    elif category == "kernel":
        node = args.get("graph node id")
        file.kernel(event["name"], start, end, args["correlation"], streamId=args["stream"], graphNodeId=node)
    elif category == "gpu_memcpy":
        kind, source, _, target = event["name"].removeprefix("Memcpy ").replace("(", "").replace(")", "").split()
        file.copy(kind, source, target, start, end, args["correlation"], streamId=args["stream"], bytes=args["bytes"])
    elif category == "cuda_sync" and file.generation != "2021":
        file.sync(event["name"], start, end, args["correlation"])


def _emitted(name: str, args: dict[str, Any]) -> str:
    """Return the text of a range as torch writes it (torch/csrc/profiler/util.cpp, getNvtxStr)."""
    text = name
    if "Sequence number" in args:
        text += f", seq = {args['Sequence number']}"
    if "Input Dims" in args:
        text += f", op_id = 7, sizes = {args['Input Dims']}, input_op_ids = [(6,0)]"
    return text

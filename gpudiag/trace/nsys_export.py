"""The SQLite export of Nsight Systems as columns, its processes and devices. It is untrusted: opened read-only, nothing in it can run.

A report in the program's own format, which is not documented, is exported by `nsys` of this machine into gpudiag's cache folder. It is run
as its user would run it, with a time limit, and reads the formats of its own and of older versions.

Only ordinary columns of real tables are read: no view, no virtual table, no generated column (https://www.sqlite.org/security.html). No
text of the file reaches a statement. Work and texts are bounded by the size of the file, because a damaged tree of pages may name a page
twice, and many rows the same pages for their long values. So no value is fetched that is not of the wanted type.

Processes and threads: exports serialise identifiers into one integer, from the highest bits: hardware 8, virtual machine 8, process 24,
thread 24 (NVIDIA, export schema, "Serialized process and thread identifiers"). All but the thread identify the process here: a merged
recording of several machines may use a process id twice.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from gpudiag.document_cache import find_cache_folder
from gpudiag.errors import InputError
from gpudiag.files import open_file
from gpudiag.model.hardware import ObservedDevice
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Thread
from gpudiag.trace.decompression import MAX_TEXT_BYTES, format_path

if TYPE_CHECKING:
    import sqlite3

_HEADER_BYTES = 100
"""Of these, 16 and 17 hold the size of a page (1 stands for 65,536) and 28 to 31 the number of pages
(https://www.sqlite.org/fileformat.html, section 1.3)."""

EXPORT_AGAIN = "export the recording again: nsys export --type sqlite REPORT.nsys-rep"

CHUNK_ROWS = 50_000
"""Rows that exist as Python objects at a time."""

LONGEST_TEXT = 8192
"""Characters of a name that are kept; C++ kernel names reach some thousands."""

_STEPS_PER_BYTE = 12
"""Instructions of SQLite's machine that are allowed for each byte of the file: one with a million kernels took 0.44 (measured)."""
_STEPS_AT_LEAST = 2_000_000
_CALL_EVERY = 100_000

_TEXTS_PER_BYTE = 2
"""Bytes of text that are read for each byte of the file: it holds each once, and few names are used by two tables."""
_TEXTS_AT_LEAST = 1 << 20


_TIMES = {"start": "start_ns", "end": "end_ns"}


class Export:
    """An open export: which of its tables hold which columns, and their contents."""

    def __init__(self, connection: sqlite3.Connection, tables: Iterable[str]) -> None:
        self._connection = connection
        self.columns: dict[str, frozenset[str]] = {}
        """Ordinary columns of each table that is there; views and virtual tables have no root page."""
        real = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
        for table in tables:
            if connection.execute(real, (table,)).fetchone() is not None:
                found = frozenset(row[1] for row in connection.execute(f"PRAGMA table_info([{table}])"))
                self.columns |= {table: found} if found else {}

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str] = (), products: Mapping[str, Sequence[str]] | None = None,
        where: str = "",
    ) -> pl.DataFrame:  # fmt: skip
        """Return the columns of `table` as Int64 and String; a column that the export lacks, or a value of another type, is null.

        start and end are called start_ns and end_ns, as in tables of traces.

        `products`: new columns, each the product of columns. `where`: a condition of gpudiag's own on columns that are there.
        """
        products = products or {}
        known = self.columns.get(table, frozenset())
        names = (*integers, *products, *texts)
        schema = dict.fromkeys((*integers, *products), pl.Int64()) | dict.fromkeys(texts, pl.String())
        parts = [pl.DataFrame(schema=schema)]
        if known.isdisjoint(names):
            return parts[0].rename(_TIMES, strict=False)
        fields = [_select_integer(name) if name in known else "NULL" for name in integers]
        fields += [" * ".join(f"[{name}]" for name in of) if known.issuperset(of) else "NULL" for of in products.values()]
        fields += [_select_text(name) if name in known else "NULL" for name in texts]
        condition = f" WHERE {where}" if where else ""
        cursor = self._connection.execute(f"SELECT {', '.join(fields)} FROM [{table}]{condition}")  # noqa: S608 - names are gpudiag's own
        while rows := cursor.fetchmany(CHUNK_ROWS):
            columns = zip(names, zip(*rows, strict=True), strict=True)
            parts.append(pl.DataFrame([_build_column(name, values, schema[name]) for name, values in columns]))
        return pl.concat(parts, rechunk=True).rename(_TIMES, strict=False)

    def counts(self, table: str, column: str) -> dict[int, int]:
        """Return the number of rows of `table` for each number in `column`."""
        if column not in self.columns.get(table, frozenset()):
            return {}
        statement = f"SELECT [{column}], count(*) FROM [{table}] WHERE typeof([{column}]) = 'integer' GROUP BY 1"  # noqa: S608 - as above
        return dict(self._connection.execute(statement))

    def strings(self, table: str, column: str) -> pl.DataFrame:
        """Return (id, value) of the texts of StringIds that `column` of `table` refers to."""
        known = self.columns.get(table, frozenset())
        if column not in known or not {"id", "value"} <= self.columns.get("StringIds", frozenset()):
            return pl.DataFrame(schema={"id": pl.Int64, "value": pl.String})
        used = f"SELECT {_select_integer(column)} FROM [{table}]"  # noqa: S608 - names are gpudiag's own
        statement = f"SELECT {_select_integer('id')}, {_select_text('value')} FROM StringIds WHERE id IN ({used})"  # noqa: S608
        rows = self._connection.execute(statement).fetchall()
        ids, values = zip(*rows, strict=True) if rows else ((), ())
        found = pl.DataFrame([_build_column("id", ids, pl.Int64()), _build_column("value", values, pl.String())])
        return found.drop_nulls().unique("id", keep="first", maintain_order=True)


def _select_integer(column: str) -> str:
    return f"CASE typeof([{column}]) WHEN 'integer' THEN [{column}] END"


def _select_text(column: str) -> str:
    return f"CASE typeof([{column}]) WHEN 'text' THEN substr([{column}], 1, {LONGEST_TEXT}) END"


def _build_column(name: str, values: Sequence[Any], dtype: pl.DataType) -> pl.Series:
    """Return `values` as a column; SQLite lets every row have a type of its own, and what is not of `dtype` is null."""
    wanted = int if dtype == pl.Int64 else str
    if not set(map(type, values)) <= {wanted, type(None)}:
        values = [value if type(value) is wanted else None for value in values]
    return pl.Series(name, values, dtype=dtype)


@contextmanager
def open_export(path: str, tables: Iterable[str]) -> Iterator[Export]:
    """Open the export at `path` for reading those of `tables` that it has.

    Raises InputError where the file is damaged, also when that shows while it is read.
    """
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise InputError(f"{format_path(path)} cannot be read: {error.strerror}", "check the path and its access rights") from None
    if size > MAX_TEXT_BYTES:
        raise InputError(f"{format_path(path)} is larger than {MAX_TEXT_BYTES >> 30} GiB", "record fewer steps")
    # a file that is shorter than its header says: SQLite reads what is missing as empty pages
    with open_file(path) as file:
        head = file.read(_HEADER_BYTES)
    page = int.from_bytes(head[16:18], "big")
    whole = int.from_bytes(head[28:32], "big") * (65_536 if page == 1 else page)
    if len(head) < _HEADER_BYTES or size < whole:
        raise InputError(f"{format_path(path)} is damaged or incomplete: {size:,} of {whole:,} bytes are there", EXPORT_AGAIN)
    import sqlite3  # loaded for exports alone

    try:
        with closing(sqlite3.connect(f"{Path(os.path.abspath(path)).as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = _bound_texts(path, size)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA query_only = ON")
            # SQLite gives up after more work than a file of `size` bytes can ask for
            most, calls = (_STEPS_AT_LEAST + _STEPS_PER_BYTE * size) // _CALL_EVERY, itertools.count(1)
            connection.set_progress_handler(lambda: next(calls) > most, _CALL_EVERY)
            yield Export(connection, tables)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second where a damaged name stands in a message of SQLite
        told = "".join(filter(str.isprintable, str(error)))[:100]
        raise InputError(f"{format_path(path)} is damaged or incomplete: SQLite says '{told}'", EXPORT_AGAIN) from None


def _bound_texts(path: str, size: int) -> Callable[[bytes], str]:
    """Return what decodes the texts of a file of `size` bytes, and raises InputError once they are more than it has room for."""
    left = _TEXTS_AT_LEAST + _TEXTS_PER_BYTE * size

    def decoded(text: bytes) -> str:
        nonlocal left
        left -= len(text)
        if left < 0:
            raise InputError(f"{format_path(path)} is damaged: its texts are longer than the file", EXPORT_AGAIN)
        return text.decode("utf-8", "replace")

    return decoded


_THREAD_BITS = 24
_LOW = (1 << _THREAD_BITS) - 1
_LISTED = 8

WORK_TABLES = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET"))
CALL_TABLE = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGE_TABLE = "NVTX_EVENTS"

_SIGNS = (
    *((table, "globalPid", what) for table, what in zip(WORK_TABLES, ("kernel", "graph launch", "copy", "memset"), strict=True)),
    (CALL_TABLE, "globalTid", "CUDA call"),
    (RANGE_TABLE, "globalTid", "NVTX range"),
)
"""What shows that a process is the one to read, the firmest first: table, column of its process, one of its rows in words."""


def filter_process(frame: pl.DataFrame, process: int | None, column: str = "globalTid") -> pl.DataFrame:
    """Return the rows of `process` by `column`; all of them where none names a process (then the export holds only one)."""
    if process is None or frame[column].null_count() == frame.height:
        return frame
    ids = frame[column]
    return frame.filter(pl.Series(ids.fill_null(0).to_numpy() >> _THREAD_BITS == process) & ids.is_not_null())


def choose_process(export: Export, path: str) -> tuple[int | None, tuple[Notice, ...]]:
    """Return the process with most kernels (None: the export names none) and what was left out.

    Raises InputError where work of several processes cannot be told apart.
    """
    counts: dict[str, Counter[int]] = {table: Counter() for table, _, _ in _SIGNS}  # rows of each process
    for table, column, _ in _SIGNS:
        for number, count in export.counts(table, column).items():
            counts[table][number >> _THREAD_BITS] += count
    if len(counts[CALL_TABLE]) > 1 and any(not counts[table] and export.read(table, ["start"]).height for table in WORK_TABLES):
        raise InputError(
            f"{format_path(path)} holds {len(counts[CALL_TABLE])} processes, but its device work does not say whose it is",
            "export it again with a newer Nsight Systems, or record one process",
        )
    for table, _, what in _SIGNS:
        order = [process for process, _ in sorted(counts[table].items(), key=lambda item: (-item[1], item[0]))]
        if len(order) == 1:
            return order[0], ()
        if order:
            plural = {"copy": "copies", "graph launch": "graph launches"}.get(what, f"{what}s")
            rows = [(other & _LOW, counts[table][other]) for other in order[1:]]
            listed = ", ".join(f"{pid} ({count:,} {what if count == 1 else plural})" for pid, count in rows[:_LISTED])
            others = listed + (f" and {len(rows) - _LISTED} more" if len(rows) > _LISTED else "")
            work, pid = f"{counts[table][order[0]]:,} {plural}", order[0] & _LOW
            return order[0], (make_notice(NoticeCode.NSYS_ONE_PROCESS, process=pid, work=work, left_out=len(rows), others=others),)
    return None, ()


def read_threads(export: Export, ids: pl.Series) -> tuple[Thread, ...]:
    """Return the threads of the distinct `ids` (globalTid), with their names where the export has them."""
    table = export.read("ThreadNames", ["globalTid", "nameId"])
    named = table.join(export.strings("ThreadNames", "nameId").rename({"id": "nameId", "value": "name"}), on="nameId", how="inner")
    known = dict(named.select("globalTid", "name").unique("globalTid", keep="first", maintain_order=True).iter_rows())
    return tuple(
        Thread(str(number >> _THREAD_BITS & _LOW), str(number & _LOW), (known.get(number) or "")[:200]) for number in ids.to_list()
    )


_MOST = 1024
_LONGEST_NAME = 200
GPU_TABLES = ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU")
"""The second is the name of older exports."""


def read_devices(export: Export, process: int | None) -> tuple[ObservedDevice, ...]:
    """Return the GPUs that the export describes; `index` is CUDA's number in `process`, which CUDA_VISIBLE_DEVICES may change.

    By TARGET_INFO_CUDA_DEVICE, else by the GPU's own column cuDevice, else as the driver counts.
    """
    numbers = ["id", "smCount", "totalMemory", "computeMajor", "computeMinor", "threadsPerWarp", "cuDevice"]
    table = next((name for name in GPU_TABLES if name in export.columns), GPU_TABLES[0])
    gpus = export.read(table, numbers, ["name"]).filter(pl.col("id").is_not_null()).head(_MOST)
    # CUDA's number of each GPU (its id in TARGET_INFO_GPU) that `process` saw; empty where the export does not tell
    rows = export.read("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"]).drop_nulls(["gpuId", "cudaId"])
    own = rows.filter(pl.col("pid") == process & _LOW) if process is not None and rows["pid"].null_count() < rows.height else rows
    given = dict(own.select("gpuId", "cudaId").iter_rows())
    devices = []
    for row in gpus.iter_rows(named=True):
        number = {name: value if isinstance(value, int) and value >= 0 else None for name, value in row.items()}
        index = given.get(number["id"] if number["id"] is not None else -1)
        if given and index is None:  # the process did not see it
            continue
        if index is None:
            index = number["id"] if number["cuDevice"] is None else number["cuDevice"]
        major, minor = number["computeMajor"], number["computeMinor"]
        device = ObservedDevice(
            index=index or 0,
            name=str(row["name"] or "")[:_LONGEST_NAME],
            sm_count=number["smCount"] or None,
            memory_bytes=number["totalMemory"] or None,
            compute_capability=None if not major or minor is None else f"{major}.{minor}",
            warp_size=number["threadsPerWarp"] or None,
        )
        devices.append(device)
    return tuple(devices)


REPORT_NAMES = (".nsys-rep", ".qdrep")
"""Endings of reports (.qdrep before 2021.4)."""

TIME_LIMIT_S = 600
KEPT_EXPORTS = 4
"""Exports of other reports that stay in the cache folder, the newest first: they are larger than the reports."""


def export_report(path: str) -> Path:
    """Return the SQLite export of the report at `path`: a kept one of the same file, else a new one.

    Raises InputError where there is no `nsys`, no such file, or the export fails.
    """
    name = format_path(path)
    by_hand = f"export it: nsys export --type sqlite {name}"
    program, folder = shutil.which("nsys"), find_cache_folder()
    if program is None or folder is None or "://" in path:
        raise InputError(f"{name} is a report in Nsight Systems' own format", by_hand)
    try:
        about = os.stat(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read ({getattr(error, 'strerror', error)})", "check the path and its permissions") from error
    key = f"{os.path.realpath(path)}\0{about.st_size}\0{about.st_mtime_ns}".encode(errors="surrogateescape")
    exports = folder / "nsys"
    target = exports / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.sqlite"
    if not target.is_file():
        try:
            exports.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=exports) as made:
                export = Path(made) / "export.sqlite"
                # a list of arguments, no shell; the path is absolute, so that none is taken for an option
                command = [program, "export", "--type", "sqlite", "--output", str(export), os.path.abspath(path)]
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIME_LIMIT_S, check=False)  # noqa: S603
                if done.returncode or not export.is_file():
                    lines = (done.stderr or done.stdout).decode("utf-8", "replace").splitlines()
                    shown = ("".join(filter(str.isprintable, line))[:200] for line in reversed(lines) if line.strip())
                    told = next(shown, f"code {done.returncode}")
                    newer = f"with the version that recorded it, or a newer one, {by_hand}"
                    raise InputError(f"{name}: nsys cannot export it: {told}", newer)
                os.replace(export, target)
        except subprocess.TimeoutExpired:
            raise InputError(f"{name}: nsys did not export it within {TIME_LIMIT_S // 60} minutes", by_hand) from None
        except OSError as error:
            raise InputError(f"{name} cannot be exported into {exports} ({error.strerror})", by_hand) from error
        kept = sorted(exports.glob("*.sqlite"), key=lambda export: export.stat().st_mtime_ns)
        for old in kept[: -KEPT_EXPORTS - 1]:
            with suppress(OSError):
                old.unlink()
    return target

"""What torch.compile did: compilations with the guard that failed, and graph breaks; as a bundle keeps them and as a report tells them."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

COMPILE_LOG_VERSION = 1

GuardKind = Literal[
    "size", "stride", "rank", "dtype", "device", "requires_grad", "value", "identity", "type", "mode", "aliasing", "backend", "other"
]  # fmt: skip
"""What a guard asks: a tensor's size, stride, number of dimensions, element type, device or gradient; the value of a number, a text or a
truth value; which object it is; its type; a global setting (grad mode, autocast); whether two tensors are one; which back end compiles."""


class CodePlace(msgspec.Struct, frozen=True):
    """A line of the program; `line` 0: not known."""

    file: str
    line: int = 0
    function: str = ""

    @property
    def near_file(self) -> str:
        """The path with its last two parts, 'folder/file.py'."""
        return "/".join(re.split(r"[\\/]", self.file)[-2:])


class FailedGuard(msgspec.Struct, frozen=True, kw_only=True):
    """Why a function was compiled again: what the compiled code had taken for granted."""

    kind: GuardKind
    name: str = ""
    """What it asks of, as the program calls it; '' where that is not told."""
    expected: str = ""
    actual: str = ""
    """Numbers, truth values and names of torch; '' for all others: texts of the program are not kept."""
    place: CodePlace | None = None
    """The line that made the compiler ask; None: not told."""


class Compilation(msgspec.Struct, frozen=True, kw_only=True):
    """One compilation of one frame: of a function of the program, or of its rest after a graph break."""

    id: str = ""
    """'2/1': the second time that frame 2 was compiled, as 'Torch-Compiled Region: 2/1' of a trace names it; '' in older torch."""
    place: CodePlace
    """The function, at its first line."""
    resumes_at: int | None = None
    """The line of the graph break after which this is the rest of the function; None: it is the function itself."""
    begun_unix_ns: int | None = None
    duration_ns: int | None = None
    backward: bool = False
    """The backward graph, where it is compiled at its first call."""
    graph_ops: int | None = None
    """Operators of the traced graph; None: not told, or no graph."""
    guards: int | None = None
    guard: FailedGuard | None = None
    """None: it was the first of its frame, or this torch (before 2.7) does not tell."""
    failed: str = ""
    """Kind of the error that ended it; '' where it succeeded."""


BreakKind = Literal["", "number", "branch", "asked", "call"]
"""A number is read from a tensor, a condition asks a tensor, the program asks for the break, a call cannot be compiled; '': another."""


class GraphBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A place at which a graph had to end."""

    reason: str
    """The compiler's first line on it, without values."""
    kind: BreakKind = ""
    stack: tuple[CodePlace, ...]
    """From the compiled function to the line that it could not compile."""
    count: int = 1
    """Compilations that ended a graph there."""


class CompileLog(msgspec.Struct, frozen=True):
    """`inductor/rank<N>-compilations.json` of a bundle."""

    version: int = COMPILE_LOG_VERSION
    compilations: tuple[Compilation, ...] = ()
    """In the order in which they ended."""
    breaks: tuple[GraphBreak, ...] = ()
    dropped: int = 0
    """Compilations and breaks that were left out: torch forgets old ones, and no more than a few hundred are kept."""


Cure = Literal["", "dynamic", "pad", "constant", "outside", "same_mode", "contiguous", "one_dtype", "one_backend"]


class RecompileRow(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was compiled again, by the guard that failed: sums over its compilations."""

    function: CodePlace
    rest: bool = False
    """It is what follows a graph break of the function, from that line on."""
    count: int
    compile_ns: int | None
    """Of all of them; null: not told."""
    in_steps: int
    """How many fell into the analysed steps."""
    idle_ns: int | None
    """Idle time of the device, of all causes, while they ran in the analysed steps; null: the clocks cannot be matched."""
    kind: GuardKind | None
    name: str = ""
    values: tuple[tuple[str, str], ...] = ()
    """(expected, actual) of some, as far as they are kept."""
    place: CodePlace | None = None
    cure: Cure = ""
    """What mends it; '': nothing is known that does."""


class BreakRow(msgspec.Struct, frozen=True, kw_only=True):
    """A place at which compiled code is left, with what it costs in the analysed steps."""

    reason: str
    """'' where torch did not tell: a function that is compiled on its own begins there."""
    kind: BreakKind = ""
    place: CodePlace
    function: CodePlace | None = None
    """The compiled function that is left, where it is another than that of `place`."""
    count: int = 0
    """Times that it was met while compiling; 0: the trace alone shows it."""
    crossed: int | None = None
    """Times that the analysed steps passed it; null: the regions of the trace do not tell."""
    between_ns: int | None = None
    """Time of the host between the graphs on both sides, in the analysed steps: guards, Python, ops that are not compiled; what is compiled
    meanwhile is not counted."""
    idle_ns: int | None = None
    """Idle time of the device meanwhile."""


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile did in the run, and what that cost in the analysed steps."""

    compilations: int
    functions: int
    """Functions of the program among them, with what follows their graph breaks."""
    compile_ns: int | None
    """Time of all compilations since the process began; null: not told."""
    in_steps: int
    """Compilations that fell into the analysed steps."""
    idle_ns: int | None = None
    """Idle time of the device, of all causes, while something was compiled in the analysed steps; null: nothing tells when that was."""
    failed: int = 0
    dropped: int = 0
    recompiles: tuple[RecompileRow, ...] = ()
    """The dearest first."""
    breaks: tuple[BreakRow, ...] = ()
    """The dearest first."""

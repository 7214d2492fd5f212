"""The server of `gpudiag mcp`: the Model Context Protocol on standard input and output, the tools, and the process that analyses.

The only module that needs the library `mcp`, which it imports inside functions.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpudiag.agents.jobs import COMMANDS, Ab, Job, Jobs, Run
from gpudiag.agents.pages import build_page
from gpudiag.agents.questions import QUESTIONS, build_schema, describe_tool, name_tool, read_arguments, read_question
from gpudiag.agents.skill import read_instructions
from gpudiag.diagnosis.config import Config
from gpudiag.errors import GpudiagError, InputError
from gpudiag.host_memory import compute_reserve_bytes, measure_resident_bytes, measure_spare_bytes
from gpudiag.report.console import clean
from gpudiag.workers import UnreadRank, Worker

if TYPE_CHECKING:
    from mcp.server import Server
    from mcp.types import Tool

ANSWER = "gpudiag.agents.desk:answer_request"
_LOOK_S = 0.2
_LONGEST_ERROR = 1_500
_MUCH_BYTES = 1 << 30
"""What a question may take in any case, however little memory others leave."""


class Analyst:
    """The process in which recordings are read: it can be ended, and what it does is no danger to the server."""

    def __init__(self, root: Path, config: Config, limit_s: float, answer: str = ANSWER) -> None:
        self._root, self._config, self._limit_s, self._answer = str(root), config, limit_s, answer
        self._worker: Worker | None = None
        self._turn = threading.Lock()

    def ask(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return the answer; one question after the other.

        Raises GpudiagError where there is none, not within the time limit, or not in the memory that the machine has left.
        """
        request = msgspec.json.encode({"root": self._root, "config": self._config, "tool": tool, "arguments": arguments})
        with self._turn:
            worker = self._worker = self._worker or Worker(self._answer)
            answered, ended = threading.Event(), list[GpudiagError]()
            threading.Thread(target=self._watch, args=(tool, worker, answered, ended), daemon=True).start()
            found = worker.ask(request)
            answered.set()
            if isinstance(found, str):
                self.close()
                lost = InputError(f"the process that reads recordings {found}", "ask again, or of a smaller recording")
                raise ended[0] if ended else lost
        if isinstance(found, UnreadRank):
            raise found.error()
        return found.decode()

    def _watch(self, tool: str, worker: Worker, answered: threading.Event, ended: list[GpudiagError]) -> None:
        over = time.monotonic() + self._limit_s
        while not answered.wait(_LOOK_S):
            left = measure_spare_bytes()
            if time.monotonic() > over:
                ended.append(InputError(f"{tool} took more than {self._limit_s:g} s and was ended", "gpudiag mcp --time-limit allows more"))
            elif left is not None and left < compute_reserve_bytes() and measure_resident_bytes({worker.pid}) > _MUCH_BYTES:
                ended.append(InputError(f"{tool} was ended: this machine has little memory left", "ask for less, such as fewer joins"))
            if ended:
                worker.close()
                return

    def close(self) -> None:
        """End the process; the next question begins another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def serve(root: Path, config: Config, *, allow_run: bool, limit_s: float) -> None:
    """Answer the client on standard input and output until it leaves; `root`: the folder that everything lies in.

    `allow_run`: training scripts may be started; `limit_s`: seconds that a question may take.
    """
    import anyio
    from mcp.server.stdio import stdio_server

    with closing(Analyst(root, config, limit_s)) as analyst, closing(Jobs(root)) as jobs:
        server = build_server(analyst, jobs if allow_run else None)

        async def run() -> None:
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())

        anyio.run(run)


def build_server(analyst: Analyst, jobs: Jobs | None) -> Server[Any]:
    """Return the server with its tools; `jobs`: what starts scripts, None where that is not allowed."""
    import anyio
    from mcp.server import Server
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent

    from gpudiag.cache import find_version

    async def list_tools(_context: object, _params: object) -> ListToolsResult:
        return ListToolsResult(tools=[_build_tool(kind) for kind in (*QUESTIONS, *(COMMANDS if jobs else ()))])

    async def call_tool(_context: object, params: CallToolRequestParams) -> CallToolResult:
        arguments = params.arguments or {}
        try:
            if params.name in _COMMAND_BY_NAME:
                text = await _command(jobs, params.name, arguments)
            else:
                read_question(params.name, arguments)  # what is wrong is said at once
                text = await anyio.to_thread.run_sync(partial(analyst.ask, params.name, arguments), abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 - the agent is told, and the server goes on
            said = str(error) if isinstance(error, GpudiagError) else f"internal error: {type(error).__name__}: {error} (this is a bug)"
            return CallToolResult(content=[TextContent(type="text", text=clean(said, _LONGEST_ERROR))], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=text)])

    return Server("gpudiag", version=find_version("gpudiag") or "", instructions=read_instructions(),
                  on_list_tools=list_tools, on_call_tool=call_tool)  # fmt: skip


_COMMAND_BY_NAME = {name_tool(kind): kind for kind in COMMANDS}


async def _command(jobs: Jobs | None, name: str, arguments: dict[str, Any]) -> str:
    import anyio

    if jobs is None:
        raise InputError(f"{name} starts programs, which this server may not", "gpudiag mcp --allow-run allows it")
    asked = read_arguments(_COMMAND_BY_NAME[name], arguments)
    if isinstance(asked, Job):
        if asked.stop:
            jobs.stop()
    elif isinstance(asked, (Run, Ab)):
        jobs.start(asked)
    with anyio.move_on_after(asked.wait_s):
        while jobs.is_running():
            await anyio.sleep(_LOOK_S)
    return build_page(jobs.tell(), 1)


def _build_tool(kind: type[msgspec.Struct]) -> Tool:
    from mcp.types import Tool, ToolAnnotations

    starts = kind in COMMANDS
    hints = ToolAnnotations(read_only_hint=not starts, destructive_hint=starts, open_world_hint=starts)
    return Tool(name=name_tool(kind), description=describe_tool(kind), input_schema=build_schema(kind), annotations=hints)

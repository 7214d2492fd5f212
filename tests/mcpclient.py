"""A client of `gpudiag mcp` as coding agents are: that of the SDK, over the standard streams: `with serve(folder) as agent`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What a tool answered."""

    text: str
    failed: bool

    @property
    def data(self) -> str:
        """Return what stands between the marks."""
        lines = self.text.splitlines()
        assert lines[1].startswith("<recording-")
        assert lines[-1] == lines[1].replace("<", "</")
        return "\n".join(lines[2:-1])


class Agent:
    """Asks one server; `tools` are those that it offers, by name."""

    def __init__(self, portal: Any, client: Any) -> None:
        self._portal, self._client = portal, client
        self.tools = {tool.name: tool for tool in portal.call(client.list_tools).tools}

    @property
    def instructions(self) -> str:
        """Return what the server tells the model of its client."""
        return str(self._client.instructions)

    def list_again(self) -> str:
        """Return all that the server tells of its tools, asked for anew."""
        return "".join(tool.model_dump_json() for tool in self._portal.call(self._client.session.list_tools).tools)

    def ask(self, tool: str, **arguments: Any) -> Reply:
        """Return the reply to one call."""
        found = self._portal.call(self._client.call_tool, tool, arguments)
        (content,) = found.content
        return Reply(content.text, found.is_error)

    def read(self, tool: str, **arguments: Any) -> str:
        """Return the whole answer: all of its pages, one after the other."""
        pages, number = [], 1
        while True:
            reply = self.ask(tool, **arguments, page=number)
            assert not reply.failed, reply.text
            pages.append(reply.data)
            if f"page={number + 1}" not in reply.text.splitlines()[0]:
                return "\n".join(pages)
            number += 1


@contextmanager
def serve(root: Path, *options: str) -> Iterator[Agent]:
    """Yield a client of `gpudiag mcp root options`, a process that ends with it."""
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters

    command = ["-m", "gpudiag", "mcp", str(root), *options]
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:
        yield Agent(portal, client)

"""What a process that reads recordings may do: answer late. It imports nothing that takes time."""

from __future__ import annotations

import json
import time


def answer(request: bytes) -> bytes:
    """Answer after as many seconds as are asked for, holding as many bytes of memory."""
    arguments = json.loads(request)["arguments"]
    held = b"x" * arguments.get("bytes", 0)
    time.sleep(arguments.get("seconds", 0))
    return b"answered, holding %d" % len(held)

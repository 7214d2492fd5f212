"""SKILL.md: how an agent asks gpudiag, how it reads the answers, and what it must not conclude."""

from __future__ import annotations

from importlib.resources import files

_BEGIN, _END = "<!-- instructions -->", "<!-- end -->"


def read_skill() -> str:
    """Return SKILL.md."""
    return files("gpudiag.agents").joinpath("SKILL.md").read_text(encoding="utf-8").replace(f"{_BEGIN}\n", "").replace(f"{_END}\n", "")


def read_instructions() -> str:
    """Return the part of SKILL.md that a client of `gpudiag mcp` shows its model: how to read answers, and what not to conclude."""
    text = files("gpudiag.agents").joinpath("SKILL.md").read_text(encoding="utf-8")
    return text.partition(_BEGIN)[2].partition(_END)[0].strip()

"""compile: torch.compile with its defaults."""

from __future__ import annotations

from gpudiag.experiment.fixes.dynamo import CompileFix


class Compile(CompileFix):
    """Compiles each root (https://docs.pytorch.org/docs/stable/generated/torch.compile.html)."""

    id = "compile"

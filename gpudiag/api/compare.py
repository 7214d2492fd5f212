"""Two recordings compared: read, measured step by step, set side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpudiag.api.rendered import AnyPath, Rendered
from gpudiag.model.compare import StepComparison, to_json
from gpudiag.model.measured import Measured

if TYPE_CHECKING:
    from gpudiag.api.opened import Opened
    from gpudiag.diagnosis.config import Config

Progress = Callable[[str], None]


class Comparison(Rendered):
    """What changed from A to B: `data` is its JSON, version 1; the methods are its renderings."""

    def __init__(self, data: StepComparison) -> None:
        self.data = data

    def text(self, width: int | None = None, top: int = 15, color: bool = False) -> str:
        """Return it for a terminal of `width` columns (default 100) with the `top` ops that changed most."""
        from gpudiag.report import compare_text

        return compare_text.render(self.data, width=100 if width is None else width, top=top, color=color)

    def markdown(self, top: int = 30) -> str:
        """Return it as GitHub Markdown with the `top` ops that changed most."""
        from gpudiag.report import compare_markdown

        return compare_markdown.render(self.data, top=top)

    def html(self) -> str:
        """Return it as one self-contained HTML page."""
        from gpudiag.report import compare_html

        return compare_html.render(self.data)

    def json(self) -> bytes:
        """Return it as JSON (schema: `gpudiag schema compare`)."""
        return to_json(self.data)


def compare(
    a: AnyPath | Opened | Measured,
    b: AnyPath | Opened | Measured,
    *,
    rank: int | None = None,
    modules: bool = False,
    fail_if_slower: float | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Return what changed from `a` to `b`: bundles, traces, folders of ranks, reports (.json), or what was opened or measured before.

    `modules`: ops are told apart by nn.Module where Python stacks tell it; `fail_if_slower`: a share, such as 0.03, for a gate in the
    result. Raises InputError where one cannot be read. Not for a program that goes on training: see `gpudiag.api.diagnose`.
    """
    from gpudiag.api.measured import measured, measured_of
    from gpudiag.diagnosis.compare import compared

    def side(one: AnyPath | Opened | Measured, name: str) -> Measured:
        if isinstance(one, Measured):
            return one
        if isinstance(one, tuple):
            return measured_of(one)
        told = (lambda text: progress(f"{name}: {text}")) if progress else None
        return measured(one, rank=rank, modules=modules, config=config, progress=told)

    return Comparison(compared(side(a, "A"), side(b, "B"), fail_if_slower=fail_if_slower))

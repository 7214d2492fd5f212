"""Names of events: what stays as it is, what becomes a digest."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpudiag.api.scrub.words import Words
from gpudiag.attribution.sites import LIBRARY
from gpudiag.trace.categories import Kind

MAX_IDENTIFIER = 200

IDENTIFIER = re.compile(r"[A-Za-z_][\w.]{0,199}", re.ASCII)
_OPERATOR = re.compile(r"(?:autograd::engine::evaluate_function: )?[A-Za-z_][\w.]{0,199}(?:::[\w.:~<>&*(), ]{1,500})?|\[memory\]", re.ASCII)
_WRITTEN_BY_TORCH = re.compile(
    r"ProfilerStep[#*]+ *\d{1,12}|Optimizer\.(?:step|zero_grad)#\w{1,100}\.(?:step|zero_grad)|enumerate\(DataLoader\)#\w{1,100}\.__next__"
    r"|## Call CompiledFxGraph \w{1,100} ##|(?:nccl|rccl|gloo|mpi|ucc|xccl):\w{1,60}|(?:torch::)?FSDP::\w{1,60}"
    r"|DistributedDataParallel\.\w{1,60}|FullyShardedDataParallel\.\w{1,60}|PP:\d{1,6}[FBIW]\d{1,6}"
    r"|[\w.<>]{1,100} \(dynamo_timed\)|(?:CompiledFunction|CompiledFxGraph)\w{0,60}|\[memory\]",
    re.ASCII,
)
"""Annotations of torch itself; classes of optimizers and loaders, and keys of compiled graphs, stand in them."""

_PUBLIC = re.compile(
    r"(?:vllm|sglang|xfuser|aiter|triton_kernels|flashinfer|megatron|nemo|torchtitan|torchao|torchtune|axolotl|unsloth|liger_kernel|fla"
    r"|mamba_ssm|causal_conv1d|tensordict|torchrl|gymnasium|detectron2|mmcv|mmengine|mmdet|ultralytics|nvidia|cutlass|jax|flax)/"
)
"""Further packages whose folders say nothing about the user."""

_SECRET = re.compile(
    r"\w://|[\w.+-]@[\w-]{1,64}\.\w|(?<![\w<])[/\\](?:home|root|Users|mnt|data|scratch|nfs|tmp|var|opt|workspace)[/\\]"
    r"|\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|sk|pk|AKIA|ASIA|AIza|eyJ)[-_A-Za-z0-9]{16,}"
    r"|\b[A-Z][A-Z0-9_]{3,}=\S"
)
"""URLs, e-mail addresses, absolute paths, access tokens by their usual beginnings, variables with their value."""

_FRAME = re.compile(r"(?:(?P<folder>.*)[/\\])?(?P<file>[^/\\]*)\((?P<line>\d{1,9})\): (?P<function>.*)", re.DOTALL)
_SITE = re.compile(r"(?P<file>[^/\\]*):(?P<line>\d{1,9})", re.DOTALL)
_FILE = re.compile(r"[\w-][\w.-]{0,99}\.(?:py|pyx|pyi|ipynb|so)|<frozen [\w.]{1,100}>", re.ASCII)
_FUNCTION = re.compile(r"[\w.<>]{1,200}", re.ASCII)
_MODULE = re.compile(r"nn\.Module: [\w.]{1,200}", re.ASCII)
_BUILTIN = re.compile(
    r"<built-in (?:function|method) [\w.]{0,200}(?: of (?:type |module )?[\w.:]{0,200}(?: object)?(?: at 0x[0-9a-fA-F]{1,16})?)?>", re.ASCII
)
_INSTALLED = re.compile(r"(?:^|.*[/\\])((?:site-packages|dist-packages|lib[/\\]python\d[\d.]*|torch|gpudiag)(?:[/\\].*)?)", re.DOTALL)
_STEP = re.compile(r"[\w.+-]{1,100}", re.ASCII)
"""One folder of the path to a library's file."""


class Names:
    """Rewrites names; what a name becomes depends on its text alone."""

    def __init__(self, words: Words, *, keep_names: bool = False) -> None:
        self._words = words
        self._keep = keep_names

    def of(self, kind: Kind) -> Callable[[str], str]:
        """Return how names of events of this kind are rewritten."""
        return {"op": self.operator, "kernel": self.symbol, "launch": self.symbol, "frame": self.frame}.get(kind, self.text)

    def text(self, name: str) -> str:
        """Return an annotation, or another text that a user may have written: its known words, unless names were asked for."""
        if _WRITTEN_BY_TORCH.fullmatch(name):
            return self.symbol(name)
        return self.symbol(name) if self._keep else self._words.known(name)

    def operator(self, name: str) -> str:
        """Return the name of an op or autograd node; an annotation that an old schema files under ops is a text."""
        return self.symbol(name) if _OPERATOR.fullmatch(name) else self.text(name)

    def symbol(self, name: str) -> str:
        """Return the name of code (a kernel, a call, a class), unless it looks like a secret."""
        if _SECRET.search(name) is None:
            return name
        self._words.removed.note("names that look like a secret", name)
        return self._words.digest(name, "removed-")

    def identifier(self, name: str) -> str:
        """Return a dotted name of code; a digest for what is none."""
        return self.symbol(name) if IDENTIFIER.fullmatch(name) else self._words.known(name)

    def frame(self, name: str) -> str:
        """Return a Python frame: file, line and function, and the folder where it is that of a library."""
        if _MODULE.fullmatch(name) or _BUILTIN.fullmatch(name):
            return self.symbol(name)
        match = _FRAME.fullmatch(name)
        if match is None:
            return self._words.known(name)
        function = match["function"]
        if not _FUNCTION.fullmatch(function):
            function = self._words.known(function)
        return self.symbol(f"{self.path(match['folder'], match['file'], name)}({match['line']}): {function}")

    def site(self, name: str) -> str:
        """Return 'file.py:line'."""
        match = _SITE.fullmatch(name)
        return self._words.known(name) if match is None else self.symbol(f"{self.path(None, match['file'], name)}:{match['line']}")

    def path(self, folder: str | None, file: str, whole: str) -> str:
        """Return the path of a file; `whole`: the name that begins with it."""
        if not _FILE.fullmatch(file):
            file = self._words.known(file)
        if not folder:
            return file
        if LIBRARY.match(whole) or _PUBLIC.match(whole):
            return f"{self._library(folder)}/{file}"
        installed = _INSTALLED.fullmatch(folder)
        if installed is None:
            return f"{self._project(folder)}/{file}"
        if installed.start(1):
            self._words.removed.note("paths shortened", folder[: installed.start(1)].strip("/\\"))
        return f"{self._library(installed[1])}/{file}"

    def _library(self, folder: str) -> str:
        return "/".join(step if _STEP.fullmatch(step) else self._words.known(step) for step in _steps(folder))

    def _project(self, folder: str) -> str:
        """Return a folder of the user's: known words and digests."""
        if self._keep:
            return self._library(folder)
        found = "/".join(map(self._words.known, _steps(folder)))
        if found != folder:
            self._words.removed.note("paths shortened", folder.strip("/\\"))
        return found


def _steps(folder: str) -> list[str]:
    return [step for step in re.split(r"[/\\]", folder) if step]

"""Names of kernels and events in traces as readable labels: no namespaces, no template arguments."""

from __future__ import annotations

import re

import msgspec

from gpudiag.model.notices import Notice, NoticeCode, make_notice

# Parts of C++ names that every kernel of PyTorch has: they push what differs out of sight.
_COMMON = re.compile(r"^void |at::native::|\(anonymous namespace\)::|at::cuda::|c10::|torch::autograd::")
# torch.utils.data names its iterators so (dataloader.py, __next__ under record_function)
_LOADER = re.compile(r"^enumerate\(DataLoader\)#_(Single|Multi)Process\w{0,80}\.__next__$")
_WORKERS = {"Single": "next batch, made by a DataLoader without workers", "Multi": "next batch, from the workers of a DataLoader"}

_SITE = re.compile(r"^(.*)\((\d+|\?)\): (.*)$", re.DOTALL)


class CallSite(msgspec.Struct, frozen=True):
    """A place in code: the end of its path, the function, and the line of the call in it, else of the function; None: not known."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f':{self.line}'} {self.function}".rstrip()


def parse_site(where: str | None) -> CallSite | None:
    """Return 'path/to/file.py(12): function' as a site with the last two parts of its path; None where it is not of that form."""
    found = _SITE.match(where or "")
    if found is None:
        return None
    path, line, function = found.groups()
    return CallSite("/".join(re.split(r"[\\/]", path)[-2:]), None if line == "?" else int(line[:9]), function)


def format_kernel_name(name: str) -> str:
    """Return a kernel's name without the parts that all kernels share."""
    return _COMMON.sub("", name) or name


_SPOKEN = {
    NoticeCode.FIRST_LAUNCH_LOADED: "code of {kernel} loaded at its first launch",
    NoticeCode.FIRST_LAUNCH_SLOW: "first launch of {kernel} took {detail} (the first use of a kernel loads its code)",
    NoticeCode.CALL_WAITED: "{detail} waited for {kernel}",
}
"""Evidence of which the kernel's name is shortened."""


def read_evidence(code: str | None, name: str | None, detail: str | None) -> Notice | None:
    """Return the evidence of a row of the table idle as a notice (columns evidence_...); None where it is an event's own name."""
    if code is None:
        return None
    params = {key: value for key, value in (("name", name), ("detail", detail)) if value is not None}
    return make_notice(NoticeCode(code), **params)


def describe_event(evidence: str, notice: Notice | None = None) -> str:
    """Return the event that shows an idle cause as people say it; `notice`: what gpudiag itself said of it (`read_evidence`)."""
    if notice is not None and notice.code in _SPOKEN:
        name = str(notice.params.get("name", ""))
        kernel = format_kernel_name(name).partition("<")[0] or name  # template arguments say little and are cut anywhere
        return _SPOKEN[notice.code].format(kernel=kernel, detail=notice.params.get("detail", ""))
    name = str(notice.params["name"]) if notice is not None and notice.code == NoticeCode.OF_SITE_WINDOW else evidence
    loader = _LOADER.match(name)
    return _WORKERS[loader[1]] if loader else name.replace("autograd::engine::evaluate_function: ", "")


def describe_idle_event(evidence: str | None, op: str | None, notice: Notice | None = None) -> str:
    """Return what happened at an idle place, as people say it; '' where nothing is known."""
    return describe_event(evidence, notice) if evidence else f"near {op}" if op else ""

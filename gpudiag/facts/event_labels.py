"""Names of kernels and events in traces as readable labels: no namespaces, no template arguments."""

from __future__ import annotations

import re

# Parts of C++ names that every kernel of PyTorch has: they push what differs out of sight.
_COMMON = re.compile(r"^void |at::native::|\(anonymous namespace\)::|at::cuda::|c10::|torch::autograd::")
_FIRST_LAUNCH = re.compile(r"^first launch of (.{1,400}): its code was loaded$", re.DOTALL)
_LONG_FIRST = re.compile(r"^first launch of (.{1,400}): the call itself (took .{1,80})$", re.DOTALL)
_WAITED = re.compile(r"^(\w{1,80}) waited for (.{1,400})$", re.DOTALL)
# torch.utils.data names its iterators so (dataloader.py, __next__ under record_function)
_LOADER = re.compile(r"^enumerate\(DataLoader\)#_(Single|Multi)Process\w{0,80}\.__next__$")
_WORKERS = {"Single": "next batch, made by a DataLoader without workers", "Multi": "next batch, from the workers of a DataLoader"}
_OTHER_WINDOW = " (by the site window)"


def format_kernel_name(name: str) -> str:
    """Return a kernel's name without the parts that all kernels share."""
    return _COMMON.sub("", name) or name


def describe_event(evidence: str) -> str:
    """Return the event that shows an idle cause as people say it; what is not known by its form stands as it is."""
    said = evidence.removesuffix(_OTHER_WINDOW)
    if loader := _LOADER.match(said):
        return _WORKERS[loader[1]]
    if loaded := _FIRST_LAUNCH.match(said):
        return f"code of {_drop_template_arguments(loaded[1])} loaded at its first launch"
    if slow := _LONG_FIRST.match(said):
        return f"first launch of {_drop_template_arguments(slow[1])} {slow[2]}"
    if waited := _WAITED.match(said):
        return f"{waited[1]} waited for {_drop_template_arguments(waited[2])}"
    return said


def describe_idle_event(evidence: str | None, op: str | None) -> str:
    """Return what happened at an idle place, as people say it; '' where nothing is known."""
    return describe_event(evidence) if evidence else f"near {op}" if op else ""


def _drop_template_arguments(kernel: str) -> str:
    """Return a kernel's name without template arguments, which say little and are cut anywhere."""
    return format_kernel_name(kernel).partition("<")[0] or kernel

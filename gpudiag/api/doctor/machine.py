"""Checks of the machine: what a container grants, what scatters times, what loader workers need."""

from __future__ import annotations

import os

from gpudiag.api.doctor.check import Check, idle, limited, ok
from gpudiag.api.doctor.seen import Seen
from gpudiag.units import format_bytes

SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to

MIN_SHM_BYTES = 1 << 30
"""Batches of a few workers take some hundred MB; Docker's default is 64 MB."""

MIN_FILES = 4096
"""A worker holds a descriptor for each tensor that it hands over (file_descriptor sharing of torch.multiprocessing)."""

_SLOW_CLOCKS = ("hpet", "acpi_pm", "refined-jiffies", "jiffies")
_SHOWN_UNLIMITED = 1 << 60
"""cgroup 1 writes 2^63, rounded to a page, for no limit."""


def processors(seen: Seen) -> Check:
    """Return how many cores there are, and how much of them may be used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(seen)
    threads = seen.torch.get("versions", "threads")
    granted = cores if quota is None else min(quota, float(cores))
    told = (
        f"{cores} cores"
        + ("" if quota is None else f", of which the container grants {quota:g}")
        + (f"; torch uses {threads} threads" if threads else "")
    )
    if threads and threads > granted + 0.5:
        halts = "threads wait for each other" if quota is None else "the container is halted for parts of each 100 ms"
        costs = f"more threads than cores: {halts}, and every host time scatters"
        return limited("processors", told, costs, f"export OMP_NUM_THREADS={max(1, int(granted))}, or grant more cores")
    return ok("processors", told)


def _quota(seen: Seen) -> float | None:
    """Return the cores' worth of time that the control group grants (version 2, else 1); None: no limit."""
    words = (seen.text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = (seen.number(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota / period if quota is not None and period and quota > 0 else None


def memory(seen: Seen) -> Check:
    """Return the memory that may be used."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limits = [seen.number(name) for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    granted = min((limit for limit in limits if limit is not None and limit < _SHOWN_UNLIMITED), default=total)
    if granted < total:
        return ok("memory", f"{format_bytes(granted)}, granted to the container of {format_bytes(total)}")
    return ok("memory", format_bytes(total))


def shared_memory(seen: Seen) -> Check:
    """Return whether loader workers have room to hand batches over."""
    found = seen.disk(seen.path(SHARED))
    if found is None:
        return idle(SHARED, "this system has none")
    total, free = found
    if total < MIN_SHM_BYTES:
        costs = "DataLoader workers hand batches over in it: 'Bus error' where it is full"
        return limited(SHARED, f"{format_bytes(total)}, {format_bytes(free)} free", costs, "docker run --shm-size=8g (or --ipc=host)")
    return ok(SHARED, f"{format_bytes(total)}, {format_bytes(free)} free")


def open_files(_: Seen) -> Check:
    """Return how many files a process may hold open."""
    try:
        import resource
    except ImportError:  # Windows
        return idle("open files", "this system has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    top = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    costs = "DataLoader workers fail with 'Too many open files' where batches hold many tensors"
    return limited(
        "open files", f"up to {soft:,}", costs, f"ulimit -n {top}" if top > soft else "raise the limit in /etc/security/limits.conf"
    )


def frequency(seen: Seen) -> Check:
    """Return what decides about the frequency of the cores."""
    governor = seen.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if not governor:
        return idle("CPU frequency", "the system does not tell, as in a virtual machine")
    turbo = ", turbo off" if seen.number("/sys/devices/system/cpu/intel_pstate/no_turbo") == 1 else ""
    if governor == "performance":
        return ok("CPU frequency", f"governor {governor}{turbo}")
    costs = "cores slow down between steps: launches take longer, and host times scatter"
    return limited("CPU frequency", f"governor {governor}{turbo}", costs, "sudo cpupower frequency-set -g performance")


def clock(seen: Seen) -> Check:
    """Return what time is read from."""
    name = seen.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not name:
        return idle("clock", "the system does not tell")
    if name in _SLOW_CLOCKS:
        costs = "reading the time takes about a microsecond: recordings slow the host down more"
        return limited("clock", name, costs, "boot with clocksource=tsc, or ask whoever runs the machine")
    return ok("clock", name)


def numa(seen: Seen) -> Check:
    """Return whether memory is nearer to some cores than to others."""
    nodes = seen.text("/sys/devices/system/node/online")
    if not nodes:
        return idle("NUMA", "the system does not tell")
    if nodes == "0":
        return ok("NUMA", "one node")
    return ok("NUMA", f"nodes {nodes}: bind each rank to the node of its GPU (numactl, torchrun --numa-binding)")


def tracing(seen: Seen) -> Check:
    """Return whether debuggers and perf may look into a process; gpudiag needs neither."""
    scope, perf = seen.number("/proc/sys/kernel/yama/ptrace_scope"), seen.number("/proc/sys/kernel/perf_event_paranoid")
    if scope is None and perf is None:
        return idle("debuggers", "the system does not tell who may use them; gpudiag needs neither gdb nor perf")
    told = f"ptrace_scope {'not there' if scope is None else scope}, perf_event_paranoid {'not there' if perf is None else perf}"
    if scope is not None and scope >= 2:
        return limited(
            "debuggers",
            told,
            "py-spy and gdb show a training that hangs to root only; gpudiag does not need them",
            "sudo sysctl kernel.yama.ptrace_scope=1",
        )
    return ok("debuggers", f"{told} (gpudiag needs neither)")

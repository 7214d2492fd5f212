"""A small discrete-event simulator of host threads and one GPU: it writes what Kineto would record, and tells what was true.

    loop = [step(), loader(500), op("aten::mm", [python(10), launch("gemm", 300)]), item()] * 4 + [step()]
    run = simulate(loop)
    run.trace()          # the tables, through the reader of gpudiag
    run.idle             # every idle ns of the device with its true cause
    run.step_ns          # the true length of each step

Nothing here comes from gpudiag, but the reader at the very end, which is called on the events that a file would hold. Programs give times
in microseconds; the clock, the events' text and the truth are integer nanoseconds. A program is deterministic; jitter comes from a seed.

The device: streams are first in, first out; streams run beside each other without slowing each other down. A kernel starts when its call
has returned and the latency is over, when its stream's last work is over (plus the spacing), and when every event that its stream waits
for is there. A launch call blocks while `queue_limit` pieces of work are issued and have not begun (the launch queue of CUDA).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator_machine import AUTOGRAD, MAIN, Hardware, Host, Instruction, Machine, Program, Recording
from simulator_truth import Simulation

__all__ = ["Hardware", "Instruction", "Program", "Recording", "Simulation"]


def simulate(
    program: Program,
    *,
    others: tuple[Program, ...] = (),
    hardware: Hardware | None = None,
    recording: Recording | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Return the run of `program` on the main thread, with `others` on threads of their own.

    `jitter`: every duration is scaled by a random factor of 1 -+ jitter.
    """
    machine = Machine(hardware or Hardware(), recording or Recording(), jitter, seed)
    hosts = [Host(lane, lane) for lane in (MAIN, *range(AUTOGRAD + 1, AUTOGRAD + 1 + len(others)))]
    running = [(host, block(own)(machine, host)) for host, own in zip(hosts, (program, *others), strict=True)]
    while running:  # whoever is furthest behind acts next, so that the device sees calls in the order of time
        place = min(range(len(running)), key=lambda place: running[place][0].now)
        if next(running[place][1], running) is running:
            running.pop(place)
    if machine.recording.stop:
        for _ in sync("device")(machine, hosts[0]):
            pass
    return Simulation(machine)


def python(us: float, frame: str | None = None) -> Instruction:
    """Time of the interpreter, in a frame such as 'train.py(12): step'."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        if frame:
            with machine.frame(host, frame):
                machine.spend(host, machine.ns(us))
        else:
            machine.spend(host, machine.ns(us))

    return run


def block(instructions: Program) -> Instruction:
    """The instructions, one after the other."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        for instruction in instructions:
            yield from instruction(machine, host)

    return run


def frame(name: str, instructions: Program) -> Instruction:
    """A frame of the user's code around instructions."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        with machine.frame(host, name):
            yield from block(instructions)(machine, host)

    return run


def op(
    name: str, instructions: Program, *, seq: int | None = None, shapes: list[list[int]] | None = None, dtype: str = "float"
) -> Instruction:
    """An operator (or autograd node) around instructions."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        args: dict[str, Any] = {} if seq is None else {"Sequence number": seq, "Fwd thread id": 1 if host.tid == AUTOGRAD else 0}
        if shapes is not None and machine.recording.shapes:
            args |= {"Input Dims": shapes, "Input type": [dtype] * len(shapes)}
        with machine.span(host, "cpu_op", name, args), machine.doing(host, "op"):
            yield from block(instructions)(machine, host)

    return run


def launch(name: str, us: float, stream: int = 7) -> Instruction:
    """A kernel of `us` on `stream`; the call alone costs the host `launch_call`."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.call(host, "cudaLaunchKernel", "launch") as correlation:
            called = host.now
            machine.room(host)
            machine.spend(host, machine.ns(machine.hardware.launch_call))
        machine.enqueue(host, name, us, stream, correlation, called)

    return run


def graph(kernels: list[tuple[str, float]], stream: int = 7) -> Instruction:
    """A CUDA graph: one call starts all kernels, one after the other."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.call(host, "cudaGraphLaunch", "launch") as correlation:
            called = host.now
            machine.room(host)
            machine.spend(host, machine.ns(machine.hardware.launch_call))
        for node, (name, us) in enumerate(kernels):
            machine.enqueue(host, name, us, stream, correlation, called, **{"graph node id": 10_000 + node})

    return run


_COPIES = {"H2D": ("HtoD", "Host", "Device"), "D2H": ("DtoH", "Device", "Host")}


def copy(kind: str, us: float, stream: int = 7, size: int = 1 << 20) -> Instruction:
    """A copy: 'H2D pageable', 'H2D pinned', 'D2H pageable' or 'D2H pinned'. Pageable copies block the host until they are over."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        direction, memory = kind.split()
        short, source, target = _COPIES[direction]
        ends = [memory.capitalize() if end == "Host" else end for end in (source, target)]
        name = "CopyHostToDevice" if machine.recording.rocm else f"Memcpy {short} ({ends[0]} -> {ends[1]})"
        name = name.replace("HostToDevice", f"{source}To{target}")
        with machine.call(host, "cudaMemcpyAsync", "launch") as correlation:
            called = host.now
            machine.room(host)
            machine.spend(host, machine.ns(machine.hardware.launch_call))
            work = machine.enqueue(host, name, us, stream, correlation, called, bytes=size)
            if memory == "pageable":
                machine.wait(host, work.end_ns, machine.hardware.sync_return)

    return run


def sync(stream: int | str = "device") -> Instruction:
    """Wait for a stream, for an event by its name ('event done'), or for the whole device."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        machine.spend(host, machine.ns(machine.hardware.sync_call))
        if isinstance(stream, int):
            name, kind, reached = "cudaStreamSynchronize", "Stream Sync", machine.last_end.get(stream, 0)
        elif stream.startswith("event "):
            name, kind, reached = "cudaEventSynchronize", "Event Sync", machine.records[stream.removeprefix("event ")]
        else:
            name, kind, reached = "cudaDeviceSynchronize", "Context Sync", max(machine.last_end.values(), default=0)
        with machine.call(host, name, "sync") as correlation:
            began = host.now
            machine.wait(host, reached, machine.hardware.sync_return)
        if machine.recording.sync_records:
            place = stream if isinstance(stream, int) else -1
            args = {"cuda_sync_kind": kind, "stream": place, "correlation": correlation, "device": 0}
            machine.event("cuda_sync", kind, 0, place, began, host.now, args)

    return run


def item(stream: int = 7) -> Instruction:
    """What `tensor.item()` does for a tensor on the device: a copy of one number, and a wait for its stream."""
    return op("aten::item", [op("aten::_local_scalar_dense", [python(2), copy("D2H pageable", 1.5, stream, 4), sync(stream)])])


def cpu_item() -> Instruction:
    """`.item()` of a tensor in host memory: no runtime call at all."""
    return op("aten::item", [op("aten::_local_scalar_dense", [python(1)])])


def event_record(name: str, stream: int = 7) -> Instruction:
    """cudaEventRecord: `name` is over when what `stream` has got so far is over."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.call(host, "cudaEventRecord", "op"):
            machine.spend(host, machine.ns(machine.hardware.event_call))
        machine.records[name] = max(machine.last_end.get(stream, 0), machine.gates.get(stream, 0))

    return run


def event_wait(name: str, stream: int = 7) -> Instruction:
    """cudaStreamWaitEvent: what `stream` gets from now on begins after `name`."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.call(host, "cudaStreamWaitEvent", "op") as correlation:
            called = host.now
            machine.spend(host, machine.ns(machine.hardware.event_call))
        machine.gates[stream] = max(machine.gates.get(stream, 0), machine.records[name])
        if machine.recording.sync_records:
            args = {"cuda_sync_kind": "Stream Wait Event", "stream": stream, "correlation": correlation, "device": 0}
            machine.event("cuda_sync", "Stream Wait Event", 0, stream, called, host.now, args)

    return run


def malloc(us: float, api: str = "cudaMalloc") -> Instruction:
    """A call that takes (cudaMalloc) or gives back (cudaFree, which waits for the whole device first) device memory."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.call(host, api, "allocation"):
            if api == "cudaFree":
                machine.spend(host, max(max(machine.last_end.values(), default=0) - host.now, 0))
            machine.spend(host, machine.ns(us))

    return run


def _marked(activity: str, us: float, cat: str, name: str) -> Instruction:
    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.doing(host, activity), machine.span(host, cat, name):
            machine.spend(host, machine.ns(us))

    return run


def loader(us: float) -> Instruction:
    """The wait for the next batch, in the mark that torch's DataLoader sets."""
    return _marked("data", us, "user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")


def compile(us: float) -> Instruction:  # noqa: A001 - the word of the trade
    """torch.compile at work."""
    return _marked("compile", us, "user_annotation", "_compile.compile_inner (dynamo_timed)")


def overhead(us: float, name: str = "Activity Buffer Request") -> Instruction:
    """The profiler's own work on the calling thread."""
    return _marked("profiler", us, "overhead", name)


def _host_marked(activity: str, kind: str, name: str, us: float, frames: tuple[str, ...]) -> Instruction:
    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        start = host.now
        with machine.doing(host, activity):
            if frames:
                with machine.frame(host, frames[0], user=False), machine.frame(host, frames[-1], user=False):
                    machine.spend(host, machine.ns(us))
            else:
                machine.spend(host, machine.ns(us))
        site = host.sites[-1] if host.sites else None
        machine.host_marks.append({"kind": kind, "name": name, "start_ns": start, "duration_ns": host.now - start, "site": site})

    return run


def gc(us: float) -> Instruction:
    """A pause of Python's collector: no event of Kineto, a host mark of a bundle."""
    return _host_marked("gc", "gc", "gen 2", us, ())


def io(us: float) -> Instruction:
    """torch.save of a checkpoint: frames where stacks are recorded, a host mark of a bundle."""
    return _host_marked("io", "save", "torch.save", us, ("torch/serialization.py(944): save", "<built-in method write_record>"))


def backward(instructions: Program) -> Instruction:
    """Instructions on the autograd thread, while the main thread waits inside backward()."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        with machine.frame(host, "torch/autograd/__init__.py(353): backward", user=False):
            machine.spend(host, machine.ns(machine.hardware.handoff))
            tid, host.tid = host.tid, AUTOGRAD
            frames, host.frames = host.frames, []
            yield from block(instructions)(machine, host)
            host.tid, host.frames = tid, frames
            machine.spend(host, machine.ns(machine.hardware.handoff))

    return run


def optimizer(instructions: Program, name: str = "Optimizer.step#SGD.step") -> Instruction:
    """The optimizer's step in its mark."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        with machine.span(host, "user_annotation", name):
            yield from block(instructions)(machine, host)

    return run


def step() -> Instruction:
    """A mark between two steps; n marks bound n - 1 steps."""

    def run(machine: Machine, host: Host) -> Iterator[None]:
        yield
        machine.marks.append(host.now)

    return run

"""What a trace's header says: devices, rank, clock and recording options. Everything else in it is dropped unread."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gpudiag.model.hardware import ObservedDevice
from gpudiag.trace.columns import as_integer
from gpudiag.trace.events import Number

_MAX_DEVICES = 1024
_MAX_GROUPS = 65_536
_MAX_NAME = 200
_Value = TypeVar("_Value")


class _DeviceProperties(msgspec.Struct):
    id: Number = None
    name: str | None = None
    numSms: Number = None  # noqa: N815 -- Kineto's name
    totalGlobalMem: Number = None  # noqa: N815
    computeMajor: Number = None  # noqa: N815
    computeMinor: Number = None  # noqa: N815
    warpSize: Number = None  # noqa: N815


class _DistributedInfo(msgspec.Struct):
    rank: Number = None
    world_size: Number = None
    pg_count: Number = None
    pg_config: msgspec.Raw = msgspec.Raw()


class _ProcessGroup(msgspec.Struct):
    pg_name: str | int = ""
    ranks: list[int] = []


class Header(msgspec.Struct):
    """The part of a header that is kept."""

    devices: tuple[ObservedDevice, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    group_size: int | None = None
    """Ranks of the only process group; None where there are several, or the header does not tell."""
    groups: dict[str, list[int]] = {}
    """Ranks of each process group by its name, as far as they are listed (torch.distributed.distributed_c10d, _get_all_pg_configs)."""
    clock_base_ns: int | None = None
    """Unix time of the clock's zero ('baseTimeNanoseconds')."""
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    warnings: tuple[str, ...] = ()


def parse_header(values: dict[str, bytes]) -> Header:
    """Return the header from the JSON text of its values; a value that cannot be read is left out with a warning."""
    unreadable: list[str] = []

    def value(key: str, kind: type[_Value], default: _Value) -> _Value:
        if key not in values:
            return default
        try:
            return msgspec.json.decode(values[key], type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            unreadable.append(key)
            return default

    distributed = value("distributedInfo", _DistributedInfo, _DistributedInfo())
    properties = value("deviceProperties", list[_DeviceProperties], [])
    flags = {key: bool(value(key, object, 0)) for key in ("record_shapes", "with_stack", "profile_memory")}
    base: Number = value("baseTimeNanoseconds", object, None)  # type: ignore[assignment]
    return Header(
        devices=tuple(_device(position, device) for position, device in enumerate(properties[:_MAX_DEVICES])),
        rank=_count(distributed.rank),
        world_size=_count(distributed.world_size) or None,
        group_size=(_count(distributed.world_size) or None) if _count(distributed.pg_count) == 1 else None,
        groups=_groups(distributed.pg_config),
        clock_base_ns=as_integer(base) if isinstance(base, int | float | str) else None,
        record_shapes=flags["record_shapes"],
        with_stack=flags["with_stack"],
        profile_memory=flags["profile_memory"],
        warnings=tuple(f"the header's {key} could not be read and was left out" for key in unreadable),
    )


def _groups(config: msgspec.Raw) -> dict[str, list[int]]:
    """Return the ranks of each group; a group whose entry has another form is left out."""
    try:
        entries = msgspec.json.decode(config, type=list[msgspec.Raw]) if bytes(config) else []
    except (msgspec.DecodeError, RecursionError):
        return {}
    found: dict[str, list[int]] = {}
    for entry in entries[:_MAX_GROUPS]:
        try:
            group = msgspec.json.decode(entry, type=_ProcessGroup)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        found[str(group.pg_name)] = group.ranks
    return found


def _device(position: int, properties: _DeviceProperties) -> ObservedDevice:
    index, major, minor = (_count(number) for number in (properties.id, properties.computeMajor, properties.computeMinor))
    return ObservedDevice(
        index=position if index is None else index,
        name=(properties.name or "")[:_MAX_NAME],
        sm_count=_count(properties.numSms) or None,
        memory_bytes=_count(properties.totalGlobalMem) or None,
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        warp_size=_count(properties.warpSize) or None,
    )


def _count(number: Number) -> int | None:
    """Return a number that cannot be negative; None where it is unknown."""
    found = None if number is None else as_integer(number)
    return found if found is not None and found >= 0 else None

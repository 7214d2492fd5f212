"""Which device a recording was made on, and its peaks: by name first, checked and where needed settled by what else was recorded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpudiag.hardware.evidence import evidence
from gpudiag.hardware.names import DeviceName, in_family, is_named, parse_name
from gpudiag.hardware.peaks import device_from_rates, device_from_row, fit
from gpudiag.hardware.table import Row, Table, load_table
from gpudiag.model.hardware import Device, ObservedDevice

# Below this difference it does not matter which of two devices it is: streaming kernels reach 85-93 % of a bandwidth anyway.
_ALIKE = 0.06
_TRUST = {"datasheet": 0, "derived": 1, "unverified": 2}


class Resolution(msgspec.Struct, frozen=True):
    """The device of a recording (None: unknown, the last warning says why) and what the reader should know about the choice."""

    device: Device | None
    warnings: tuple[str, ...] = ()


class _Choice(msgspec.Struct, frozen=True):
    row: Row
    others: tuple[Row, ...] = ()
    """Rows that fit as well."""
    warning: str | None = None


def resolve(observed: ObservedDevice) -> Resolution:
    """Return the device that `observed` describes: a row of the table, as it is or cut to what was recorded, or one derived."""
    observed, name, table = _known(observed), parse_name(observed.name), load_table()
    choice = _by_name(observed, name, table) or _by_family(observed, name, table) or _by_evidence(observed, name, table)
    if choice is not None:
        return _resolution(choice, observed, name, table)
    device = device_from_rates(observed, name, table)
    if isinstance(device, str):
        return Resolution(None, (f"no peaks for {_label(name)}: {device}",))
    warning = f"{_label(name)} is not in the device table: its peaks are {device.source}; its bandwidth is unknown"
    return Resolution(device, (warning,))


def _known(observed: ObservedDevice) -> ObservedDevice:
    """Return the observation without figures that cannot be true (0 or negative stands for 'not recorded' in some files)."""
    changes = {key: None for key in ("sm_count", "memory_bytes", "warp_size") if (getattr(observed, key) or 0) <= 0}
    return msgspec.structs.replace(observed, compute_capability=observed.compute_capability or None, **changes)


def _by_name(observed: ObservedDevice, name: DeviceName, table: Table) -> _Choice | None:
    row = next((row for row in table.devices if is_named(row, name)), None)
    if row is None or evidence(row, observed).chip is False:
        return None
    found = evidence(row, observed)
    if name.mig_slices or name.vgpu or not found.contradicts:
        return _Choice(row)
    # Another SM count may be another product (an MI210 named MI250X); other memory under the same name is another board of the line.
    exact = [other for other in table.devices if evidence(other, observed).enough] if found.sms is False else []
    if not exact:
        return _Choice(row)
    best, others = _best(exact)
    recorded = f"{observed.sm_count} SMs recorded, {row.name} has {row.chip.sm_count}"
    return _Choice(best, others, f"{_label(name)} is taken as {best.name}: {recorded}")


def _by_family(observed: ObservedDevice, name: DeviceName, table: Table) -> _Choice | None:
    rows = [row for row in table.devices if in_family(row, name) and evidence(row, observed).chip is not False]
    if not rows:
        return None
    exact = [row for row in rows if not evidence(row, observed).contradicts]
    same_sms = [row for row in rows if evidence(row, observed).sms is not False]
    best, others = _best(exact or same_sms or rows)
    reason = f"settled by {_reason(observed)}" if exact else "the nearest of its product line"
    return _Choice(best, others, f"{_label(name)} is not in the device table by that name: taken as {best.name}, {reason}")


def _by_evidence(observed: ObservedDevice, name: DeviceName, table: Table) -> _Choice | None:
    """Return the row that everything recorded points at, for names that say nothing; None where it could be several architectures."""
    misnamed = any(is_named(row, name) for row in table.devices)  # and its chip was ruled out before
    if not name.anonymous and not misnamed:
        return None
    rows = [row for row in table.devices if evidence(row, observed).enough and name.vendor in (None, row.chip.vendor)]
    if not rows or len({row.chip.architecture for row in rows}) > 1:
        return None
    best, others = _best(rows)
    why = " contradicts what is recorded" if misnamed else " does not name a product" if name.text else ""
    return _Choice(best, others, f"{_label(name)}{why}: taken as {best.name}, settled by {_reason(observed)}")


def _best(rows: Sequence[Row]) -> tuple[Row, tuple[Row, ...]]:
    """Return the row to take among those that fit alike, and the others: best known first, then the higher roof.

    The higher roof never shows an efficiency above 100 % for a device that has the lower one.
    """

    def order(row: Row) -> tuple[float, ...]:
        return _TRUST[row.provenance.confidence], -row.peaks_tflop_per_s["fp16"], -row.memory.gbyte_per_s

    ranked = sorted(rows, key=order)
    return ranked[0], tuple(ranked[1:])


def _resolution(choice: _Choice, observed: ObservedDevice, name: DeviceName, table: Table) -> Resolution:
    device, others = _with_doubt(device_from_row(choice.row, table), choice, table)
    device, changes = fit(device, choice.row, observed, name)
    return Resolution(device, tuple(text for text in (choice.warning, others, *changes) if text))


def _with_doubt(device: Device, choice: _Choice, table: Table) -> tuple[Device, str | None]:
    """Return the device with what the rows that fit as well leave open: links that differ are unknown, peaks that differ unverified."""
    others = [device_from_row(row, table) for row in choice.others]
    unsure = {
        key: None for key in ("pcie_byte_per_s", "link_byte_per_s") if any(getattr(other, key) != getattr(device, key) for other in others)
    }
    device = msgspec.structs.replace(device, **unsure)
    differing = [other for other in others if _apart(device, other) > 0]
    if not differing:
        return device, None
    rivals = ", ".join(f"{other.name} ({_figures(other)})" for other in differing[:3])
    doubt = f"{device.name} ({_figures(device)}) is assumed; what is recorded fits as well: {rivals}"
    if any(_apart(device, other) > _ALIKE for other in differing):
        device = msgspec.structs.replace(device, provenance="unverified")
    return device, doubt


def _apart(device: Device, other: Device) -> float:
    """Return the largest relative difference of peaks and bandwidth (1.0 where only one of them has a type)."""
    mine, theirs = ({**one.peaks, "": one.bandwidth_byte_per_s or 0.0} for one in (device, other))
    if mine.keys() != theirs.keys():
        return 1.0
    return max(abs(value - theirs[key]) / value for key, value in mine.items())


def _figures(device: Device) -> str:
    return f"fp16 {device.peaks['fp16'] / 1e12:g} TFLOP/s, {(device.bandwidth_byte_per_s or 0) / 1e9:g} GB/s"


def _reason(observed: ObservedDevice) -> str:
    parts = (
        observed.sm_count is not None and f"{observed.sm_count} SMs",
        observed.memory_bytes is not None and f"{observed.memory_bytes / 2**30:.3g} GiB",
        observed.compute_capability is not None and f"compute capability {_shown(observed.compute_capability)}",
        observed.warp_size is not None and f"warp size {observed.warp_size}",
    )
    return ", ".join(part for part in parts if part) or "its name alone"


def _label(name: DeviceName) -> str:
    return f"{_shown(name.text)!r}" if name.text else "a device without a name"


def _shown(text: str) -> str:
    """Return text of a recording cut to what fits a line, without control characters."""
    return "".join(character for character in text[:60] if character.isprintable())

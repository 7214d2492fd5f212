"""Which GPU the training thread uses, so that NVML can be asked about that very one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from gpudiag.model.hardware import device_key


class DeviceIdentity(NamedTuple):
    """What tells a CUDA device from others; None where this build of torch does not say."""

    uuid: str | None
    pci_bus_id: str | None
    number: int | None
    """NVML's own index, after CUDA_VISIBLE_DEVICES; only where nothing else is known: CUDA may count devices in another order."""
    hip: bool = False
    ordinal: int | None = None
    """CUDA's own index in this process, by which recordings name it."""
    key: str | None = None
    """model.hardware.device_key: holds no serial number."""


MOST_TENSORS = 8
"""Parameters of a group that are looked at: those of one group lie on one kind of device, and this is asked at every step."""


def stepped_device(optimizer: Any) -> int | None:
    """Return the CUDA index of the first parameters of `optimizer` that lie on one; None where none does. Waits for nothing."""
    with suppress(Exception):  # an optimizer of a shape of its own: the current device stands
        for group in optimizer.param_groups:
            for tensor in group["params"][:MOST_TENSORS]:
                if tensor.device.type == "cuda":
                    return int(tensor.device.index)
    return None


def cuda_device(index: int | None = None) -> DeviceIdentity | None:
    """Return CUDA device `index`, by default the current one of the calling thread.

    None before CUDA is initialised (asking would initialise it).
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    if torch.version.hip:
        return DeviceIdentity(None, None, None, hip=True, ordinal=torch.cuda.current_device() if index is None else index)
    number = torch.cuda.current_device() if index is None else index
    found = torch.cuda.get_device_properties(number)
    uuid, address = getattr(found, "uuid", None), _pci_bus_id(found)
    known = uuid is not None or address is not None
    return DeviceIdentity(
        None if uuid is None else _bare(str(uuid)),
        address,
        None if known else _nvml_index(torch, number),
        ordinal=number,
        key=device_key(found.name, number, None if uuid is None else str(uuid), found.multi_processor_count),
    )


def _bare(uuid: str) -> str:
    """Return a UUID without the prefix that NVML gives it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _pci_bus_id(properties: Any) -> str | None:
    """Return domain:bus:device.0 as nvmlDeviceGetHandleByPciBusId takes it."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if not all(isinstance(part, int) for part in parts):
        return None
    domain, bus, device = (int(part) for part in parts if part is not None)
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def _nvml_index(torch: Any, number: int) -> int | None:
    """Return torch's own translation (torch.cuda._get_nvml_device_index); None where it has none, or fails."""
    translate = getattr(torch.cuda, "_get_nvml_device_index", None)
    try:
        return None if translate is None else int(translate(number))
    except Exception:  # noqa: BLE001 - a private function of torch: without it, UUID and PCI address stand
        return None

"""The devices of an export, by the numbers that CUDA gave them in one process."""

from __future__ import annotations

import polars as pl

from gpudiag.model.hardware import ObservedDevice
from gpudiag.trace.nsys.database import Export
from gpudiag.trace.nsys.processes import pid

_MOST = 1024
_LONGEST_NAME = 200
_GPU = "TARGET_INFO_GPU"


def devices(export: Export, process: int | None) -> tuple[ObservedDevice, ...]:
    """Return the GPUs that the export describes; `index` is CUDA's number in `process`, which CUDA_VISIBLE_DEVICES may change.

    By TARGET_INFO_CUDA_DEVICE, else by the GPU's own column cuDevice, else as the driver counts.
    """
    numbers = ["id", "smCount", "totalMemory", "computeMajor", "computeMinor", "threadsPerWarp", "cuDevice"]
    gpus = export.read(_GPU, numbers, ["name"]).filter(pl.col("id").is_not_null()).head(_MOST)
    given = _numbers_of_cuda(export, process)
    found = [_device(row, given) for row in gpus.iter_rows(named=True)]
    return tuple(device for device in found if device is not None)


def _numbers_of_cuda(export: Export, process: int | None) -> dict[int, int]:
    """Return CUDA's number of each GPU (its id in TARGET_INFO_GPU) that `process` saw; empty where the export does not tell."""
    rows = export.read("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"]).drop_nulls(["gpuId", "cudaId"])
    own = rows.filter(pl.col("pid") == pid(process)) if process is not None and rows["pid"].null_count() < rows.height else rows
    return dict(own.select("gpuId", "cudaId").iter_rows())


def _device(row: dict[str, int | str | None], given: dict[int, int]) -> ObservedDevice | None:
    """Return one device; None for one that the process did not see."""
    number = {name: value if isinstance(value, int) and value >= 0 else None for name, value in row.items()}
    index = given.get(number["id"] if number["id"] is not None else -1)
    if given and index is None:
        return None
    if index is None:
        index = number["id"] if number["cuDevice"] is None else number["cuDevice"]
    major, minor = number["computeMajor"], number["computeMinor"]
    return ObservedDevice(
        index=index or 0,
        name=str(row["name"] or "")[:_LONGEST_NAME],
        sm_count=number["smCount"] or None,
        memory_bytes=number["totalMemory"] or None,
        compute_capability=None if not major or minor is None else f"{major}.{minor}",
        warp_size=number["threadsPerWarp"] or None,
    )

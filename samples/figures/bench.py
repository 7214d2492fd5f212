"""What the claims measure with: a clock for the device, its peaks, and how a result is told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpudiag.model.hardware import Device

Work = Callable[[], Any]


class NotHereError(Exception):
    """Raised by a claim that this machine cannot check; says why."""


class Result(NamedTuple):
    """One line of the table: what was to be expected on this device, what was measured, whether that agrees (None: only told)."""

    expected: str
    measured: str
    holds: bool | None


class Bench:
    """The device under test. `device` is 'cuda' or 'cpu'; `peaks` its published or measured rates."""

    def __init__(self, torch: Any, device: str, peaks: Device, budget_s: float = 1.0) -> None:
        self.torch, self.device, self.peaks, self.budget_s = torch, device, peaks, budget_s

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU is measured."""
        return self.device == "cuda"

    def need_gpu(self, why: str = "needs a CUDA device") -> None:
        """Raise NotHereError on a CPU."""
        if not self.on_gpu:
            raise NotHereError(why)

    def need_peak(self, dtype: str) -> float:
        """Return the matrix peak of `dtype` in FLOP/s; raises NotHereError where it is not known."""
        peak = self.peaks.matrix_peak(dtype)
        if peak is None:
            raise NotHereError(f"no known {dtype} peak for {self.peaks.name}")
        return peak

    @property
    def bandwidth(self) -> float:
        """Return the memory bandwidth in byte/s; raises NotHereError where it is not known."""
        if self.peaks.bandwidth_byte_per_s is None:
            raise NotHereError(f"no known memory bandwidth for {self.peaks.name}")
        return self.peaks.bandwidth_byte_per_s

    def size(self, on_gpu: int, on_cpu: int) -> int:
        """Return the size for this device."""
        return on_gpu if self.on_gpu else on_cpu

    def rand(self, *shape: int, dtype: str = "float32", grad: bool = False) -> Any:
        """Return a tensor of normal values on the device."""
        return self.torch.randn(*shape, device=self.device, dtype=getattr(self.torch, dtype), requires_grad=grad)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def seconds(self, work: Work, runs: int = 1) -> float:
        """Return the median seconds of one call of `work`, `runs` of them between two synchronisations, after a warm-up of three."""
        for _ in range(3):
            work()
        self.synchronize()
        found: list[float] = []
        deadline = time.perf_counter() + self.budget_s
        while len(found) < 3 or (time.perf_counter() < deadline and len(found) < 200):
            start = time.perf_counter()
            for _ in range(runs):
                work()
            self.synchronize()
            found.append((time.perf_counter() - start) / runs)
        return statistics.median(found)

    def peak_bytes(self, work: Work) -> int:
        """Return the most memory that was allocated on the GPU while `work` ran; raises NotHereError on a CPU."""
        self.need_gpu("the allocator's peak needs a CUDA device")
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        self.torch.cuda.reset_peak_memory_stats()
        work()
        self.torch.cuda.synchronize()
        return int(self.torch.cuda.max_memory_allocated())

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `function` under torch.compile, without what earlier claims compiled."""
        self.torch._dynamo.reset()
        return self.torch.compile(function, **options)  # type: ignore[no-any-return]


CLAIMS: dict[str, tuple[str, Callable[[Bench], Result]]] = {}
"""Number of a claim -> what it says, how it is checked."""


def claim(number: str, says: str) -> Callable[[Callable[[Bench], Result]], Callable[[Bench], Result]]:
    """Return a decorator that enters a check into CLAIMS."""

    def enter(check: Callable[[Bench], Result]) -> Callable[[Bench], Result]:
        CLAIMS[number] = (says, check)
        return check

    return enter


def ratio(value: float) -> str:
    """Return a ratio with two digits."""
    return f"x{value:.2f}"


def milliseconds(seconds: float) -> str:
    """Return seconds as ms."""
    return f"{seconds * 1e3:.3g} ms"


def teraflops(rate: float) -> str:
    """Return FLOP/s as TFLOP/s."""
    return f"{rate / 1e12:.3g} TFLOP/s"

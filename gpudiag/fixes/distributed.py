"""How DistributedDataParallel gathers gradients: larger buckets, gradients that are views of them, a graph that never changes.

https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html. no_sync() belongs to the loop that
accumulates gradients, and goes through a variant of the script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpudiag.errors import InputError
from gpudiag.fixes.fix import Applier, Fix, NoPlaceError, NotAppliedError, Site, wrap_arguments

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

BUCKET_MIB = 100
"""Without a value: four times torch's default of 25 MiB. Fewer, larger collectives."""

_MIB = 1024 * 1024

NO_BUFFERS = "no-buffers"
"""Each rank keeps its own running statistics: those of rank 0 are what is saved. Only when asked for, as it trains otherwise."""

_FLAGS = {"view": "gradient_as_bucket_view", "static": "static_graph", NO_BUFFERS: "broadcast_buffers"}


class DdpOptions(Applier):
    """How DistributedDataParallel gathers gradients: larger buckets, gradients that are views of them, a graph that never changes.

    bucket=MIB, view, static, no-buffers, joined by commas; the first three without a value.
    """

    fix = Fix(
        "ddp-options", "DistributedDataParallel options", "rounding",
        "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)",
        values="bucket=MIB, view, static, no-buffers (broadcast_buffers=False), joined by commas; by default bucket=100,view,static",
    )  # fmt: skip

    _made: tuple[tuple[Any, dict[str, Any]], ...] = ()

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._wanted: dict[str, Any] = {}
        for word in (value if value is not None else f"bucket={BUCKET_MIB},view,static").split(","):
            name, _, number = word.partition("=")
            if name == "bucket" and number.isascii() and number.isdigit() and len(number) < 10 and int(number) > 0:
                self._wanted["bucket_cap_mb"] = int(number)
            elif word in _FLAGS:
                self._wanted[_FLAGS[word]] = word != NO_BUFFERS
            else:
                raise InputError(
                    f"ddp-options takes bucket=MIB, view and static, and {NO_BUFFERS}, joined by commas, not {value!r}",
                    "for example --fix ddp-options=bucket=100,view",
                )

    def install(self, site: Site) -> None:
        from torch.nn import parallel

        def change(ddp: Any, arguments: dict[str, Any]) -> None:
            self._made += ((ddp, {name: arguments.get(name) for name in self._wanted}),)
            arguments.update(self._wanted)
            if "bucket_cap_mb" in self._wanted:
                arguments.pop("bucket_cap_mb_list", None)  # it would win

        site.patches.wrap(parallel.DistributedDataParallel, "__init__", wrap_arguments(change))

    def evidence(self, site: Site) -> str:
        """Return the options that the program's DistributedDataParallel holds. Raises NotAppliedError where there is none, or no change."""
        if not self._made:
            raise NotAppliedError("the program has made no DistributedDataParallel")
        ddp, asked = self._made[0]
        cap = getattr(ddp, "bucket_bytes_cap", None)
        own = vars(ddp)  # newer torch names the setting of buffers by what it does, and warns of the older name
        flags = {name: bool(own.get("forward_sync_buffers" if "buffers" in name else name, own.get(name))) for name in _FLAGS.values()}
        held = {"bucket_cap_mb": None if cap is None else cap // _MIB, **flags}
        if any(held.get(name) != wanted for name, wanted in self._wanted.items()):
            raise NotAppliedError(f"DistributedDataParallel holds {_format_options(held)}")
        if all(asked[name] == wanted for name, wanted in self._wanted.items()):
            raise NotAppliedError(f"the program asks for {_format_options(self._wanted)} already")
        return f"DistributedDataParallel holds {_format_options({name: held[name] for name in self._wanted})}"

    def patch(self, code: TrainingCode) -> None:
        """Give the one DistributedDataParallel of the file its options."""
        made = code.find_calls("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
        if len(made) != 1:
            raise NoPlaceError(
                f"{len(made)} calls of DistributedDataParallel stand in this file, not one", code.line(made[0]) if made else 0
            )
        for name, wanted in self._wanted.items():
            given = code.find_argument(made[0], name)
            if code.read_literal(given.value if given else None) != wanted:
                code.set_argument(made[0], name, str(wanted))


def _format_options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())

"""Fixes of precision: bf16 and fp16 by autocast, the GradScaler that fp16 needs, TF32 for float32 matrix products.

GradScaler: https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
Between backward pass and step a program clips gradients, adds to them or logs them. So they are scaled within the backward pass only: what
it finds is scaled before, and everything is unscaled right behind it, by GradScaler.unscale_, which also looks for infinities. Optimizers
then step through GradScaler.step, which leaves an update out where there were any. A scale is a power of two: scaling and back is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes.fix import OUTSIDE, Applier, Fix, NoPlaceError, NotAppliedError, Site, around
from gpudiag.fixes.forward_pass import (
    NO_ROOT,
    RootFix,
    convert_to_float32,
    find_device,
    find_dtypes,
    get_module_name,
    list_tensors,
    list_trained_parameters,
    walk_graph_nodes,
    watch_low_outputs,
    wrap_forward,
)
from gpudiag.hardware.cpu import supports_dtype
from gpudiag.model.experiment import NO_INSTRUCTIONS

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

AUTOCAST_LOOKS = 3
"""Forward passes of a root whose graph is looked at: it costs a microsecond for each op."""


class Autocast(RootFix):
    """Runs forward passes in autocast to `dtype`, the name of a type of torch."""

    layer = OUTSIDE
    dtype = ""
    _on_cpu = False

    def install(self, site: Site) -> None:
        self._seen: dict[str, int] = {}
        """By root: tensors of the low type that its first forward passes made."""
        self._looks: dict[str, int] = {}
        super().install(site)

    def change(self, module: Any) -> None:
        import torch

        device, low, name = find_device(module).type, getattr(torch, self.dtype), get_module_name(module)
        told = torch.__version__ >= (2, 5)
        by_accelerate = hasattr(module, "_original_forward")  # what it has put autocast round
        if torch.is_autocast_enabled(device) or by_accelerate:
            raise NotAppliedError(f"the program runs {name} in autocast already")
        if not any(parameter.dtype == torch.float32 for parameter in list_trained_parameters(module)):
            raise NotAppliedError(f"{name} has no float32 weights: autocast would change nothing")
        self._on_cpu = device == "cpu"
        self._seen.setdefault(name, 0)
        self._looks.setdefault(name, 0)

        def run_in_autocast(forward: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            looks = torch.is_grad_enabled() and not self._seen[name] and self._looks[name] < AUTOCAST_LOOKS
            with torch.autocast(device, dtype=low), nullcontext(()) if told or not looks else watch_low_outputs(low) as given:
                output = forward(target, *args, **kwargs)
            if looks:
                self._looks[name] += 1
                made = sum(low in find_dtypes(node) for node in walk_graph_nodes(output))
                self._seen[name] = max(made or sum(tensor.dtype == low for tensor in list_tensors(output)), len(given))
            return convert_to_float32(output, low)

        wrap_forward(module, run_in_autocast)

    def describe_evidence(self) -> str:
        """Return how many tensors of the low type a forward pass made, and whether a CPU has no instructions for it.

        Raises NotAppliedError where it was none.
        """
        what = f"{self.dtype} tensor"
        shown = [f"{count} {what}{'s' * (count > 1)} in the forward pass of {name}" for name, count in self._seen.items() if count]
        if not shown:
            raise NotAppliedError(f"the forward pass of {', '.join(self._seen)} makes no {self.dtype} tensor in autocast")
        if self._on_cpu and supports_dtype(self.dtype) is False:
            self.slow_dtype = self.dtype
            shown.append(f"{NO_INSTRUCTIONS} {self.dtype}")
        return "; ".join(shown)


class Bf16(Autocast):
    """bf16: autocast to bfloat16.

    Runs forward passes in autocast to bfloat16; its exponent is that of float32, so that no gradient has to be scaled.
    """

    fix = Fix(
        "bf16", "bfloat16 autocast", "low_precision", "with torch.autocast(device_type, dtype=torch.bfloat16): loss = ...",
        conflicts=("fp16",),
    )  # fmt: skip
    dtype = "bfloat16"
    frameworks = MappingProxyType(
        {
            "transformers.TrainingArguments": "bf16=True",
            "accelerate.Accelerator": 'mixed_precision="bf16"',
            **dict.fromkeys(("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"), 'precision="bf16-mixed"'),
        }
    )

    def patch(self, code: TrainingCode) -> None:
        """Put forward pass and loss inside of autocast, and the backward pass behind it."""
        for call in code.calls:
            if code.qualify(call.func).rpartition(".")[2] in ("autocast", "GradScaler"):
                raise NoPlaceError("the file has autocast or a GradScaler already", code.line(call))
        step = code.find_step()
        block, first, last = code.find_forward(step)
        code.refuse_unknown_context(step)
        code.need_import("torch")
        code.put_inside(block, first, last, f"with torch.autocast({code.find_device_type(step)}, dtype=torch.bfloat16):")


COUNTED_BACKWARDS = 10
"""Backward passes in which updates that were left out are counted: reading an infinity back waits for the device."""


class LossScaling:
    """Scales backward passes once there is a `scaler`."""

    def __init__(self, site: Site) -> None:
        import torch

        self.scaled = 0
        """Backward passes so far."""
        self.skipped = 0
        """Updates of the first COUNTED_BACKWARDS that were left out for infinities."""
        self.refused = ""
        """Why this program cannot be scaled; '' where it can."""
        self.scaler: Any = None
        """A loss is never scaled by more than float32 holds: the first scale is GradScaler's own, 65,536."""
        self._site = site
        self._stepping = self._stepped = False
        self._owned_by: list[tuple[int, int]] = []
        self._owning: list[Any] = []
        site.on_optimizer(self._wrap_step)
        site.patches.wrap_method(torch.Tensor, "backward", self._wrap_backward)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _wrap_backward(self, original: Any) -> Callable[..., Any]:
        import torch

        def backward(loss: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> Any:
            scalar = gradient is None and loss.numel() == 1 and loss.is_floating_point()
            if self.scaler is None or create_graph or not scalar or type(loss) is not torch.Tensor:
                return original(loss, gradient, retain_graph, create_graph, inputs)
            if loss.dtype == torch.float16:
                loss = loss.float()  # 65,536 is more than float16 holds
            if self._stepped:
                self.scaler.update()
                self._stepped = False
            factor = self.scaler.scale(torch.ones((), device=loss.device))
            gradients = [parameter.grad for optimizer in self._find_owners() for parameter in _list_with_gradient(optimizer)]
            with torch.no_grad():
                for left in gradients:
                    left.mul_(factor)  # none are left of the last step, but where micro-batches are added up
            self.scaled += 1
            try:
                return original(loss, torch.ones_like(loss) * factor, retain_graph, create_graph, inputs)
            finally:
                for optimizer in self._find_owners():
                    if _list_with_gradient(optimizer):
                        # it may be unscaled once per step, but there is a backward pass for each micro-batch; infinities stay
                        self.scaler._per_optimizer_states.pop(id(optimizer), None)
                        self.scaler.unscale_(optimizer)

        return backward

    def _find_owners(self) -> list[Any]:
        """Find the optimizers, without those whose parameters belong to one that was made later: a program may make one anew."""
        key = [(id(optimizer), len(optimizer.param_groups)) for optimizer in self._site.optimizers]
        if key == self._owned_by:
            return self._owning
        owners: list[Any] = []
        taken: set[int] = set()
        for optimizer in reversed(self._site.optimizers):
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not own <= taken:
                if own & taken:
                    self.refused = "two optimizers share some of their parameters"
                owners.append(optimizer)
                taken |= own
        self._owned_by, self._owning = key, owners
        return owners

    # -- steps --------------------------------------------------------------------------------------------------------

    def _wrap_step(self, optimizer: Any) -> None:
        """Have an optimizer step through the scaler. Its class has the hooks of torch in place when its constructor has run."""
        import torch

        if isinstance(optimizer, torch.optim.LBFGS):
            self.refused = "LBFGS calls its closure several times in a step, which a GradScaler cannot follow"
            return
        function = type(optimizer).step

        def step(target: Any, closure: Any = None, **kwargs: Any) -> Any:
            if self.scaler is None or self._stepping:
                return function(target, closure, **kwargs) if closure is not None else function(target, **kwargs)
            with torch.enable_grad() if closure is not None else nullcontext():
                loss = closure() if closure is not None else None  # as Lightning does: a scaler takes no closure
            state = self.scaler._per_optimizer_states.get(id(target))
            if state is None or state["stage"].name != "UNSCALED":  # no scaled backward pass since its last step
                function(target, **kwargs)
                return loss
            found = state["found_inf_per_device"]
            self._stepping = True
            try:
                self.scaler.step(target, **kwargs)
            finally:
                self._stepping = False
            self._stepped = True
            if self.scaled <= COUNTED_BACKWARDS:
                self.skipped += any(bool(value) for value in found.values())
            return loss

        step.__name__ = "step"
        optimizer.step = MethodType(step, optimizer)


def _list_with_gradient(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]


class Fp16(Autocast):
    """fp16: autocast to float16, with a scaled loss.

    Runs forward passes in autocast to float16, and puts a GradScaler round backward passes and optimizer steps.
    """

    fix = Fix(
        "fp16", "float16 autocast with a GradScaler", "low_precision",
        "with torch.autocast(device_type, dtype=torch.float16): loss = ...; scaler = torch.amp.GradScaler()",
    )  # fmt: skip
    dtype = "float16"

    def install(self, site: Site) -> None:
        super().install(site)
        self._scaling = LossScaling(site)

    def change(self, module: Any) -> None:
        import torch

        kinds, weights = {type(module).__name__, get_module_name(module)}, list_trained_parameters(module)
        if any(kind.startswith(("FSDP", "FullySharded", "DeepSpeed")) for kind in kinds):
            raise NotAppliedError("FSDP and DeepSpeed scale losses in their own way: make the change in the script")
        if any(weight.dtype == torch.float16 for weight in weights):
            raise NotAppliedError("it trains float16 weights, whose gradients a GradScaler refuses")
        if any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights):
            raise NotAppliedError("its weights are updated inside of the backward pass, where gradients are scaled")
        if self._scaling.refused:
            raise NotAppliedError(self._scaling.refused)
        device = find_device(module)
        super().change(module)
        if self._scaling.scaler is None:
            self._scaling.scaler = torch.amp.GradScaler(device.type)

    def describe_evidence(self) -> str:
        """Return the float16 tensors, the scale, and the updates that it left out. Raises NotAppliedError."""
        found, scaling = super().describe_evidence(), self._scaling
        if not scaling.scaled:
            raise NotAppliedError("no loss was scaled: the program computes gradients without Tensor.backward")
        if scaling.refused:
            raise NotAppliedError(scaling.refused)
        left_out = f"{scaling.skipped} of the first {min(scaling.scaled, COUNTED_BACKWARDS)} updates left out for infinities"
        return f"{found}; losses scaled by {scaling.scaler.get_scale():.0f}, {left_out}"


TF32_PRECISIONS = ("high", "medium")
"""Of torch.set_float32_matmul_precision: TF32, with 10 bits of mantissa, and bfloat16, with 7."""

_TF32_CAPABILITY = (8, 0)
"""Ampere is the first with tensor cores for TF32 (https://docs.nvidia.com/cuda/cuda-c-programming-guide/, compute capability 8.x)."""


class Tf32(Applier):
    """tf32: float32 matrix products on fewer bits of the mantissa.

    Sets the precision of float32 matrix products when a root is called first, and again where the program sets another one later.
    """

    fix = Fix(
        "tf32", "TF32 for float32 matrix products", "low_precision", 'torch.set_float32_matmul_precision("high")',
        values="high (TF32, the default) or medium (bfloat16)",
    )  # fmt: skip
    _roots: tuple[tuple[str, str], ...] = ()
    """Class and kind of device."""
    _overruled: tuple[str, ...] = ()
    _reason = ""
    _own = False

    def __init__(self, value: str | None = None) -> None:
        if value is not None and value not in TF32_PRECISIONS:
            raise InputError(
                f"tf32 has no precision {value!r}{suggest_nearest(value, TF32_PRECISIONS)}", "high or medium; high without a value"
            )
        super().__init__(value)
        self._precision = value or TF32_PRECISIONS[0]

    def install(self, site: Site) -> None:
        """Set it at the first call of a root, behind whatever the program sets before, and stand in the way of later calls."""
        import torch

        def overrule(original: Any, precision: str) -> None:
            if self._roots and not self._own:
                self._overruled += (precision,)
            else:
                original(precision)

        site.on_root(self._set_precision)
        site.patches.wrap(torch, "set_float32_matmul_precision", around(overrule))

    def _set_precision(self, module: Any) -> None:
        import torch

        if self._reason:
            return
        device = next(iter(list_trained_parameters(module))).device.type
        if not self._roots and _read_precision() != "highest":
            self._reason = f"the program has set {_read_precision()} itself"
        elif device == "cuda":
            able = torch.version.cuda is None or torch.cuda.get_device_capability() >= _TF32_CAPABILITY
            self._reason = "" if able else "this GPU has no tensor cores for TF32"
        else:  # aten/src/ATen/native/mkldnn/Utils.h: 'medium' lets oneDNN use bfloat16 where it supports it, 'high' TF32 by way of AMX-FP16
            if self._precision == "medium":
                able, what = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), "bfloat16 instructions"
            else:
                supported = getattr(torch.cpu, "_is_amx_fp16_supported", None)
                able, what = supported is not None and bool(supported()), "AMX-FP16"
            self._reason = "" if able else f"{self._precision!r} on a CPU takes {what}: on this one products stay in float32"
        if not self._reason:
            self._own = True
            try:
                torch.set_float32_matmul_precision(self._precision)
            finally:
                self._own = False
            self._roots += ((get_module_name(module), device),)

    def evidence(self, site: Site) -> str:
        """Return what torch says of the precision. Raises NotAppliedError."""
        if not self._roots:
            raise NotAppliedError(self._reason or NO_ROOT)
        if _read_precision() != self._precision:
            raise NotAppliedError(f"the program has set {_read_precision()} again")
        overruled = f"; the program's own {', '.join(map(repr, dict.fromkeys(self._overruled)))} overruled" if self._overruled else ""
        devices = ", ".join(dict.fromkeys(device for _, device in self._roots))
        return f"float32 matrix products in {self._precision!r} precision on {devices}{overruled}"

    def patch(self, code: TrainingCode) -> None:
        """Set the precision behind the imports, or change the one call that sets it."""
        flag = next((one for one in code.list_set_attributes() if one.attr.value in ("allow_tf32", "fp32_precision")), None)
        if flag is not None:
            raise NoPlaceError(f"the file sets {code.render(flag)} itself", code.line(flag))
        setting = f'"{self._precision}"'
        own = code.find_calls("torch.set_float32_matmul_precision")
        if len(own) > 1:
            raise NoPlaceError("the file sets the precision in several places", code.line(own[0]))
        if not own:
            code.need_import("torch")
            code.insert_at_start(f"torch.set_float32_matmul_precision({setting})")
            return
        given = code.find_argument(own[0], "precision", 0)
        if code.read_literal(given.value if given else None) != "highest":
            raise NoPlaceError("the file sets another precision itself", code.line(own[0]))
        code.set_argument(own[0], "precision", setting, 0)


def _read_precision() -> str:
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # "mix of the legacy and new APIs": it was set for a back-end alone
        return "torch.backends.*.fp32_precision"

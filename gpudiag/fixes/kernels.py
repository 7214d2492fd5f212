"""Fixes that choose faster kernels: channels-last convolutions, fused attention (SDPA), cuDNN's benchmark, GELU by tanh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpudiag.errors import InputError, suggest_nearest
from gpudiag.fixes.fix import OUTSIDE, Applier, Fix, NoPlaceError, NotAppliedError, Site, around
from gpudiag.fixes.forward_pass import RootFix, find_device, get_module_name, unwrap_module, walk_graph_nodes, wrap_forward

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

NHWC_LOOKS = 10
"""Forward passes whose inputs are counted."""


class ChannelsLast(RootFix):
    """channels-last: convolutions on NHWC tensors.

    Converts the weights of the roots that convolve in two dimensions, and their inputs of four dimensions in each call.

    Everything between follows by propagation (https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html). DDP lays its
    buckets out by the strides of the weights that it is given, so that a model is converted before.
    """

    fix = Fix("channels-last", "NHWC memory format", "rounding", "model = model.to(memory_format=torch.channels_last)")
    _convolutions: tuple[Any, ...] = ()
    _models: tuple[Any, ...] = ()
    _converted = _looks = _inputs = 0

    def install(self, site: Site) -> None:
        """Convert weights when roots are called first or wrapped in DDP; inputs round whatever else changes the forward pass."""
        from torch.nn import parallel

        def convert_before(original: Any, made: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self._convert(module)
            original(made, module, *args, **kwargs)

        super().install(site)
        site.on_root(self._convert_inputs, layer=OUTSIDE)
        site.patches.wrap(parallel.DistributedDataParallel, "__init__", around(convert_before))

    def change(self, module: Any) -> None:
        self._convert(unwrap_module(module))
        if not any(unwrap_module(module) is known for known in self._models):
            raise NotAppliedError(f"{get_module_name(module)} has no convolution in two dimensions with weights of its own")

    def _convert(self, module: Any) -> None:
        import torch

        kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
        found = [part for part in module.modules() if isinstance(part, kinds) and part.weight.dim() == 4]  # FSDP keeps weights flat
        if found and not any(module is known for known in self._models):
            self._converted += sum(not _is_nhwc(part.weight) for part in found)
            module.to(memory_format=torch.channels_last)
            self._convolutions += (*found,)
            self._models += (module,)

    def _convert_inputs(self, module: Any) -> None:
        import torch

        if not any(unwrap_module(module) is known for known in self._models):
            return

        def converted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_floating_point():
                return value
            self._inputs += self._looks <= NHWC_LOOKS and not _is_nhwc(value)
            return value.contiguous(memory_format=torch.channels_last)

        def run_on_nhwc(forward: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            self._looks += 1
            return forward(target, *map(converted, args), **{name: converted(value) for name, value in kwargs.items()})

        wrap_forward(module, run_on_nhwc)

    def describe_evidence(self) -> str:
        """Return the convolutions by the strides of their weights. Raises NotAppliedError where the program had them so, or has none."""
        now, all_of_them = sum(_is_nhwc(part.weight) for part in self._convolutions), len(self._convolutions)
        if now < all_of_them:
            raise NotAppliedError(f"the weights of {all_of_them - now} of {all_of_them} convolutions were laid out otherwise again")
        if not self._converted and not self._inputs:
            raise NotAppliedError("the program trains in channels-last itself")
        weights = f"{now} of {all_of_them} convolutions have channels-last weights, {self._converted} of them converted"
        return f"{weights}; {self._inputs} inputs converted in {min(self._looks, NHWC_LOOKS)} calls"

    def patch(self, code: TrainingCode) -> None:
        """Convert the model once it is complete, and the one input that it is called with."""
        known = next((one for one in code.list_attributes() if one.attr.value == "channels_last"), None)
        if known is not None:
            raise NoPlaceError("the file speaks of channels_last already", code.line(known))
        wrapped = code.find_calls("torch.nn.parallel.DistributedDataParallel")
        if wrapped:
            raise NoPlaceError("the model has to be converted before DistributedDataParallel wraps it", code.line(wrapped[0]))
        step = code.find_step()
        (call, *more), (place, name, _) = step.calls, code.find_model_place(step)
        if more or len(call.args) != 1 or call.args[0].star or call.args[0].keyword is not None:
            raise NoPlaceError(
                "which inputs are images is not certain: the model takes several, or is called more than once", code.line(call)
            )
        code.need_import("torch")
        code.insert_after(place, f"{name}.to(memory_format=torch.channels_last)")
        code.append_call(call.args[0].value, "contiguous(memory_format=torch.channels_last)")


def _is_nhwc(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_contiguous(memory_format=torch.channels_last))


SDPA_BACKENDS = {"flash": "FlashAttention", "efficient": "EfficientAttention", "cudnn": "CudnnAttention"}
"""Back-ends that may be asked for, and what the autograd nodes of their ops are called (aten/src/ATen/native/native_functions.yaml)."""

SDPA_LOOKS = 3

_SDPA_NODE = "ScaledDotProduct"
_SDPA_BY_HAND = "F.scaled_dot_product_attention(q, k, v, is_causal=True) in place of softmax(q @ k.mT / sqrt(d)) @ v"


class Sdpa(RootFix):
    """sdpa: attention in one kernel, by torch's scaled_dot_product_attention.

    Switches models of Hugging Face to it; with a value, has torch prefer one of its back-ends wherever the program calls it.
    """

    fix = Fix(
        "sdpa", "Fused attention", "rounding",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p if model.training else 0)  # is_causal=True: a causal mask",
        values="flash, efficient or cudnn: the back-end that is to be preferred; without a value a Hugging Face model is switched to sdpa",
    )  # fmt: skip
    _configs: tuple[Any, ...] = ()
    _looks = 0

    def __init__(self, value: str | None = None) -> None:
        if value is not None and value not in SDPA_BACKENDS:
            hint = f"one of {', '.join(SDPA_BACKENDS)}; without a value a Hugging Face model is switched to it"
            raise InputError(f"sdpa has no back-end {value!r}{suggest_nearest(value, SDPA_BACKENDS)}", hint)
        super().__init__(value)
        self._nodes: set[str] = set()

    def install(self, site: Site) -> None:
        import torch

        super().install(site)

        def look(forward: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(target, *args, **kwargs)
            if self._looks < SDPA_LOOKS and torch.is_grad_enabled():
                self._looks += 1
                self._nodes.update(node.name() for node in walk_graph_nodes(output))
            return output

        site.on_root(lambda module: wrap_forward(module, look), layer=OUTSIDE)

    def change(self, module: Any) -> None:
        from torch.backends import cuda

        if self.value is not None:
            if find_device(module).type != "cuda":
                raise NotAppliedError("there is one back-end only on a CPU")
            cuda.enable_flash_sdp(self.value == "flash")
            cuda.enable_mem_efficient_sdp(self.value == "efficient")
            cuda.enable_cudnn_sdp(self.value == "cudnn")
            return
        model, name = unwrap_module(module), get_module_name(module)
        switch: Any = getattr(model, "set_attn_implementation", None)
        config: Any = getattr(model, "config", None)
        if switch is None:
            raise NotAppliedError(f"{name} has no switch for its attention; where it is written out, write {_SDPA_BY_HAND}")
        if config._attn_implementation not in (None, "eager"):
            raise NotAppliedError(f"its attention runs as {config._attn_implementation} already")
        try:
            switch("sdpa")
        except (ValueError, ImportError) as error:
            raise NotAppliedError(str(error).splitlines()[0]) from None
        if config._attn_implementation != "sdpa":
            raise NotAppliedError(f"{name} cannot switch its attention: pass attn_implementation='sdpa' where it is made")
        self._configs += (config,)

    def describe_evidence(self) -> str:
        """Return the switch as it stands, and the fused kernels in the forward pass. Raises NotAppliedError."""
        fused = sorted(name.removesuffix("Backward0") for name in self._nodes if name.startswith(_SDPA_NODE))
        seen = f"; {', '.join(fused)} in the forward pass" if fused else ""
        if self.value is None:
            if any(config._attn_implementation != "sdpa" for config in self._configs):
                raise NotAppliedError("the program has switched its attention back")
            return f"attention of {len(self._configs)} models runs as sdpa{seen}"
        if not any(SDPA_BACKENDS[self.value] in name for name in fused):
            raise NotAppliedError(f"no attention in the forward pass ran on the back-end {self.value}{seen}")
        return f"back-end {self.value}{seen}"

    def patch(self, code: TrainingCode) -> None:
        """Have the one model that asks for eager attention ask for sdpa."""
        given = [
            (call, arg)
            for call in code.calls
            for arg in call.args
            if arg.keyword is not None and arg.keyword.value == "attn_implementation"
        ]
        if self.value is not None or len(given) != 1 or code.read_literal(given[0][1].value) != "eager":
            why = 'no single attn_implementation="eager" stands in this file'
            raise NoPlaceError("a preferred back-end goes round the loop" if self.value is not None else why)
        code.set_argument(given[0][0], "attn_implementation", '"sdpa"')


class CudnnBenchmark(RootFix):
    """cudnn-benchmark: cuDNN times its algorithms for each shape, and takes the fastest.

    Sets torch.backends.cudnn.benchmark at the first call of a root that convolves on a GPU.
    """

    fix = Fix("cudnn-benchmark", "Let cuDNN choose algorithms by timing", "rounding", "torch.backends.cudnn.benchmark = True", verified=())
    needs_gpu = True

    def change(self, module: Any) -> None:
        import torch

        if not any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in module.modules()):
            raise NotAppliedError(f"{get_module_name(module)} has no convolution")
        if torch.backends.cudnn.benchmark and not self._changed:
            raise NotAppliedError("the program sets it itself")
        torch.backends.cudnn.benchmark = True

    def describe_evidence(self) -> str:
        """Return torch.backends.cudnn.benchmark as it stands after the warm-up.

        Raises NotAppliedError where the program has taken it back, or cuDNN is off.
        """
        import torch

        if not torch.backends.cudnn.benchmark:
            raise NotAppliedError("the program switches it off again")
        if not torch.backends.cudnn.enabled:
            raise NotAppliedError("the program has switched cuDNN off")
        return f"torch.backends.cudnn.benchmark is on (cuDNN {torch.backends.cudnn.version()})"

    def patch(self, code: TrainingCode) -> None:
        """Switch it on behind the imports, where the file says nothing of it and wants no determinism."""
        own = next((one for one in code.list_attributes() if one.attr.value in ("benchmark", "deterministic")), None)
        strict = code.find_calls("torch.use_deterministic_algorithms")
        if own is not None or strict:
            raise NoPlaceError("the file chooses benchmark or determinism itself", code.line(own or strict[0]))
        code.need_import("torch")
        code.insert_at_start("torch.backends.cudnn.benchmark = True")


PAD_VOCABULARY = Fix(
    "pad-vocabulary", "Pad the vocabulary to a multiple of 64", "semantics",
    "vocabulary = -(-vocabulary // 64) * 64  # of the embedding and of the output layer; tokens stay as they are",
    injected=False, by_hand="weights get rows that a checkpoint does not have",
)  # fmt: skip


class GeluTanh(Applier):
    """gelu-tanh: each exact GELU, of nn.GELU and of F.gelu, by its approximation with tanh, which is within 0.0005 of it.

    A GPU waits for memory in both; on a CPU that with tanh took longer where it was measured (4.8 ms of CPU time, and not 3.5).
    """

    fix = Fix("gelu-tanh", "GELU by its approximation", "low_precision", 'nn.GELU(approximate="tanh"); F.gelu(x, approximate="tanh")')
    _calls = 0

    def install(self, site: Site) -> None:
        """Replace F.gelu, which nn.GELU calls too, before the program looks it up."""
        import torch

        def count() -> None:
            self._calls += 1

        count._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result: run while Dynamo traces

        def make(original: Any) -> Any:
            def gelu(input: Any, *, approximate: str = "none") -> Any:  # noqa: A002 - as torch names it
                if approximate == "none":
                    count()
                    approximate = "tanh"
                return original(input, approximate=approximate)

            return gelu

        site.patches.wrap(torch.nn.functional, "gelu", make, homes=(torch._C._nn,))

    def evidence(self, site: Site) -> str:
        """Return how many calls were changed; compiled ones count when they are traced. Raises NotAppliedError where there was none."""
        if not self._calls:
            raise NotAppliedError("the program calls neither nn.GELU nor F.gelu with approximate='none'")
        return f"calls of an exact GELU that computed by tanh: {self._calls:,}"

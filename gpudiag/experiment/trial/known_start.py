"""The known start of a parity run: random numbers that both arms draw alike, no dropout, and noise in the weights where it is asked for.

Seeds are set when torch has just been imported, before any model is built, so that a script that sets none has the same weights in each
run; what the script seeds itself stands. They are set again after each optimizer step, round each fetch of a batch and round the start of
each loader: what a change draws by itself (to tune kernels, say) would shift all later numbers else, and batches would differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpudiag.capture.batch_contents import count_samples
from gpudiag.capture.hooks import Patches
from gpudiag.experiment.trial.protocol import ParityPlan
from gpudiag.fixes.fix import Site, around

_IMPORT, _STEP, _FETCH, _LOADER, _GENERATOR = range(5)
"""What a seed is for: no two of them are ever the same number."""

_KIND, _ALL = 1 << 28, 1 << 32

_DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
"""Functions of torch.nn.functional, all (input, p, training, inplace); the modules of torch.nn call them."""

MAX_INIT_SCALE = 1024.0
"""Of a GradScaler, whose 65,536 overflows in the first steps of many models: their updates would be left out in one arm only."""


class KnownStart:
    """Puts one process at the start that `plan` describes."""

    def __init__(self, plan: ParityPlan, fetched: Callable[[int | None], None] = lambda _: None) -> None:
        self._plan, self._fetched = plan, fetched
        self._count = [0] * 5
        self._given: set[int] = set()
        self._noisy: list[Any] = []  # kept: the id of a parameter that is gone could be another's
        self._noise: Any = None

    def install(self, site: Site, patches: Patches) -> None:
        """Set the seeds, and put everything in place. To be called before fixes are: their wrappers stand outside of these."""
        import torch
        from torch.nn import functional

        self._seeders: tuple[Callable[[int], Any], ...] = (random.seed, np.random.seed, torch.manual_seed)
        self._seed(_IMPORT)
        self._separate_draws(patches)

        def drop(original: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
            return original(input, p, False, inplace)  # named as in torch.nn.functional

        def attend(
            original: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
        ) -> Any:
            return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

        for name in _DROPOUTS:
            patches.wrap(functional, name, around(drop))
        patches.wrap(functional, "scaled_dot_product_attention", around(attend))
        site.on_root(_disable_module_dropout)
        if self._plan.perturb:
            self._noise = torch.Generator().manual_seed(self._plan.perturb_seed)
            site.on_root(lambda module: self.perturb(module.parameters()))

        def make_scaler(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if hasattr(scaler, "_init_scale"):
                scaler._init_scale = min(scaler._init_scale, MAX_INIT_SCALE)

        patches.wrap(torch.amp.GradScaler, "__init__", around(make_scaler))

    # -- seeds --------------------------------------------------------------------------------------------------------

    def _next_seed(self, kind: int) -> int:
        self._count[kind] += 1
        return (kind * _KIND + self._count[kind]) % _ALL

    def _seed(self, kind: int) -> None:
        import torch

        value = self._next_seed(kind)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # a captured step draws from the generator that was registered for its graph
        for seed in self._seeders:
            seed(value)

    def _separate_draws(self, patches: Patches) -> None:
        """Give generators without any seed one.

        Each batch, each beginning of an epoch and each step behind an update draw random numbers of their own.
        """
        from torch.optim import optimizer
        from torch.utils.data import DataLoader, dataloader

        def begin_epoch(original: Any, loader: Any) -> Any:
            with self._draw_apart(_LOADER):
                return original(loader)

        def fetch(original: Any, iterator: Any) -> Any:
            with self._draw_apart(_FETCH):
                batch = original(iterator)
            self._fetched(count_samples(batch))
            return batch

        patches.wrap(
            np.random, "default_rng", around(lambda original, seed=None: original(self._next_seed(_GENERATOR) if seed is None else seed))
        )
        patches.wrap(DataLoader, "_get_iterator", around(begin_epoch))
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", around(fetch))

        def hook(*_: Any) -> None:
            self._seed(_STEP)

        hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch._dynamo.disable sets it
        patches.on_restore(optimizer.register_optimizer_step_post_hook(hook).remove)

    @contextmanager
    def _draw_apart(self, kind: int) -> Iterator[None]:
        """Have what runs inside draw the numbers of this call alone, and what comes after it those of the step."""
        import torch

        value, on_cpu = self._next_seed(kind), torch.random.default_generator
        of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), on_cpu.get_state()
        self._seeders[0](value)
        self._seeders[1](value)
        on_cpu.manual_seed(value)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            on_cpu.set_state(of_torch)

    # -- noise --------------------------------------------------------------------------------------------------------

    def perturb(self, parameters: Any) -> None:
        """Give each weight relative noise N(0, plan.perturb), at least of a rounding unit of its type; none gets it twice.

        The unit roundoff is half of finfo.eps (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.1).
        """
        import torch
        from torch.nn.parameter import is_lazy

        for parameter in parameters if self._noise is not None else ():
            if is_lazy(parameter) or id(parameter) in self._given or not parameter.is_floating_point() or parameter.is_meta:
                continue
            self._given.add(id(parameter))
            self._noisy.append(parameter)
            values = parameter.data  # not counted as a change in place, which autograd would refuse where a weight was used before
            values = values.to_local() if hasattr(values, "to_local") else values
            size = max(self._plan.perturb, torch.finfo(values.dtype).eps / 2)
            noise = torch.randn(values.shape, generator=self._noise, dtype=torch.float32).to(values.device)
            values.mul_((1 + size * noise).to(values.dtype))


# -- dropout --------------------------------------------------------------------------------------------------------------


def _disable_module_dropout(root: Any) -> None:
    """Set the probabilities that no function of torch.nn.functional gets to see: those of recurrent layers, and of stochastic depth.

    timm and transformers call that DropPath, torchvision StochasticDepth.
    """
    from torch import nn

    for module in root.modules():
        kind = type(module).__name__
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        elif kind.endswith("DropPath") and hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
        elif kind == "StochasticDepth" and hasattr(module, "p"):
            module.p = 0.0

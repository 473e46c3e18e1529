"""Tests, on a few small parameters, whether an optimizer steps each parameter independently of the others.

Each rank steps the parameters that it owns. An optimizer that takes a norm over all of its parameters, or estimates one
learning rate for all (Prodigy, D-Adaptation), would then silently train differently. So would an optimizer whose
constructor looks at values, which arrive later, one that keeps a gradient's memory, where another gradient is next, and
one that draws random numbers, which other parameters would get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.errors import ConfigError
from streamshard.optim.rounds import stand_in

__all__ = ["check_separable"]

_STEPS = 8
_LARGEST_DIM = 16
_TOLERANCE = 1e-3  # relative to a parameter's change; rounding errors are a hundred times smaller


def check_separable(
    kind: type[Optimizer], options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> None:
    """Raise unless `kind` steps each parameter on its owner as plain PyTorch would. Takes milliseconds.

    Args:
        kind: an optimizer's class.
        options: arguments of its constructor.
        shapes: shapes of the parameters; the test uses two small parameters for each number of dimensions.
        device: where the parameters are; for meta the test runs on the CPU.

    Raises:
        ConfigError: the results differ, or a step raises in the test.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    first = {len(shape): tuple(min(size, _LARGEST_DIM) for size in shape) for shape in reversed(shapes)}
    tried = [first[ndim] for ndim in sorted(first) for _ in range(2)]
    device = torch.device("cpu") if device.type == "meta" else device
    forked: Any = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    changes = []
    try:
        for as_on_owners in (False, True):
            with torch.random.fork_rng(**forked):  # both have the same random numbers
                changes.append(_changes(kind, options, tried, device, as_on_owners=as_on_owners))
    except Exception as error:
        raise ConfigError(
            f"{name} was tried on small parameters {tried}, to see whether it steps each of them by itself, and raised "
            f"{type(error).__name__}: {error}. WholeParameterOptimizer runs optimizers that step without a closure, "
            "and parameters of any shape"
        ) from error
    for together, apart in zip(*changes, strict=True):
        if not torch.allclose(together, apart, rtol=0.0, atol=_TOLERANCE * float(together.abs().max()), equal_nan=True):
            raise ConfigError(
                f"{name} with these options changes a parameter by what the other parameters are (a norm or learning "
                "rate of all of them), by random numbers, by the values that parameters have when it is made, or keeps "
                "the memory of a gradient or parameter without clone(). So each rank would step the parameters that "
                "it owns differently from plain PyTorch. WholeParameterOptimizer runs optimizers that step each "
                "parameter by itself; for a norm over all gradients use model.clip_grad_norm_"
            )


def _changes(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    as_on_owners: bool,
) -> list[torch.Tensor]:
    """How parameters of these shapes change in a few steps with large and small gradients.

    Args:
        kind, options, shapes, device: see `check_separable`.
        as_on_owners: one optimizer for each parameter, made before the values are there. The last parameter is stepped
            first, so that it draws other random numbers. Nothing else is in the memory of a gradient or parameter
            after the step.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    params = [nn.Parameter(stand_in(start) if as_on_owners else start.clone()) for start in starts]
    optimizers = [kind(group, **options) for group in ([[param] for param in params] if as_on_owners else [params])]
    for param, start in zip(params, starts, strict=True):
        param.data = start.clone()
    for step in range(_STEPS):
        for index, param in enumerate(params):
            scale = 10.0 ** (1 - (index + step) % 3)
            param.grad = scale * torch.randn(param.shape, generator=generator).to(device)
        for optimizer in reversed(optimizers):
            optimizer.step()
        for param in params if as_on_owners else ():
            stepped = param.data.clone()
            for memory in (param.data, param.grad):
                memory.fill_(torch.nan)  # type: ignore[union-attr]  # made above
            param.data = stepped
    return [param.detach() - start for param, start in zip(params, starts, strict=True)]

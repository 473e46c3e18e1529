"""Tests, on a few small parameters, whether an optimizer steps each parameter independently of the others.

Each rank steps the parameters that it owns. An optimizer that takes a norm over all of its parameters, or estimates one
learning rate for all (Prodigy, D-Adaptation), would then silently train differently. So would one whose constructor
looks at values, which arrive later, and one that keeps a gradient's memory, where another gradient is next.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.device import module_of
from streamshard.errors import ConfigError
from streamshard.optim.rounds import stand_in
from streamshard.torch_private import tree_leaves

__all__ = ["check_separable"]

_STEPS = 8
_LARGEST_DIM = 16
_TOLERANCE = 1e-3  # relative to a parameter's change; rounding errors are a hundred times smaller


def check_separable(
    kind: type[Optimizer], options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> None:
    """Raise unless `kind` steps each parameter as if it were the only one. Takes milliseconds.

    Args:
        kind: an optimizer's class.
        options: arguments of its constructor.
        shapes: shapes of the parameters; the test uses small parameters with as many dimensions.
        device: where the parameters are; for meta the test runs on the CPU.

    Raises:
        ConfigError: a step depends on other parameters or the constructor on values, state is a gradient's memory, or a
            step draws random numbers, needs a closure, or raises in the test.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    device = torch.device("cpu") if device.type == "meta" else device
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{name} calls a closure several times within a step, and parameters are whole on their owners only then: "
            "WholeParameterOptimizer cannot run it. Use an optimizer whose step() can be called without a closure"
        )
    tried = [tuple(min(size, _LARGEST_DIM) for size in shape) for shape in _first_of_each_ndim(shapes)]
    try:
        together = _changes(kind, options, tried, device, separately=False)
        apart = _changes(kind, options, tried, device, separately=True)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} was tried on small parameters {tried}, to see whether it steps each of them by itself, and raised "
            f"{type(error).__name__}: {error}. WholeParameterOptimizer runs optimizers of which that can be seen"
        ) from error
    for first, second in zip(together, apart, strict=True):
        if not torch.allclose(first, second, rtol=0.0, atol=_TOLERANCE * float(first.abs().max()), equal_nan=True):
            raise ConfigError(
                f"{name} with these options changes a parameter by what the other parameters are (a norm or learning "
                "rate of all of them), or by their values when it is made: each rank would step the parameters that it "
                "owns differently from plain PyTorch. WholeParameterOptimizer runs optimizers that step each parameter "
                "by itself; for a norm over all gradients use model.clip_grad_norm_"
            )


def _first_of_each_ndim(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    first = {len(shape): shape for shape in reversed(shapes)}
    return [first[ndim] for ndim in sorted(first) for _ in range(2)]


def _changes(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    separately: bool,
) -> list[torch.Tensor]:
    """How parameters of these shapes change in a few steps with large and small gradients.

    Args:
        kind, options, shapes, device: see `check_separable`.
        separately: as on owners: one optimizer for each parameter, made before the values are there.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    params = [nn.Parameter(stand_in(start) if separately else start.clone()) for start in starts]
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_fork_type(device)):
        before = _random_states(device)
        groups = [[param] for param in params] if separately else [params]
        optimizers = [kind(group, **options) for group in groups]
        for param, start in zip(params, starts, strict=True):
            param.data = start.clone()
        for step in range(_STEPS):
            for index, param in enumerate(params):
                scale = 10.0 ** (1 - (index + step) % 3)
                param.grad = scale * torch.randn(param.shape, generator=generator).to(device)
            for optimizer in optimizers:
                optimizer.step()
                _refuse_aliases(optimizer)
        if not all(map(torch.equal, before, _random_states(device))):
            raise ConfigError(
                f"{kind.__module__}.{kind.__qualname__} draws random numbers: parameters that are stepped on several "
                "ranks would get others than under plain PyTorch. WholeParameterOptimizer needs one that draws none"
            )
    return [param.detach() - start for param, start in zip(params, starts, strict=True)]


def _refuse_aliases(optimizer: Optimizer) -> None:
    """Raise if state lies in the memory of a parameter or gradient: on owners another parameter is there next."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    taken = {each.untyped_storage().data_ptr() for param in params for each in (param, param.grad)}
    for value in tree_leaves(list(optimizer.state.values())):
        if type(value) is torch.Tensor and value.numel() and value.untyped_storage().data_ptr() in taken:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps the memory of a parameter or gradient as state, where other "
                "parameters are next: keep a clone()"
            )


def _fork_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # of no devices, for the CPU's generator is always forked


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's default generators, of the CPU and of `device`."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, module_of(device).get_rng_state(device)]

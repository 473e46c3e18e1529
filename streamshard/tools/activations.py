"""An estimate of the memory that activations take, from one forward with tensors that have no memory.

The estimate counts tensors that autograd keeps for backward. It leaves out dropout, attention masks (on GPUs causal
attention needs none in memory), and peaks inside of operations. With checkpointing, layers keep only their inputs,
except one layer at a time, which keeps everything.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from streamshard.errors import ConfigError, describe
from streamshard.nested import tensors_in
from streamshard.planning.discovery import FoundUnit, UnitsArgument, find_units
from streamshard.planning.structure import modules_inside, params_of
from streamshard.torch_private import FakeTensorMode

Build = Callable[[], nn.Module]
"""A function that makes a model."""


def estimate_activations(
    build: nn.Module | Build, units: UnitsArgument, dtype: torch.dtype, batch: int | None, seq: int | None
) -> tuple[int, int]:
    """Run a forward, and add up the tensors that autograd keeps.

    Args:
        build: makes the model; a model itself is refused. The model's forward takes tokens: as ``input_ids`` (and
            ``labels``), or as its only argument.
        units: as for `StreamShard`, by name: the estimate builds another model.
        dtype: the dtype in which layers compute.
        batch, seq: shape of the tokens.

    Returns:
        Bytes without checkpointing, and bytes if each streamed layer is checkpointed.

    Raises:
        ConfigError: an argument is missing, or the model cannot be built, or its forward cannot run with fake tensors.
    """
    if batch is None or seq is None:
        raise ConfigError("batch and seq estimate activations together: one is missing")
    if isinstance(build, nn.Module):
        raise ConfigError("batch and seq need a function that builds the model: its forward runs on fake tensors")
    kept: dict[int, tuple[int, int]] = {}  # by storage: its bytes, and the first layer that keeps it (0: no layer)
    inputs: dict[int, int] = {}  # of layers: bytes by storage
    alive: list[torch.UntypedStorage] = []  # so that no two storages have the same address
    running = [0]

    def note_inputs(layer: int, _: nn.Module, *given: Any) -> None:
        running[0] = layer
        for tensor in tensors_in(given):
            if tensor.is_floating_point():
                alive.append(tensor.untyped_storage())
                inputs[alive[-1]._cdata] = alive[-1].nbytes()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] != (seq, seq) or tensor.requires_grad:  # no attention mask
            alive.append(tensor.untyped_storage())
            kept.setdefault(alive[-1]._cdata, (alive[-1].nbytes(), running[0]))
        return tensor

    with model_without_memory(build, units, dtype, seq) as (model, streamed), saved_tensors_hooks(keep, lambda t: t):
        for layer, module in ((layer, module) for layer, unit in enumerate(streamed, 1) for module in unit.modules):
            module.register_forward_pre_hook(partial(note_inputs, layer), with_kwargs=True)
            module.register_forward_hook(lambda module, *_: note_inputs(0, module))
        run_tokens(model, torch.zeros(batch, seq, dtype=torch.long))
    for param in params_of(model).values():
        kept.pop(param.untyped_storage()._cdata, None)
    by_layer = Counter[int]()
    for n_bytes, layer in kept.values():
        by_layer[layer] += n_bytes
    outside = {storage: n_bytes for storage, (n_bytes, layer) in kept.items() if layer == 0}
    largest = max((n_bytes for layer, n_bytes in by_layer.items() if layer), default=0)
    return by_layer.total(), sum({**outside, **inputs}.values()) + largest


@contextlib.contextmanager
def model_without_memory(
    build: Build, units: UnitsArgument, dtype: torch.dtype, seq: int
) -> Iterator[tuple[nn.Module, list[FoundUnit]]]:
    """Inside, tensors are fake. Yields the model, with parameters of `dtype`, and its streamed units.

    Raises:
        ConfigError: the model cannot be built, or the body raised: a model's forward may not run with fake tensors.
    """
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build().eval()
            cast_params(model, dtype)
            yield model, [unit for unit in find_units(model, units) if not unit.is_resident]
    except Exception as error:  # the model may raise anything, and fake tensors have no values to branch on
        what = describe(error).partition("\n")[0]
        raise ConfigError(f"the forward of {seq} tokens without memory: {what}") from error


def cast_params(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the model's parameters, and only these, `dtype`. ``model.to`` cannot do it with fake tensors."""
    cast = {param: nn.Parameter(param.detach().to(dtype), param.requires_grad) for param in params_of(model).values()}
    for module in modules_inside(model):
        for key, param in module._parameters.items():
            module._parameters[key] = None if param is None else cast[param]


def run_tokens(model: nn.Module, tokens: torch.Tensor) -> None:
    """Call the model with `tokens` [batch, seq], as ``input_ids`` and ``labels`` if it takes these."""
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        model(tokens)
        return
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    model(**{name: value for name, value in given.items() if name in names})

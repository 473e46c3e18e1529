"""An estimate of the memory that activations take, from one forward with tensors that have no memory.

Counted is what autograd keeps for backward. Left out are dropout, attention masks (on GPUs causal attention needs none
in memory), and peaks inside of operations. With checkpointing, layers keep only their inputs, except one layer at a
time, which keeps everything.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from streamshard.errors import ConfigError
from streamshard.planning.discovery import UnitsArgument, find_groups
from streamshard.planning.structure import modules_inside, params_of
from streamshard.torch_private import FakeTensorMode, tree_leaves


@dataclasses.dataclass(frozen=True)
class Activations:
    """An estimate for one batch on one rank.

    Attributes:
        batch, seq: shape of the batch of tokens.
        all_bytes: what autograd keeps without checkpointing.
        checkpointed_bytes: what it keeps if each streamed layer is checkpointed.
    """

    batch: int
    seq: int
    all_bytes: int
    checkpointed_bytes: int


def estimate_activations(
    build: Callable[[], nn.Module], units: UnitsArgument, dtype: torch.dtype, batch: int, seq: int
) -> Activations:
    """Run a forward, and add up what autograd keeps.

    Args:
        build: makes the model. Its forward takes tokens: ``input_ids`` (and ``labels``), or as the only argument.
        units: as for `StreamShard`; modules and classes of another model do not count, so names and None.
        dtype: the layers compute in it.
        batch, seq: shape of the batch.

    Raises:
        ConfigError: the forward has raised.
    """
    keeper = _Keeper(seq)
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build().eval()
            _cast(model, dtype)
            keeper.weights = {param.untyped_storage()._cdata for param in params_of(model).values()}
            layers = [unit.modules for unit in find_groups(model, units)[0] if not unit.is_resident]
            for number, modules in enumerate(layers, 1):
                for module in modules:
                    keeper.watch(module, number)
            tokens = torch.zeros(batch, seq, dtype=torch.long)
            with saved_tensors_hooks(keeper.keep, lambda tensor: tensor):
                _run(model, tokens)
    except Exception as error:  # the model may raise anything, and fake tensors have no values to branch on
        what = str(error).partition("\n")[0]
        raise ConfigError(f"activations: the forward of {seq} tokens raised {type(error).__name__}: {what}") from error
    return keeper.add_up(batch)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the model's parameters, and only these, `dtype`. ``model.to`` cannot do it with fake tensors."""
    cast: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in modules_inside(model):
        for key, param in module._parameters.items():
            if param is not None:
                if param not in cast:
                    cast[param] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
                module._parameters[key] = cast[param]


def _run(model: nn.Module, tokens: torch.Tensor) -> None:
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        model(tokens)
        return
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    model(**{name: value for name, value in given.items() if name in names})


class _Keeper:
    """Notes the memory that autograd keeps, by layer. Holds it too, so that no address is used twice.

    Attributes:
        weights: addresses of the parameters' memory, which does not count.
    """

    def __init__(self, seq: int) -> None:
        self.weights: set[int] = set()
        self._mask_shape = (seq, seq)
        self._layer = 0  # the layer that runs; 0: none
        self._kept: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address: the first layer that keeps it
        self._inputs: dict[int, torch.UntypedStorage] = {}  # of layers

    def watch(self, layer: nn.Module, number: int) -> None:
        """Let what `layer` keeps count as that of layer `number`."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._layer = number
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    self._inputs[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._layer = 0

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """autograd saves `tensor`."""
        storage = tensor.untyped_storage()
        is_mask = tuple(tensor.shape[-2:]) == self._mask_shape and not tensor.requires_grad
        if storage._cdata not in self.weights and not is_mask:
            self._kept.setdefault(storage._cdata, (self._layer, storage))
        return tensor

    def add_up(self, batch: int) -> Activations:
        """The sums."""
        total = Counter[int]()  # bytes by layer
        for layer, storage in self._kept.values():
            total[layer] += storage.nbytes()
        outside = {address: storage for address, (layer, storage) in self._kept.items() if not layer}
        checkpointed = sum(storage.nbytes() for storage in {**outside, **self._inputs}.values())
        largest = max((count for layer, count in total.items() if layer), default=0)
        return Activations(batch, self._mask_shape[0], total.total(), checkpointed + largest)

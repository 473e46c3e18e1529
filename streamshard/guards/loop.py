"""Mistakes of a training loop around the model: exchanged modules, transforms, gradients that nobody uses."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Streams
from streamshard.errors import ShardingError, warn_user
from streamshard.guards.sharded_tensor import CALL_BACKWARD
from streamshard.planning.structure import join_names, modules_of, params_of
from streamshard.torch_private import innermost_transform, is_autograd_compiled


def refuse_transforms() -> None:
    """Raise inside ``torch.func.grad`` and similar transforms, and inside compiled autograd.

    ``vmap`` is allowed: it only maps over a layer's inputs.

    Raises:
        ShardingError: names the transform.
    """
    if is_autograd_compiled():
        raise ShardingError(
            "compiled autograd is on, which reads the weights of all layers before backward begins, and a StreamShard "
            "model has them in place one at a time: leave out torch's setting compiled_autograd = True. Compiling "
            "layers or the model (layer.compile(), torch.compile(model)) compiles their backward too"
        )
    if (transform := innermost_transform()) is not None:
        raise ShardingError(
            f"a StreamShard model inside torch.func ({transform}): such transforms allow no writes, and an all-gather "
            "writes weights. Use backward() or torch.autograd.grad; for forward-mode torch.autograd.forward_ad"
        )


def refuse_capture(streams: Streams) -> None:
    """Refuse CUDA graph capture.

    Raises:
        ShardingError: the device of `streams` is capturing a graph.
    """
    if streams.module is not None and getattr(streams.module, "is_current_stream_capturing", bool)():
        raise ShardingError(
            "a pass of a StreamShard model is captured in a device graph: a replay would repeat this step's "
            "collectives without the host, which decides what follows them. Capture layers: torch.compile(layer, "
            'mode="reduce-overhead"), whose weights stay at the same addresses'
        )


class Structure:
    """The modules and parameters of a model when it was sharded, to notice later changes.

    A parameter or layer that is assigned afterwards would be trained by this rank alone.

    Args:
        root: the model, while its modules hold the sharded parameters.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known = set(params_of(root).values())
        owners = modules_of(root)
        # dict's own values(): a sharded module's `_parameters` has a slow one.
        self._params = [
            (name, owner._parameters, functools.partial(dict.values, owner._parameters), (*owner._parameters.values(),))
            for name, owner in owners
            if isinstance(owner._parameters, dict)
        ]
        self._children = {name: (owner._modules, (*owner._modules.values(),)) for name, owner in owners}

    def check(self) -> None:
        """Raise if a parameter was added, removed or replaced, or a module with parameters of its own was.

        Raises:
            ShardingError: names the parameter or the module.
        """
        for name, params, values, known in self._params:
            if len(params) != len(known) or not all(map(operator.is_, values(), known)):
                changed = [key for key, param in params.items() if not any(param is old for old in known)]
                _refuse_change("parameter", name, changed[0] if changed else "")
        for name, (children, before) in self._children.items():
            if len(children) != len(before) or not all(map(operator.is_, children.values(), before)):
                for key, child in children.items():
                    if child is not None and not self._known.issuperset(params_of(child).values()):
                        _refuse_change("module", name, key)
                self._children[name] = (children, (*children.values(),))  # modules without parameters may change


def _refuse_change(what: str, owner: str, key: str) -> None:
    name = repr(join_names(owner, key)) if key else f"of {owner or 'the model'!r}"
    raise ShardingError(
        f"{what} {name} was replaced, added or removed after StreamShard(model): this rank alone would train the new "
        "one. Change the model before it is sharded, or assign to a parameter's data (param.data.copy_, "
        "load_state_dict, summon_full_params()). torch.func.functional_call replaces parameters too"
    )


# -- gradients that nobody uses ---------------------------------------------------------------------------------------

_MOST_UNUSED = 10  # backwards without an optimizer that uses their gradients, while other optimizers step


class Model(Protocol):
    """A sharded model: its engine."""

    ranks: Communicator

    @property
    def param_shards(self) -> list[Any]:
        """All parameters."""


@dataclasses.dataclass(eq=False)
class _Progress:
    """How far the training of a model has come.

    Attributes:
        is_unreached: the model has run forward with gradients, and not backward since.
        version: of the parameters at the first gradients, added up: code may step them without an optimizer. None: no
            gradients so far, or `is_over`.
        is_new: no optimizer of the process has stepped since the last backward.
        number: of backwards after which other optimizers have stepped.
        is_over: an optimizer has stepped the model, or a warning says that none has.
    """

    is_unreached: bool = False
    version: int | None = None
    is_new: bool = False
    number: int = 0
    is_over: bool = False


_progress: WeakKeyDictionary[Model, _Progress] = WeakKeyDictionary()


def _progress_of(model: Model) -> _Progress:
    return _progress.setdefault(model, _Progress())


def note_forward(model: Model) -> None:
    """`model` has run forward with gradients."""
    _progress_of(model).is_unreached = True


def note_backward(model: Model) -> None:
    """A backward has come to `model`."""
    _progress_of(model).is_unreached = False


def note_gradients(model: Model) -> None:
    """A backward has given gradients to parameters of `model`."""
    progress = _progress_of(model)
    if progress.version is None and not progress.is_over:
        progress.version = _version_of(model)
    progress.is_new = True


def note_step(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """`optimizer`, any of the process, is about to step `params`. Warns once if no optimizer ever steps a model.

    Models trained in turns (GANs) make gradients that are not used, but not ten times before their first step.
    """
    for model, progress in list(_progress.items()):
        if progress.version is None:
            continue
        is_own = _first_of(model, params) is not None
        progress.number += progress.is_new
        progress.is_new = False
        if not is_own and progress.number < _MOST_UNUSED:
            continue
        version, progress.version, progress.is_over = progress.version, None, True
        if not is_own and _version_of(model) == version and model.ranks.is_first:
            warn_user(
                f"{_MOST_UNUSED} backwards have made gradients of a sharded model, {type(optimizer).__name__} has "
                "stepped after them, and no optimizer has stepped a parameter of the model, such as "
                f"{model.param_shards[0].name!r}: it does not train. Was the optimizer made from a copy of the model, "
                "or of its tensors? Make it from model.parameters(). If the model is not to train, freeze it: "
                "model.requires_grad_(False)"
            )


def refuse_step_without_backward(params: Sequence[torch.Tensor]) -> None:
    """Raise if no parameter has a gradient, and the last forward with gradients was followed by no backward."""
    unreached = [model for model, progress in list(_progress.items()) if progress.is_unreached]
    if not unreached or any(param.grad is not None for param in params):
        return
    trained = [param for param in params if param.requires_grad]
    for name in filter(None, (_first_of(model, trained) for model in unreached)):
        raise ShardingError(
            f"an optimizer steps, and neither {name!r} nor any other of its parameters has a gradient, "
            "although the model has run forward: no backward has come to it. backward(inputs=...) does not find "
            f"sharded parameters, because layers compute with all-gathered copies: {CALL_BACKWARD}"
        )


def _first_of(model: Model, params: Sequence[torch.Tensor]) -> str | None:
    """The name of the first of `params` that is a parameter of `model`; None if none is."""
    names = {id(shard.param): shard.name for shard in model.param_shards}
    return next((names[id(param)] for param in params if id(param) in names), None)


def _version_of(model: Model) -> int:
    return sum(shard.param._version for shard in model.param_shards)

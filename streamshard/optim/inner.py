"""One ordinary optimizer inside a `WholeParameterOptimizer`: it steps some parameters of a group, whole or in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.errors import ConfigError, StreamShardError
from streamshard.optim.rounds import stand_in
from streamshard.torch_private import TorchDispatchMode, tree_leaves
from streamshard.unit.sharded_tensor import piece_of

__all__ = ["NO_OPTIONS", "Constructed", "InnerOptimizer", "constructor_options", "try_constructor"]

NO_OPTIONS = ("params", "param_names")
_PLAIN = (int, float, str, bool, tuple, type(None))


class InnerOptimizer:
    """An ordinary optimizer of some parameters of one of the user's groups.

    Args:
        kind: its class.
        options: for its constructor.
        number: of the group.
        group: the user's group. A step reads its options from the group and writes them back.
        params: the user's parameters.
        targets: what is stepped in their place, one for each; None: the parameters themselves.
        initial: by parameter, state that the constructor gives a parameter when it sees all of them.

    Attributes:
        optimizer: the ordinary one.
        number: see above.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        options: Mapping[str, Any],
        number: int,
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        targets: Sequence[nn.Parameter | None] | None,
        initial: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        self.number = number
        self._group = group
        self._params = params
        stepped = list(params if targets is None else targets)
        self.optimizer: Optimizer = kind([{**_options(group), "params": stepped}], **options)
        for param, target in zip(params, stepped, strict=True):
            if target is not None and (values := initial.get(param)):
                self.optimizer.state[target].update(values)

    @property
    def _targets(self) -> list[nn.Parameter]:
        targets: list[nn.Parameter] = self.optimizer.param_groups[0]["params"]
        return targets

    def step(self) -> None:
        """Step with the user's options."""
        self.take_options()
        self.optimizer.step()
        self.give_options()

    def take_options(self) -> None:
        """Copy the options from the user's group."""
        self.optimizer.param_groups[0].update(_options(self._group))

    def give_options(self) -> None:
        """Copy the options to the user's group, whose tensors stay the same objects."""
        for key, value in _options(self.optimizer.param_groups[0]).items():
            theirs = self._group.get(key)
            if isinstance(theirs, torch.Tensor) and isinstance(value, torch.Tensor) and theirs.shape == value.shape:
                theirs.copy_(value)
            else:
                self._group[key] = value

    def refuse_aliases(self, address: int) -> None:
        """Raise if state lies in the memory at `address`, where the next parameters and gradients will be."""
        for param, target in zip(self._params, self._targets, strict=True):
            for value in tree_leaves(self.optimizer.state.get(target)):
                if type(value) is torch.Tensor and value.untyped_storage().data_ptr() == address != 0:
                    piece = piece_of(param)
                    raise ConfigError(
                        f"{type(self.optimizer).__name__} keeps the memory of parameter "
                        f"{piece.name if piece else ''!r}, or of its gradient, as state, where other parameters are "
                        "next: keep a clone()"
                    )

    def link(self, state: dict[Any, Any]) -> None:
        """Let `state` have what this optimizer keeps, by the user's parameters."""
        for param, target in zip(self._params, self._targets, strict=True):
            if target in self.optimizer.state:
                state[param] = self.optimizer.state[target]
        state.update({key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)})

    def load(self, state: Mapping[Any, Any], *, is_loaded: bool) -> None:
        """Keep what `state` has for the user's parameters.

        Args:
            state: by the user's parameters.
            is_loaded: `state` comes from a state dict and may have other dtypes and devices. Otherwise an optimizer of
                the same class kept it until now, and it stays as it is.
        """
        if not state:
            return
        packed = self.optimizer.state_dict()
        kept = packed["state"]  # what the constructor has made
        for number, param in enumerate(self._params):
            if (values := state.get(param)) is not None:
                kept[number] = {**kept.get(number, {}), **values}
        shared = {key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)}
        packed["param_groups"][0].update(_options(self._group))
        self.optimizer.load_state_dict({**packed, "state": {**shared, **kept}})
        if not is_loaded:
            self.optimizer.state.update({self._targets[number]: values for number, values in kept.items()})

    def refuse_extras(self) -> None:
        """Raise if the optimizer's state dict has more than state and groups, which nothing here saves."""
        if extras := [key for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has {extras} in its state_dict() beside 'state' and 'param_groups'. "
                "WholeParameterOptimizer trains with it and cannot save it: save the weights alone"
            )


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of `group` that the constructor of `kind` has arguments for."""
    names = inspect.signature(kind).parameters
    return {key: value for key, value in group.items() if key in names and key not in ("self", *NO_OPTIONS)}


class Constructed(NamedTuple):
    """What the constructor of an optimizer makes of a group.

    Attributes:
        options: of the group, as the constructor fills them in.
        state: of each parameter, the numbers and names that the constructor gives it: APOLLO's seeds.
    """

    options: dict[str, Any]
    state: list[dict[str, Any]]


def try_constructor(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Constructed:
    """What `kind` makes of the last of `groups`, all of which are for it.

    Raises:
        ConfigError: the constructor raises, splits a group, or reads values of parameters.
    """
    params = [[nn.Parameter(stand_in(param)) for param in group["params"]] for group in groups]
    given = [{**_options(group), "params": own} for group, own in zip(groups, params, strict=True)]
    try:
        with _ReadsNoValues(kind, [param for own in params for param in own]):
            made: Any = kind(given, **options)
    except StreamShardError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made for a group of parameters with the options "
            f"{[*_options(groups[-1]), *options]}: {type(error).__name__}: {error}"
        ) from error
    if len(made.param_groups) != len(groups):
        raise ConfigError(
            f"{kind.__name__} makes {len(made.param_groups)} groups of {len(groups)}: wanted an optimizer that keeps "
            "groups as they are given"
        )
    state = [
        {key: value for key, value in made.state.get(param, {}).items() if isinstance(value, _PLAIN)}
        for param in params[-1]
    ]
    return Constructed(_options(made.param_groups[-1]), state)


class _ReadsNoValues(TorchDispatchMode):
    """Raises where a constructor computes with the values of parameters, which are stand-ins at that time."""

    def __init__(self, kind: type[Optimizer], params: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._kind = kind
        self._addresses = {param.untyped_storage().data_ptr() for param in params}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        reads = not (func.is_view or name.endswith("_like") or name.startswith("new_") or name == "detach")
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)] if reads else []
        if any(tensor.untyped_storage().data_ptr() in self._addresses for tensor in tensors):
            raise ConfigError(
                f"the constructor of {self._kind.__module__}.{self._kind.__qualname__} reads the values of parameters "
                f"({name}), and no rank has all of them: WholeParameterOptimizer runs optimizers that look at "
                "parameters in step() only"
            )
        return func(*args, **(kwargs or {}))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, so that a step that changes one in place changes no other optimizer's."""
    return {key: _copied(value) for key, value in group.items() if key not in NO_OPTIONS}


def _copied(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

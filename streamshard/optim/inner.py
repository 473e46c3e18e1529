"""One ordinary optimizer inside another: it steps some parameters of one group, whole or in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamshard.errors import ConfigError, StreamShardError
from streamshard.optim.rounds import stand_in
from streamshard.unit.pieces import piece_of
from streamshard.unit.sharded_parameter import data_of

__all__ = ["NO_OPTIONS", "Constructed", "InnerOptimizer", "Place", "constructor_options", "try_constructor"]

Place = tuple[nn.Parameter, int | None]
NO_OPTIONS = ("params", "param_names")
_PLAIN = (int, float, str, bool, tuple, type(None))


class InnerOptimizer:
    """An ordinary optimizer of some parameters of one of the user's groups.

    Args:
        kind: its class.
        options: for its constructor.
        number: of the group.
        group: the user's group; its options count, and are written when a step changes them.
        places: the user's parameters, each with the number of a slice of it, or None for all of it.
        targets: what is stepped in their place; None: they are stepped in place.
        initial: by place, state that the constructor gives parameters when it sees all of them.

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
        places: Sequence[Place],
        targets: Sequence[nn.Parameter | None] | None = None,
        initial: Mapping[Place, Mapping[str, Any]] | None = None,
    ) -> None:
        self.number = number
        self._group = group
        self._places = places
        self._views: list[tuple[nn.Parameter, int, nn.Parameter]] = []  # slices that are stepped in place
        if targets is None:
            targets = []
            for param, index in places:
                target = param if index is None else nn.Parameter(stand_in(param)[index])
                targets.append(target)
                if index is not None:
                    self._views.append((param, index, target))
        own = {key: _copied(value) for key, value in group.items() if key not in NO_OPTIONS}
        self.optimizer: Optimizer = kind([{**own, "params": list(targets)}], **options)
        for place, stepped in zip(places, targets, strict=True):
            if stepped is not None and (values := (initial or {}).get(place)):
                self.optimizer.state[stepped].update(values)
        self._given: dict[str, tuple[Any, int]] = {}

    def step(self) -> None:
        """With the user's options."""
        self.take_options()
        for param, index, view in self._views:
            view.data = data_of(param)[index]
            view.grad = None if param.grad is None else param.grad[index]
        self.optimizer.step()
        for param, index, view in self._views:
            if view.grad is not None:
                data_of(param)[index].copy_(view.detach())  # it may have been given other data
                torch.autograd.graph.increment_version(param)
            view.grad, view.data = None, stand_in(view)
        self.give_options()

    def refuse_aliases(self, address: int) -> None:
        """Raise if state is in the memory at `address`, where the next parameters and gradients will be."""
        for (param, _), target in zip(self._places, self.optimizer.param_groups[0]["params"], strict=True):
            for value in tree_leaves(self.optimizer.state.get(target)):
                if type(value) is torch.Tensor and value.untyped_storage().data_ptr() == address != 0:
                    piece = piece_of(param)
                    raise ConfigError(
                        f"{type(self.optimizer).__name__} keeps the memory of parameter "
                        f"{piece.name if piece else ''!r}, or of its gradient, as state, where other parameters are "
                        "next: keep a clone()"
                    )

    def take_options(self) -> None:
        """From the user's group."""
        own = self.optimizer.param_groups[0]
        for key, value in self._group.items():
            if key not in NO_OPTIONS:
                own[key] = _copied(value)
                self._given[key] = own[key], _version(own[key])

    def give_options(self) -> None:
        """To the user's group, those that the step has changed. Tensors there stay the same objects."""
        for key, value in self.optimizer.param_groups[0].items():
            if key in NO_OPTIONS:
                continue
            given = self._given.get(key)
            if given is not None and value is given[0] and _version(value) == given[1] and not _is_mutable(value):
                continue
            theirs = self._group.get(key)
            if isinstance(theirs, torch.Tensor) and isinstance(value, torch.Tensor) and theirs.shape == value.shape:
                theirs.copy_(value)
            else:
                self._group[key] = _copied(value)

    def link(self, state: dict[Any, Any]) -> None:
        """Let `state` have what this optimizer keeps, by the user's parameters, of slices by their numbers too."""
        for (param, index), target in zip(self._places, self.optimizer.param_groups[0]["params"], strict=True):
            if target in self.optimizer.state:
                if index is None:
                    state[param] = self.optimizer.state[target]
                else:
                    state.setdefault(param, {})[str(index)] = self.optimizer.state[target]
        for key, value in self.optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                state[key] = value

    def load(self, state: Mapping[Any, Any], extras: Mapping[str, Any], *, is_loaded: bool) -> None:
        """Keep what `state` has for the user's parameters, which becomes this optimizer's.

        Args:
            state: by the user's parameters.
            extras: see `extras`.
            is_loaded: `state` may be of other dtypes and devices; else it was the same class's until now, and stays
                as it is.
        """
        if not state and not extras:
            return
        packed = self.optimizer.state_dict()["state"]  # what the constructor has made
        for number, (param, index) in enumerate(self._places):
            values = state.get(param) if index is None else state.get(param, {}).get(str(index))
            if values is not None:
                packed[number] = {**packed.get(number, {}), **values}
        shared = {key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)}
        own = {key: _copied(value) for key, value in self._group.items() if key not in NO_OPTIONS}
        groups = [{**own, "params": list(range(len(self._places)))}]
        self.optimizer.load_state_dict(
            {**copy.deepcopy(dict(extras)), "state": {**shared, **packed}, "param_groups": groups}
        )
        if not is_loaded:
            targets = self.optimizer.param_groups[0]["params"]
            self.optimizer.state.update({targets[number]: values for number, values in packed.items()})

    def extras(self) -> dict[str, Any]:
        """What its ``state_dict()`` has beside state and groups."""
        packed = self.optimizer.state_dict()
        return {key: value for key, value in packed.items() if key not in ("state", "param_groups")}


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of a group that the constructor of `kind` takes by name."""
    takes = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in group.items() if key in takes and key not in ("self", *NO_OPTIONS)}


class Constructed(NamedTuple):
    """What the constructor of an optimizer makes of a group.

    Attributes:
        options: of the group, as the constructor fills them in.
        state: of each parameter, the numbers and names that the constructor gives it: APOLLO's seeds.
    """

    options: dict[str, Any]
    state: list[dict[str, Any]]


def try_constructor(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[tuple[Mapping[str, Any], list[torch.Tensor]]]
) -> Constructed:
    """What `kind` makes of the last of `groups`, all of which are for it.

    Args:
        kind: an optimizer's class.
        options: for its constructor.
        groups: each with stand-ins of what is to be stepped, see `stand_in`.

    Raises:
        ConfigError: the constructor raises, splits a group, or reads values of parameters.
    """
    given = [{key: _copied(value) for key, value in group.items() if key not in NO_OPTIONS} for group, _ in groups]
    params = [[nn.Parameter(each) for each in stand_ins] for _, stand_ins in groups]
    try:
        with _ReadsNoValues(kind, [param for own in params for param in own]):
            made: Any = kind([{**each, "params": own} for each, own in zip(given, params, strict=True)], **options)
    except StreamShardError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made for a group of parameters with the options "
            f"{[*given[-1], *options]}: {type(error).__name__}: {error}"
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
    return Constructed({key: value for key, value in made.param_groups[-1].items() if key not in NO_OPTIONS}, state)


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
        if not (func.is_view or name.endswith("_like") or name.startswith("new_") or name == "detach"):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._addresses:
                    raise ConfigError(
                        f"the constructor of {self._kind.__module__}.{self._kind.__qualname__} reads the values of "
                        f"parameters ({name}), and no rank has all of them: WholeParameterOptimizer runs optimizers "
                        "that look at parameters in step() only"
                    )
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    """Of its own, so that a step that changes it in place changes no other optimizer's."""
    if isinstance(value, _PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _is_mutable(value: Any) -> bool:
    return not isinstance(value, (*_PLAIN, torch.Tensor))

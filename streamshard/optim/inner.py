"""One ordinary optimizer inside a `WholeParameterOptimizer`: it steps some parameters of a group, full or in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.errors import ConfigError
from streamshard.optim.rounds import stand_in

__all__ = ["GroupClass", "InnerOptimizer", "constructor_options", "options_of", "try_constructor"]

_PLAIN = (int, float, str, bool, tuple, type(None))


class GroupClass(NamedTuple):
    """How to make the optimizer of a group.

    Attributes:
        kind: the optimizer's class.
        options: arguments of the constructor.
        initial: by parameter, state that the constructor makes when it gets all parameters, such as APOLLO's seeds.
            Numbers and names only.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    initial: Mapping[nn.Parameter, Mapping[str, Any]]


class InnerOptimizer:
    """An ordinary optimizer of some parameters of one of the user's groups.

    Args:
        made: how to make it.
        number: the group's number.
        group: the user's group.
        params: the user's parameters.
        targets: one for each of `params`: what is stepped instead, full parameters; None: `params` themselves.

    Attributes:
        optimizer: the ordinary optimizer.
        number: the group's number.
    """

    def __init__(
        self,
        made: GroupClass,
        number: int,
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        targets: Sequence[nn.Parameter | None] | None = None,
    ) -> None:
        self.number = number
        self._group = group
        self._targets: dict[nn.Parameter, Any] = dict(zip(params, targets or params, strict=True))
        groups = [{**options_of(group), "params": list(self._targets.values())}]
        self.optimizer: Optimizer = made.kind(groups, **made.options)
        for param, target in self._targets.items():
            if values := made.initial.get(param):
                self.optimizer.state[target].update(values)

    def take_options(self) -> None:
        """Copy the options from the user's group."""
        self.optimizer.param_groups[0].update(options_of(self._group))

    def give_options(self) -> None:
        """Copy the options to the user's group, whose tensors stay the same objects."""
        for key, value in options_of(self.optimizer.param_groups[0]).items():
            theirs = self._group.get(key)
            if isinstance(theirs, torch.Tensor) and isinstance(value, torch.Tensor) and theirs.shape == value.shape:
                theirs.copy_(value)
            else:
                self._group[key] = value

    def link(self, state: dict[Any, Any]) -> None:
        """Put this optimizer's state into `state`, keyed by the user's parameters: the same objects."""
        own = self.optimizer.state
        state.update({param: own[target] for param, target in self._targets.items() if target in own})
        state.update({key: value for key, value in own.items() if not isinstance(key, torch.Tensor)})

    def load(self, state: Mapping[Any, Any], *, is_loaded: bool) -> None:
        """Take this optimizer's part of `state`.

        Args:
            state: keyed by the user's parameters.
            is_loaded: `state` comes from a state dict and may have other dtypes and devices. Otherwise it comes from
                an optimizer of the same class, and stays as it is.
        """
        own = self.optimizer.state
        own.update({key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)})
        for param, target in self._targets.items():
            if param in state:
                own[target] = {**own.get(target, {}), **state[param]}
        if is_loaded:  # only the class knows the dtypes of its state
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def refuse_extras(self) -> None:
        """Raise if the optimizer's state dict has entries beside state and groups: they would not be saved."""
        if extras := [key for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has {extras} in its state_dict() beside 'state' and 'param_groups'. "
                "WholeParameterOptimizer trains with it and cannot save it: save the weights alone"
            )


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options in `group` that are arguments of the constructor of `kind`."""
    names = inspect.signature(kind).parameters
    return {key: value for key, value in options_of(group).items() if key in names}


def try_constructor(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], GroupClass]:
    """Construct a `kind` for `groups`. Returns the options of the last group, defaults filled in, and its class.

    Raises:
        ConfigError: the constructor raises, or splits a group.
    """
    given = [{**options_of(group), "params": [nn.Parameter(stand_in(p)) for p in group["params"]]} for group in groups]
    try:
        made: Any = kind(given, **options)
    except Exception as error:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made for a group of parameters with the options "
            f"{[*options_of(groups[-1]), *options]}: {type(error).__name__}: {error}"
        ) from error
    if len(made.param_groups) != len(groups):
        raise ConfigError(
            f"{kind.__name__} makes {len(made.param_groups)} groups of {len(groups)}: wanted an optimizer that keeps "
            "groups as they are given"
        )
    last = made.param_groups[-1]
    initial = {
        param: {key: value for key, value in made.state.get(target, {}).items() if isinstance(value, _PLAIN)}
        for param, target in zip(groups[-1]["params"], last["params"], strict=True)
    }
    return options_of(last), GroupClass(kind, options, initial)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a group's options, so that an in-place change by one optimizer's step does not reach another's."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

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

__all__ = ["NO_OPTIONS", "Constructed", "InnerOptimizer", "constructor_options", "try_constructor"]

NO_OPTIONS = ("params", "param_names")
_PLAIN = (int, float, str, bool, tuple, type(None))


class InnerOptimizer:
    """An ordinary optimizer of some parameters of one of the user's groups.

    Args:
        kind: the optimizer's class.
        options: arguments of its constructor.
        number: the group's number.
        group: the user's group. A step reads options from the group and writes them back.
        params: the user's parameters.
        targets: one for each of `params`: the full parameter that is stepped instead; None: `params` themselves.
        initial: by parameter, the state that the constructor makes when it gets all parameters.

    Attributes:
        optimizer: the ordinary optimizer.
        number: the group's number.
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

    def link(self, state: dict[Any, Any]) -> None:
        """Put this optimizer's state into `state`, keyed by the user's parameters."""
        for param, target in zip(self._params, self._targets, strict=True):
            if target in self.optimizer.state:
                state[param] = self.optimizer.state[target]
        state.update({key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)})

    def load(self, state: Mapping[Any, Any], *, is_loaded: bool) -> None:
        """Take this optimizer's part of `state`.

        Args:
            state: keyed by the user's parameters.
            is_loaded: `state` comes from a state dict and may have other dtypes and devices. Otherwise it comes from
                an optimizer of the same class, and stays as it is.
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
        """Raise if the optimizer's state dict has entries beside state and groups: they would not be saved."""
        if extras := [key for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has {extras} in its state_dict() beside 'state' and 'param_groups'. "
                "WholeParameterOptimizer trains with it and cannot save it: save the weights alone"
            )


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `group` that are arguments of the constructor of `kind`."""
    names = inspect.signature(kind).parameters
    return {key: value for key, value in group.items() if key in names and key not in ("self", *NO_OPTIONS)}


class Constructed(NamedTuple):
    """The result of an optimizer's constructor for a group.

    Attributes:
        options: the group's options, defaults filled in.
        state: by parameter, state that the constructor makes, such as APOLLO's seeds. Numbers and names only.
    """

    options: dict[str, Any]
    state: list[dict[str, Any]]


def try_constructor(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Constructed:
    """Construct a `kind` for `groups`, and return the result for the last group.

    Raises:
        ConfigError: the constructor raises, or splits a group.
    """
    params = [[nn.Parameter(stand_in(param)) for param in group["params"]] for group in groups]
    given = [{**_options(group), "params": own} for group, own in zip(groups, params, strict=True)]
    try:
        made: Any = kind(given, **options)
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the options, so that an in-place change by one optimizer's step does not reach another optimizer."""
    return {key: _copied(value) for key, value in group.items() if key not in NO_OPTIONS}


def _copied(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

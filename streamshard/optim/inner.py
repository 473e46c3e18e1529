"""An optimizer inside a `WholeParameterOptimizer`, which steps some parameters of one of the user's groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.core.optimizer_kinds import is_elementwise_class
from streamshard.errors import ConfigError

PLAIN = (int, float, str, bool, tuple, type(None))


class GroupClass(NamedTuple):
    """How to make the optimizer of one of the user's groups.

    Attributes:
        kind: the optimizer's class.
        options: arguments of the constructor.
        given: options of the group, as the user has passed them to `WholeParameterOptimizer`.
        initial: by parameter, the numbers and strings that the constructor puts into its state, such as APOLLO's seeds.
            They may depend on all parameters of the group.
        stacked: keys of state that plain PyTorch stacks over a group, in the state of its first parameter.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    given: Mapping[str, Any]
    initial: Mapping[nn.Parameter, Mapping[str, Any]]
    stacked: frozenset[str]


class InnerOptimizer:
    """An ordinary optimizer for some parameters of one of the user's groups.

    Each parameter gets a group of its own, unless the class works element by element. Some optimizers stack the state
    of a group in the state of its first parameter. With one parameter in a group, this state belongs to the parameter.

    Args:
        made: how to make the optimizer.
        number: number of the user's group.
        group: the user's group.
        targets: by the user's parameter, the parameter to step in its place: the full one, or the user's own.
        is_together: put all parameters into one group, as plain PyTorch does.
        others: groups before it, which keep their options.

    Attributes:
        optimizer: the ordinary optimizer.
        number: see above.
        had_grads: whether a parameter had a gradient in the last step.
    """

    def __init__(
        self,
        made: GroupClass,
        number: int,
        group: dict[str, Any],
        targets: Mapping[nn.Parameter, nn.Parameter],
        is_together: bool = False,
        others: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.number = number
        self._n_others = len(others)
        self._group = group
        self._targets = targets
        wholes = list(targets.values())
        split = [wholes] if is_together or is_elementwise_class(made.kind) else [[each] for each in wholes]
        groups = [{**options_of(made.given), "params": each} for each in split]
        self.optimizer: Optimizer = made.kind([*others, *groups], **made.options)
        for param, target in targets.items():
            if values := made.initial.get(param):
                self.optimizer.state[target].update(values)
        self.take_options()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of `targets`."""
        return self.optimizer.param_groups[self._n_others :]

    def take_options(self) -> None:
        """Copy the options from the user's group."""
        for group in self.groups:
            group.update(options_of(self._group))
        self._last, self.had_grads = self.groups[0], False

    def step(self) -> None:
        """Step, after `take_options`."""
        for group in self.groups:
            if any(param.grad is not None for param in group["params"]):
                self._last, self.had_grads = group, True  # some optimizers count only steps with gradients
                break
        self.optimizer.step()

    def give_options(self) -> None:
        """Copy the options to the user's group after a step. Tensors in the user's group stay the same objects."""
        for key, value in options_of(self._last).items():
            old = self._group.get(key)
            if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)
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
            is_loaded: `state` comes from a state dict, so the class converts its dtypes and devices. Otherwise it comes
                from an optimizer of the same class.
        """
        own = self.optimizer.state
        # Of no parameter: each inner optimizer has them, and changes its own.
        own.update({key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)})
        for param, target in self._targets.items():
            if param in state:
                own[target] = {**own.get(target, {}), **state[param]}  # what the constructor has put there stays
        if is_loaded:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # the class's own conversion

    def refuse_extras(self) -> None:
        """Raise if the optimizer's state dict has entries besides state and groups: they would not be saved."""
        if extras := [key for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]:
            kind = type(self.optimizer).__name__
            raise ConfigError(f"{kind}.state_dict() has {extras}, which cannot be saved: save the weights alone")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a group's options. A step may change its options in place, and must not change another optimizer's."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

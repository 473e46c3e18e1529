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

__all__ = ["InnerOptimizer", "Made", "constructor_options", "try_constructor"]

_NO_OPTIONS = ("params", "param_names")
_PLAIN = (int, float, str, bool, tuple, type(None))


class InnerOptimizer:
    """An ordinary optimizer of some parameters of one of the user's groups.

    Args:
        kind: its class.
        options: for its constructor.
        number: of the group.
        group: the user's group; its options count, and are written when a step changes them.
        params: the user's parameters.
        targets: what is stepped in their place; the same objects where that happens in place.

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
        targets: Sequence[nn.Parameter | None],
    ) -> None:
        self.number = number
        self._group = group
        self._params = params
        own = {key: _copied(value) for key, value in group.items() if key not in _NO_OPTIONS}
        self.optimizer: Optimizer = kind([{**own, "params": list(targets)}], **options)
        self._given: dict[str, tuple[Any, int]] = {}

    def step(self) -> None:
        """With the user's options."""
        self.take_options()
        self.optimizer.step()
        self.give_options()

    def take_options(self) -> None:
        """From the user's group."""
        own = self.optimizer.param_groups[0]
        for key, value in self._group.items():
            if key not in _NO_OPTIONS:
                own[key] = _copied(value)
                self._given[key] = own[key], _version(own[key])

    def give_options(self) -> None:
        """To the user's group, those that the step has changed. Tensors there stay the same objects."""
        for key, value in self.optimizer.param_groups[0].items():
            if key in _NO_OPTIONS:
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
        """Let `state` have what this optimizer keeps, by the user's parameters."""
        for param, target in zip(self._params, self.optimizer.param_groups[0]["params"], strict=True):
            if target in self.optimizer.state:
                state[param] = self.optimizer.state[target]
        for key, value in self.optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                state[key] = value

    def load(self, state: Mapping[Any, Any], extras: Mapping[str, Any]) -> None:
        """Keep what `state` has for the user's parameters, beside what the constructor has given them."""
        if not state and not extras:
            return
        packed = self.optimizer.state_dict()["state"]
        for place, param in enumerate(self._params):
            if param in state:
                packed[place] = {**packed.get(place, {}), **state[param]}
        shared = {key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)}
        own = {key: _copied(value) for key, value in self._group.items() if key not in _NO_OPTIONS}
        groups = [{**own, "params": list(range(len(self._params)))}]
        self.optimizer.load_state_dict(
            {**copy.deepcopy(dict(extras)), "state": {**shared, **packed}, "param_groups": groups}
        )

    def extras(self) -> dict[str, Any]:
        """What its ``state_dict()`` has beside state and groups."""
        packed = self.optimizer.state_dict()
        return {key: value for key, value in packed.items() if key not in ("state", "param_groups")}


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of a group that the constructor of `kind` takes by name."""
    takes = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in group.items() if key in takes and key not in ("self", *_NO_OPTIONS)}


class Made(NamedTuple):
    """What the constructor of an optimizer makes of a group.

    Attributes:
        options: of the group, as the constructor fills them in.
        state: of each parameter, the numbers and names that the constructor gives it: APOLLO's seeds.
    """

    options: dict[str, Any]
    state: list[dict[str, Any]]


def try_constructor(kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Made:
    """What `kind` makes of the last of `groups`, all of which are for it.

    Raises:
        ConfigError: the constructor raises, splits a group, or reads values of parameters.
    """
    given = [{key: _copied(value) for key, value in group.items() if key not in _NO_OPTIONS} for group in groups]
    params = [[nn.Parameter(stand_in(param)) for param in group["params"]] for group in groups]
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
    return Made({key: value for key, value in made.param_groups[-1].items() if key not in _NO_OPTIONS}, state)


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

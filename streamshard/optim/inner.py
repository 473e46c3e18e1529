"""The optimizers inside a `WholeParameterOptimizer`: one per group for pieces, one per group and round for the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.errors import ConfigError, RankMismatchError
from streamshard.optim.rounds import Rounds, WholeParam
from streamshard.planning.owners import plan_rounds
from streamshard.unit.optimizer_hooks import is_elementwise_class, params_in
from streamshard.unit.sharded_tensor import piece_of

PLAIN = (int, float, str, bool, tuple, type(None))


class GroupClass(NamedTuple):
    """How to make the optimizer of a group.

    Attributes:
        kind: the optimizer's class.
        options: arguments of the constructor.
        given: the group's options, as the user has given them to the constructor.
        initial: by parameter, state that the constructor makes from all parameters together, such as APOLLO's seeds.
            Numbers and strings only.
        stacked: names of the state that plain PyTorch stacks over a group, in the entry of its first parameter.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    given: Mapping[str, Any]
    initial: Mapping[nn.Parameter, Mapping[str, Any]]
    stacked: frozenset[str]


class InnerOptimizer:
    """An ordinary optimizer for some parameters of one of the user's groups.

    Each parameter is in a group of its own, unless the class works element by element. Some optimizers stack the state
    of a group in the state of its first parameter. With one parameter in a group, this state belongs to the parameter.

    Args:
        made: how to make it.
        number: the group's number.
        group: the user's group.
        targets: by the user's parameter, the one that is stepped in its place: the full parameter, or the same.

    Attributes:
        optimizer: the ordinary optimizer.
        number: the group's number.
        had_grads: whether a parameter had a gradient in the last step.
    """

    def __init__(
        self, made: GroupClass, number: int, group: dict[str, Any], targets: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self.number = number
        self._group = group
        self._targets = targets
        wholes = list(targets.values())
        split = [wholes] if is_elementwise_class(made.kind) else [[each] for each in wholes]
        groups = [{**options_of(made.given), "params": each} for each in split]
        self.optimizer: Optimizer = made.kind(groups, **made.options)
        for param, target in self._targets.items():
            if values := made.initial.get(param):
                self.optimizer.state[target].update(values)
        self.take_options()

    def take_options(self) -> None:
        """Copy the options from the user's group."""
        for group in self.optimizer.param_groups:
            group.update(options_of(self._group))
        self._last, self.had_grads = self.optimizer.param_groups[0], False

    def step(self) -> None:
        """Step, after `take_options`."""
        for group in self.optimizer.param_groups:
            if any(param.grad is not None for param in group["params"]):
                self._last, self.had_grads = group, True  # a group without gradients may not count this step
                break
        self.optimizer.step()

    def give_options(self) -> None:
        """Copy the options to the user's group after a step. The group's tensors stay the same objects."""
        for key, value in options_of(self._last).items():
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
            is_loaded: `state` comes from a state dict, so its dtypes and devices may differ. Otherwise it comes from an
                optimizer of the same class, and is not converted.
        """
        own = self.optimizer.state
        own.update({key: copy.deepcopy(value) for key, value in state.items() if not isinstance(key, torch.Tensor)})
        for param, target in self._targets.items():
            if param in state:
                own[target] = {**own.get(target, {}), **state[param]}
        if is_loaded:  # only the class knows the dtypes of its state
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def refuse_extras(self) -> None:
        """Raise if the optimizer's state dict has entries besides state and groups: they would not be saved."""
        if extras := [key for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has {extras} in its state_dict() beside 'state' and 'param_groups'. "
                "WholeParameterOptimizer trains with it and cannot save it: save the weights alone"
            )


class InnerOptimizers:
    """The optimizers inside one WholeParameterOptimizer. Replaced when parameters or groups change.

    Args:
        groups: the user's groups. Each step reads options from them, and writes options back.
        classes: by group, how to make its optimizer.
        wholes: sharded parameters that their owners step as full tensors.
        round_numel: the largest number of elements that a rank owns in a round, unless one parameter is larger.

    Attributes:
        owners: by the id of a parameter, the rank that steps the full tensor.
        in_place: the optimizers that step pieces, or plain parameters, in place.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        classes: list[GroupClass],
        wholes: list[WholeParam],
        round_numel: int,
    ) -> None:
        params = params_in(groups)
        self._user_groups = groups  # may grow
        self._groups = list(zip(groups, classes, strict=True))
        self._trained = [(id(param), param.requires_grad) for param in params]
        self._sharded = {id(param) for param in params if piece_of(param) is not None}
        self._wholes = wholes
        self._error: Exception | None = None
        self._had_grads: list[bool] = []  # in the last step
        self._is_checked = True
        self.owners = {id(each.param): each.owner for each in wholes}
        if not self._sharded:  # one rank, or the model is not sharded yet
            others = [group["params"] for group, made in self._groups if not is_elementwise_class(made.kind)]
            self.owners.update({id(param): 0 for params in others for param in params})
        elsewhere = {each.param for each in wholes}
        self.in_place = [
            InnerOptimizer(made, number, group, own)
            for number, (group, made) in enumerate(self._groups)
            if (own := {param: param for param in group["params"] if param not in elsewhere})
        ]
        self._rounds: Rounds | None = None
        self._by_round: list[list[InnerOptimizer]] = []
        trained = [each for each in wholes if each.param.requires_grad]
        if trained:
            costs, owners = [each.cost for each in trained], [each.owner for each in trained]
            numels = [each.piece.place.numel for each in trained]
            rounds = [[trained[index] for index in each] for each in plan_rounds(costs, numels, owners, round_numel)]
            self._ranks = trained[0].piece.ranks
            self._rounds = Rounds(rounds, self._ranks)
            self._by_round = [self._owned(each) for each in rounds]

    def _owned(self, own_round: list[WholeParam]) -> list[InnerOptimizer]:
        """The optimizers for the parameters that this rank owns in a round, one for each group."""
        inners = []
        for number, (group, made) in enumerate(self._groups):
            members = set(group["params"])
            mine = {each.param: each.whole for each in own_round if each.param in members and each.whole is not None}
            if mine:
                inners.append(InnerOptimizer(made, number, group, mine))
        return inners

    def is_current(self) -> bool:
        """Whether groups still have the same parameters with the same ``requires_grad``, and none was sharded since."""
        params = params_in(self._user_groups)
        if self._trained != [(id(param), param.requires_grad) for param in params]:
            return False
        return all(id(param) in self._sharded or piece_of(param) is None for param in params)

    @property
    def all(self) -> list[InnerOptimizer]:
        """All optimizers inside."""
        return [*self.in_place, *(inner for inners in self._by_round for inner in inners)]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """See `WholeParameterOptimizer.step`."""
        self.check_last_step()
        inners = self.all
        for inner in inners:
            inner.take_options()
        if self._rounds is None:
            self._step(self.in_place)
        else:
            self._is_checked = False
            self._had_grads = [each.param.grad is not None for each in self._wholes]
            self._rounds.run(lambda: self._step(self.in_place), lambda number: self._step(self._by_round[number]))
        for inner in {inner.number: inner for inner in sorted(inners, key=lambda inner: inner.had_grads)}.values():
            inner.give_options()
        if self._rounds is not None and not self._ranks.streams.has_streams:
            self.check_last_step()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _step(self, inners: list[InnerOptimizer]) -> None:
        try:
            for inner in inners if self._error is None else ():
                inner.step()
        except Exception as error:  # raised when the exchanges are over: the other ranks take part in them
            self._error = error

    def check_last_step(self) -> None:
        """Raise on all ranks if they had gradients for different parameters in the last step. Collective only then."""
        if self._rounds is None or self._is_checked:
            return
        self._is_checked = True
        if self._rounds.grads_differ():
            by_rank = self._ranks.gather_objects(self._had_grads, with_replicas=False)
            for index, each in enumerate(self._wholes):
                ranks_with = [rank for rank, theirs in enumerate(by_rank) if theirs[index]]
                if 0 < len(ranks_with) < len(by_rank):
                    # On a device the host does not read other ranks' numbers before it steps.
                    outcome = "load a checkpoint" if self._ranks.streams.has_streams else "nothing was stepped"
                    raise RankMismatchError(
                        f"parameter {each.piece.name!r} had a gradient on ranks {ranks_with} only: {outcome}. Set "
                        "grad = None on all ranks or on none"
                    )

    def options_of_wholes(self) -> dict[int, dict[str, Any]]:
        """By group number, the options of the groups in which this rank owns parameters."""
        numbers = {inner.number for inners in self._by_round for inner in inners}
        return {number: options_of(self._groups[number][0]) for number in sorted(numbers)}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a group's options, so that an in-place change by one optimizer's step does not reach another's."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

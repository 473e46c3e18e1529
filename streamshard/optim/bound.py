"""The optimizers inside a `WholeParameterOptimizer`: one per group for pieces, one per group and round for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from streamshard.errors import RankMismatchError
from streamshard.optim.inner import NO_OPTIONS, InnerOptimizer
from streamshard.optim.rounds import Rounds, WholeParam
from streamshard.plan.owners import plan_rounds
from streamshard.unit.optimizer_hooks import is_elementwise_class
from streamshard.unit.sharded_tensor import piece_of

__all__ = ["GroupClass", "InnerOptimizers", "params_in"]


class GroupClass(NamedTuple):
    """How to make the optimizer of a group.

    Attributes:
        kind: the optimizer's class.
        options: arguments of the constructor.
        initial: by parameter, the state that the constructor makes when it gets all parameters.
    """

    kind: type[Optimizer]
    options: dict[str, Any]
    initial: dict[nn.Parameter, dict[str, Any]]


class InnerOptimizers:
    """The optimizers inside one WholeParameterOptimizer. Made anew when parameters or groups change.

    Args:
        groups: the user's; options are read from them before each step, and written to them after it.
        classes: by group, how to make its optimizer.
        wholes: sharded parameters of which the owner steps the full tensor.
        round_numel: elements that a rank owns in a round, at most (but for a larger parameter).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        classes: list[GroupClass],
        wholes: list[WholeParam],
        round_numel: int,
    ) -> None:
        self._groups = groups
        params = params_in(groups)
        self._trained = [(id(param), param.requires_grad) for param in params]
        self._sharded = {id(param) for param in params if piece_of(param) is not None}
        self._wholes = wholes
        self._error: Exception | None = None
        self._had_grads: list[bool] = []  # in the last step
        self._is_checked = True
        self.owners = {id(each.param): each.owner for each in wholes}
        if not self._sharded:  # one rank, or the model is not sharded yet
            for group, made in zip(groups, classes, strict=True):
                if not is_elementwise_class(made.kind):
                    self.owners.update({id(param): 0 for param in group["params"]})
        self._by_group = list(zip(groups, classes, strict=True))
        elsewhere = {each.param for each in wholes}
        self._in_place = [
            InnerOptimizer(made.kind, made.options, number, group, own, None, made.initial)
            for number, (group, made) in enumerate(self._by_group)
            if (own := [param for param in group["params"] if param not in elsewhere])
        ]
        self._rounds: Rounds | None = None
        self._by_round: list[list[InnerOptimizer]] = []
        trained = [each for each in wholes if each.param.requires_grad]
        if trained:
            self._plan_rounds(trained, round_numel)

    def _plan_rounds(self, trained: list[WholeParam], round_numel: int) -> None:
        costs, owners = [each.cost for each in trained], [each.owner for each in trained]
        numels = [each.piece.place.numel for each in trained]
        rounds = [[trained[index] for index in each] for each in plan_rounds(costs, numels, owners, round_numel)]
        self._ranks = trained[0].piece.ranks
        self._rounds = Rounds(rounds, self._ranks, trained[0].piece.ledger_of())
        for own_round in rounds:
            inners = []
            for number, (group, made) in enumerate(self._by_group):
                members = set(group["params"])
                mine = [each for each in own_round if each.whole is not None and each.param in members]
                if mine:
                    params, wholes = [each.param for each in mine], [each.whole for each in mine]
                    inners.append(InnerOptimizer(made.kind, made.options, number, group, params, wholes, made.initial))
            self._by_round.append(inners)

    def is_current(self) -> bool:
        """Whether groups have the same parameters with the same ``requires_grad``, and none was sharded since."""
        params = params_in(self._groups)
        if self._trained != [(id(param), param.requires_grad) for param in params]:
            return False
        return all(id(param) in self._sharded or piece_of(param) is None for param in params)

    @property
    def _inners(self) -> list[InnerOptimizer]:
        return [*self._in_place, *(inner for inners in self._by_round for inner in inners)]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """See `WholeParameterOptimizer.step`."""
        if self._rounds is None:
            for inner in self._in_place:
                inner.step()
            return
        self.check_last_step()
        for inners in self._by_round:
            for inner in inners:
                inner.take_options()
        self._is_checked = False
        self._had_grads = [each.param.grad is not None for each in self._wholes]
        self._rounds.run(self._step_in_place, self._step_round)
        stepped: set[int] = set()
        for inners in self._by_round:
            for inner in inners:
                if inner.number not in stepped:
                    inner.give_options()
                    stepped.add(inner.number)
        if not self._ranks.streams.has_streams:
            self.check_last_step()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _step_in_place(self) -> None:
        try:
            for inner in self._in_place:
                inner.step()
        except Exception as error:  # raised when the exchanges are over: the other ranks take part in them
            self._error = error

    def _step_round(self, number: int) -> None:
        try:
            if self._error is None:
                for inner in self._by_round[number]:
                    inner.optimizer.step()
        except Exception as error:  # raised when the exchanges are over: the other ranks take part in them
            self._error = error

    def check_last_step(self) -> None:
        """Raise on all ranks if they had other gradients in the last step. Collective only then."""
        if self._rounds is None or self._is_checked:
            return
        self._is_checked = True
        if self._rounds.grads_differ():
            # On a device the host does not read other ranks' numbers before it steps.
            outcome = "" if self._ranks.streams.has_streams else ": no whole parameter was stepped"
            by_rank = self._ranks.gather_objects(self._had_grads, with_replicas=False)
            for index, each in enumerate(self._wholes):
                ranks_with = [rank for rank, theirs in enumerate(by_rank) if theirs[index]]
                if 0 < len(ranks_with) < len(by_rank):
                    raise RankMismatchError(
                        f"parameter {each.piece.name!r} has a gradient on ranks {ranks_with} only{outcome}. Set "
                        "grad = None on all ranks or on none"
                    )

    # -- state ------------------------------------------------------------------------------------------------------

    def link(self, state: dict[Any, Any]) -> None:
        """Put the state of the optimizers inside into `state`: the same objects, keyed by the user's parameters."""
        for inner in self._inners:
            inner.link(state)

    def load(self, state: Mapping[Any, Any], *, is_loaded: bool) -> None:
        """Give each optimizer inside its part of `state`, see `InnerOptimizer.load`."""
        for inner in self._inners:
            inner.load(state, is_loaded=is_loaded)

    def refuse_extras(self) -> None:
        """See `InnerOptimizer.refuse_extras`."""
        for inner in self._inners:
            inner.refuse_extras()

    def in_place(self) -> list[Optimizer]:
        """See `WholeParameterOptimizer.in_place`."""
        return [inner.optimizer for inner in self._in_place]

    def options_of_wholes(self) -> dict[int, dict[str, Any]]:
        """By number, the options of the groups of which this rank owns parameters."""
        numbers = {inner.number for inners in self._by_round for inner in inners}
        return {
            number: {key: value for key, value in self._groups[number].items() if key not in NO_OPTIONS}
            for number in sorted(numbers)
        }


def params_in(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [param for group in groups for param in group["params"]]

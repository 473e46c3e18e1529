"""What programs are made of: forwards and backwards; gradients cleared, clipped and stepped with, weights edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.models import vector_batch
from tests.programs.model import Plan, Trouble
from tests.programs.players import Operation, Player, Shown, State
from tests.reference import full_grads, full_weights

if TYPE_CHECKING:
    from tests.programs.generate import Program


@dataclass(frozen=True)
class Forward(Operation):
    """A forward of the model.

    Attributes:
        plan: what happens inside.
        has_graph: not an evaluation.
        is_kept: its losses wait for a `Backward`; else its graph is dropped at once.
        raises_in: a layer that raises.
    """

    plan: Plan = Plan()
    has_graph: bool = True
    is_kept: bool = True
    raises_in: int | None = None

    def is_legal(self, state: State) -> bool:
        return not self.plan.left_out or self._is_in_order(state)

    def _is_in_order(self, state: State) -> bool:
        """Whether ranks may leave out layers: in a route that the first pass had, where nothing else departs."""
        plan, order = self.plan, state.order
        if plan.recomputes.startswith("all "):  # layers would run in another order in backward
            return False
        return plan.route is None and self.raises_in is None and (order is None or order.route is None)

    def perform(self, player: Player, number: int) -> Shown:
        hook = None
        if self.raises_in is not None:
            hook = player.model.layer(self.raises_in).linear.register_forward_pre_hook(_raise_in_forward)
        try:
            losses = player.forward(number, self.plan, has_graph=self.has_graph)
        finally:
            if hook is not None:
                hook.remove()
        first, seen = [loss for loss, _ in losses], [loss for _, loss in losses]
        shown = _named(player, "loss", first) | _named(player, "second loss", seen)
        both: list[Any] = [first, seen]
        player.kept.extend(both[: self._keeps(player.program)])
        return shown

    def _keeps(self, program: Program) -> int:
        """How many losses."""
        if not self.is_kept or not self.has_graph:
            return 0
        visits = min(len(self.plan.places(program.depth, rank)) for rank in range(program.ranks))
        return 1 if self.plan.seen is None or self.plan.seen >= visits else 2

    def after(self, state: State, outcome: str) -> None:
        if outcome != "done":
            return
        if self.has_graph:
            state.is_unreached = True
            state.order = state.order or self.plan
        state.born.extend([state.edits] * self._keeps(state.program))


@dataclass(frozen=True)
class Direct(Operation):
    """A layer that is called by itself; its loss is kept."""

    layer: int = 0

    def perform(self, player: Player, number: int) -> Shown:
        layer = player.model.layer(self.layer)
        losses = [layer(vector_batch(number, rank)).float().square().mean() for rank in player.ranks]
        player.kept.append(losses)
        return _named(player, "loss", losses)

    def after(self, state: State, outcome: str) -> None:
        state.order = state.order or Plan()
        state.born.append(state.edits)
        state.is_unreached = True


@dataclass(frozen=True)
class Backward(Operation):
    """Backward of one kept loss, or of a sum of several.

    Attributes:
        picks: which, counted round.
        retains: ``retain_graph``; they can be differentiated again.
    """

    picks: tuple[int, ...] = (0,)
    retains: bool = False

    def is_legal(self, state: State) -> bool:
        picked = self.picked(len(state.born)) if state.born else []
        return bool(picked) and all(state.born[pick] == state.edits for pick in picked)  # of the weights as they are

    def picked(self, kept: int) -> list[int]:
        """Numbers of kept losses."""
        return list(dict.fromkeys(pick % kept for pick in self.picks))

    def perform(self, player: Player, number: int) -> Shown:
        player.final.clear()
        self._differentiate(player)
        if player.program.grad_slots == "all":  # hooks are called when gradients are reduced
            return {}
        return {f"end of {name}": torch.ones(()) for name in sorted(player.final)}

    def _differentiate(self, player: Player) -> None:
        """Backward of the mean of losses over ranks, in parts; losses are let go of, unless they are retained."""
        picked = self.picked(len(player.kept))
        errors: list[Exception] = []
        try:
            for place in range(len(player.ranks)):
                total: Any = sum(player.kept[pick][place] for pick in picked) / len(player.ranks)
                try:
                    if total.requires_grad:  # else everything was frozen
                        total.backward(retain_graph=self.retains)
                except (Trouble, RuntimeError) as error:
                    errors.append(error.with_traceback(None) if isinstance(error, Trouble) else error)
        finally:
            del total
            if errors or not self.retains:
                self._drop(player)
        if errors:
            raise errors[0]

    def _drop(self, player: Player) -> None:
        picked = self.picked(len(player.kept))
        player.kept = [losses for pick, losses in enumerate(player.kept) if pick not in picked]

    def after(self, state: State, outcome: str) -> None:
        picked = self.picked(len(state.born))
        if outcome != "done" or not self.retains:
            state.born = [born for pick, born in enumerate(state.born) if pick not in picked]
        state.is_unreached = False
        state.is_torn |= outcome != "done"
        state.is_held = state.holds and (state.is_quiet or (state.is_held and outcome != "done"))


@dataclass(frozen=True)
class NoSync(Operation):
    """Begin a `no_sync` stretch, or end the one that it is in."""

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_quiet:
            player.quiet.close()
        elif player.is_sharded:
            player.quiet.enter_context(player.model.no_sync())
        player.is_quiet = not player.is_quiet
        return {}

    def after(self, state: State, outcome: str) -> None:
        state.is_quiet = not state.is_quiet


@dataclass(frozen=True)
class Freeze(Operation):
    """Freeze or unfreeze a layer (-1: the head, None: all), or one parameter of it."""

    part: int | None = 0
    name: str | None = None
    trains: bool = False

    def perform(self, player: Player, number: int) -> Shown:
        for name, param in player.model.part(self.part).named_parameters():
            if self.name is None or name.endswith(self.name):
                param.requires_grad_(self.trains)
        return {}


@dataclass(frozen=True)
class ZeroGrad(Operation):
    """Clear gradients of a layer (-1: the head, None: all), by its method or by the optimizer's."""

    part: int | None = None
    to_none: bool = True
    by_optimizer: bool = False

    def is_legal(self, state: State) -> bool:
        return self.to_none or not state.is_held

    def perform(self, player: Player, number: int) -> Shown:
        owner: Any = player.optimizer if self.by_optimizer and self.part is None else player.model.part(self.part)
        owner.zero_grad(set_to_none=self.to_none)
        return {}

    def after(self, state: State, outcome: str) -> None:
        if self.part is None and self.to_none:
            state.is_torn = state.is_held = False


@dataclass(frozen=True)
class Step(Operation):
    """The optimizer's."""

    edits_weights = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see and not state.is_unreached

    def perform(self, player: Player, number: int) -> Shown:
        player.optimizer.step()
        return {}


@dataclass(frozen=True)
class Clip(Operation):
    """Clip gradients, by the model's method or by torch's."""

    by_model: bool = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_sharded and self.by_model:
            return {"norm": player.model.clip_grad_norm_(0.1)}
        return {"norm": torch.nn.utils.clip_grad_norm_(player.model.parameters(), 0.1)}


@dataclass(frozen=True)
class Edit(Operation):
    """Scale weights of a layer (-1: the head, None: all) in place."""

    part: int | None = None
    factor: float = 0.9

    edits_weights = True

    def perform(self, player: Player, number: int) -> Shown:
        with torch.no_grad():
            for param in player.model.part(self.part).parameters():
                param.mul_(self.factor)
        return {}


@dataclass(frozen=True)
class Check(Operation):
    """Compare weights, and gradients if there are any to see."""

    has_gradients: bool = True

    def is_legal(self, state: State) -> bool:
        return not self.has_gradients or state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        found: Shown = {**full_weights(player.model)}
        if self.has_gradients:
            found.update({f"gradient of {name}": grad for name, grad in full_grads(player.model).items()})
        return found


def _named(player: Player, what: str, losses: Sequence[Tensor | None]) -> Shown:
    pairs = zip(player.ranks, losses, strict=True)
    return {f"{what} of rank {rank}": loss.detach() for rank, loss in pairs if loss is not None}


def _raise_in_forward(module: nn.Module, args: Any) -> None:
    raise Trouble("forward")

"""Operations between passes: gradients cleared, clipped and stepped with, weights frozen and edited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.programs.players import Operation, Player, Shown, State
from tests.reference import full_grads, full_weights


@dataclass(frozen=True, repr=False)
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


@dataclass(frozen=True, repr=False)
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


@dataclass(frozen=True, repr=False)
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


@dataclass(frozen=True, repr=False)
class Step(Operation):
    """The optimizer's."""

    edits_weights = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see and not state.is_unreached

    def perform(self, player: Player, number: int) -> Shown:
        player.optimizer.step()
        return {}


@dataclass(frozen=True, repr=False)
class Clip(Operation):
    """Clip gradients, by the model's method or by torch's."""

    by_model: bool = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_sharded and self.by_model:
            return {"norm": player.model.clip_grad_norm_(0.1)}
        return {"norm": torch.nn.utils.clip_grad_norm_(player.model.parameters(), 0.1)}


@dataclass(frozen=True, repr=False)
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


@dataclass(frozen=True, repr=False)
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

"""Operations between passes: gradients cleared, clipped and stepped with, weights frozen, edited, saved and loaded."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamshard import (
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_optimizer_state_dict,
    load_safetensors,
)
from streamshard.errors import StreamShardError
from tests.models import vector_batch
from tests.programs.model import Plan
from tests.programs.players import Operation, Player, Shown, State
from tests.reference import full_grads

__all__ = [
    "Check",
    "Clip",
    "Edit",
    "Export",
    "Forbidden",
    "Freeze",
    "HookLayer",
    "Import",
    "Load",
    "LoadOptimizer",
    "NoSync",
    "Save",
    "SaveOptimizer",
    "Step",
    "StepWithClosure",
    "Summon",
    "ZeroGrad",
]


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
    """Freeze or thaw a layer (-1: the head, None: all), or one parameter of it."""

    part: int | None = 0
    name: str | None = None
    trains: bool = False

    def perform(self, player: Player, number: int) -> Shown:
        for name, param in player.model.part(self.part).named_parameters():
            if self.name is None or name.endswith(self.name):
                param.requires_grad_(self.trains)
        return {}


@dataclass(frozen=True, repr=False)
class HookLayer(Operation):
    """A hook of the user's on a layer (-1: the head), or off again: "pre", "forward" or "backward"; it scales."""

    layer: int = 0
    kind: str = "forward"

    def perform(self, player: Player, number: int) -> Shown:
        module = player.model.part(self.layer)
        place = self.layer if self.layer < 0 else self.layer % player.program.depth
        handle = player.handles.pop((place, self.kind), None)
        if handle is not None:
            handle.remove()
        elif self.kind == "pre":
            player.handles[place, self.kind] = module.register_forward_pre_hook(lambda _, args: (args[0] * 0.9,))
        elif self.kind == "forward":
            player.handles[place, self.kind] = module.register_forward_hook(lambda _, args, out: out * 1.1)
        else:
            player.handles[place, self.kind] = module.register_full_backward_hook(_scale_all)
        return {}


def _scale_all(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.8 for grad in of_inputs)


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
    refusal_keeps = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def may_be_refused(self, state: State) -> bool:
        return state.is_unreached  # if nothing has a gradient

    def perform(self, player: Player, number: int) -> Shown:
        player.optimizer.step()
        return {}


@dataclass(frozen=True, repr=False)
class StepWithClosure(Operation):
    """The optimizer's, which is given a function that clears gradients and runs forward and backward."""

    plan: Plan = Plan()

    edits_weights = True

    def is_legal(self, state: State) -> bool:
        return not (state.holds and state.is_quiet)

    def perform(self, player: Player, number: int) -> Shown:
        shown: Shown = {}

        def closure() -> Tensor:
            player.optimizer.zero_grad()
            losses = [loss for loss, _ in player.forward(number, self.plan)]
            for place, rank in player.each_rank():
                if losses[place].requires_grad:
                    (losses[place] / len(losses)).backward()  # type: ignore[no-untyped-call]
                shown[f"loss of rank {rank}"] = losses[place].detach()
            return losses[0]

        player.optimizer.step(closure)  # type: ignore[arg-type]  # wants a function that returns a float
        return shown

    def after(self, state: State, outcome: str) -> None:
        super().after(state, outcome)
        state.order = state.order or self.plan
        state.is_torn = state.is_held = state.is_unreached = False


@dataclass(frozen=True, repr=False)
class Clip(Operation):
    """Clip gradients, by the model's method or one of torch's functions: "model", "torch", "inf" or "value"."""

    kind: str = "model"

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        if self.kind == "value":
            if any(param.grad is not None for param in player.model.parameters()):  # it wants one
                torch.nn.utils.clip_grad_value_(player.model.parameters(), 0.01)
            return {}
        order = float("inf") if self.kind == "inf" else 2.0
        if player.is_sharded and self.kind == "model":
            return {"norm": player.model.clip_grad_norm_(0.1, order)}
        return {"norm": torch.nn.utils.clip_grad_norm_(player.model.parameters(), 0.1, order)}


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
class Save(Operation):
    """Keep a copy of all weights."""

    def perform(self, player: Player, number: int) -> Shown:
        player.saved = player.copy_weights()
        return dict(player.saved.params)


@dataclass(frozen=True, repr=False)
class Load(Operation):
    """Load the weights that were saved last."""

    edits_weights = True

    def perform(self, player: Player, number: int) -> Shown:
        if player.saved is not None:
            player.load_weights(player.saved)
        return {}


@dataclass(frozen=True, repr=False)
class Export(Operation):
    """Write all weights to safetensors files."""

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_sharded:
            player.exported = player.directory()
            export_safetensors(player.model, player.exported)
        else:
            player.exported = player.copy_weights()
        return {}


@dataclass(frozen=True, repr=False)
class Import(Operation):
    """Load the files that were written last: rank 0's buffers are in them."""

    edits_weights = True

    def perform(self, player: Player, number: int) -> Shown:
        if player.exported is None:
            return {}
        if player.is_sharded:
            load_safetensors(player.model, player.exported)
        else:
            first = player.exported.buffers[0]
            player.load_weights(type(player.exported)(player.exported.params, [first] * len(player.ranks)))
        return {}


@dataclass(frozen=True, repr=False)
class SaveOptimizer(Operation):
    """Keep the optimizer's whole state."""

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_sharded:
            player.saved_optimizer = full_optimizer_state_dict(player.model, player.optimizer, rank0_only=False)
        else:
            player.saved_optimizer = copy.deepcopy(player.optimizer.state_dict())
        states = player.saved_optimizer["state"]
        return {
            f"{number}.{name}": value
            for number in sorted(states)
            for name, value in states[number].items()
            if isinstance(value, Tensor)
        }


@dataclass(frozen=True, repr=False)
class LoadOptimizer(Operation):
    """Load the optimizer's state that was saved last."""

    def perform(self, player: Player, number: int) -> Shown:
        if not player.saved_optimizer:
            return {}
        if player.is_sharded:
            load_optimizer_state_dict(player.model, player.optimizer, player.saved_optimizer)
        else:
            player.optimizer.load_state_dict(player.saved_optimizer)
        return {}


@dataclass(frozen=True, repr=False)
class Summon(Operation):
    """Have whole weights, change them if `factor` is not 1, look at gradients if there are any to see."""

    factor: float = 1.0
    with_grads: bool = False

    edits_weights = True

    def is_legal(self, state: State) -> bool:
        return not self.with_grads or state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        place: Any = contextlib.nullcontext()
        if player.is_sharded:
            place = player.model.summon_full_params(writeback=self.factor != 1.0, with_grads=self.with_grads)
        with place, torch.no_grad():
            for param in player.model.parameters():
                if self.factor != 1.0:
                    param.mul_(self.factor)
            return {name: param.detach().clone() for name, param in player.model.named_parameters()}


@dataclass(frozen=True, repr=False)
class Check(Operation):
    """Compare weights, and gradients if there are any to see."""

    has_gradients: bool = True

    def is_legal(self, state: State) -> bool:
        return not self.has_gradients or state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> Shown:
        weights = player.copy_weights()
        own = weights.buffers[player.ranks.index(player.me)]  # plain torch has those of others too
        found: Shown = {**weights.params, **own}
        if self.has_gradients:
            found.update({f"gradient of {name}": grad for name, grad in full_grads(player.model).items()})
        return found


@dataclass(frozen=True, repr=False)
class Forbidden(Operation):
    """Something that sharding forbids: StreamShard says so, and nothing has changed."""

    what: str = "copy"

    def is_legal(self, state: State) -> bool:
        # Of hooks the next forward complains that takes over weights, after it has sent buffers.
        return self.what != "hook on a weight" or not (state.is_quiet or state.program.has_norm)

    def perform(self, player: Player, number: int) -> Shown:
        if player.is_sharded:
            try:
                _FORBIDDEN[self.what](player.model, player)
            except StreamShardError:
                return {}
            except RuntimeError as error:  # load_state_dict() puts everybody's complaints into one of torch's
                assert "StreamShard: " in str(error), error
                return {}
            raise AssertionError(f"{self.what} was not refused")
        return {}


def _forward_while_whole(model: Any, player: Player) -> None:
    with model.summon_full_params():
        model(vector_batch(0, 0), 0)


def _step_while_whole(model: Any, player: Player) -> None:
    with model.summon_full_params():
        player.optimizer.step()


def _hook_on_a_weight(model: Any, player: Player) -> None:
    trains = model.head.weight.requires_grad
    handle = model.head.weight.requires_grad_(True).register_hook(lambda grad: grad)
    try:
        model(vector_batch(0, 0), 0)
    finally:
        handle.remove()
        model.head.weight.requires_grad_(trains)


def _layer_without_call(model: Any, player: Player) -> None:
    model.layer(0).forward(vector_batch(0, 0))


def _wrong_state(model: Any, player: Player) -> None:
    model.load_state_dict({name: value[:1] for name, value in player.copy_weights().params.items()})


_FORBIDDEN: dict[str, Callable[[Any, Player], object]] = {
    "copy": lambda model, player: copy.deepcopy(model),
    "half": lambda model, player: model.half(),
    "hook on a weight": _hook_on_a_weight,
    "pickled state": lambda model, player: torch.save(model.state_dict(), io.BytesIO()),
    "sharded again": lambda model, player: StreamShard(model),
    "forward while whole": _forward_while_whole,
    "step while whole": _step_while_whole,
    "layer without call": _layer_without_call,
    "wrong state": _wrong_state,
}

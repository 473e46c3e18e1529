"""The model that programs train, and what one forward of it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import DIM, Layer


class Trouble(Exception):
    """What a user's code raises in the middle of something."""


@dataclass(frozen=True)
class Plan:
    """What happens inside one forward. Layers are named by number, counted round; visits by place in the route.

    Attributes:
        route: layers that run; None: all in turn.
        left_out: by rank, a layer that this rank does not run; -1: none.
        recomputes: checkpointing, "once more" or "reentrant", of each layer, or behind "all " of all of them together.
        seen: a visit of whose output there is a second loss.
        hooked: a visit whose output has a hook that scales its gradient.
        breaks_at: a visit whose output raises in backward.
    """

    route: tuple[int, ...] | None = None
    left_out: tuple[int, ...] = ()
    recomputes: str = ""
    seen: int | None = None
    hooked: int | None = None
    breaks_at: int | None = None

    def places(self, depth: int, rank: int) -> list[int]:
        """The numbers of the layers that `rank` runs, in order."""
        route = range(depth) if self.route is None else self.route
        out = self.left_out[rank] if rank < len(self.left_out) else -1
        return [place % depth for place in route if out < 0 or place % depth != out % depth]


class Model(nn.Module):
    """Layers, a gain that the root uses itself, and a head.

    Attributes:
        plan: of the next forward.
    """

    def __init__(self, depth: int, *, is_tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, 1)
        if is_tied:
            first, last = self.layer(0), self.layer(-1)
            last.linear.weight = first.linear.weight
        self.plan = Plan()

    def layer(self, place: int) -> Any:
        """The layer with that number, counted round."""
        return self.layers[place % len(self.layers)]

    def part(self, place: int | None) -> nn.Module:
        """A layer; the head if it is -1, all of the model if None."""
        if place is None:
            return self
        part: nn.Module = self.head if place < 0 else self.layer(place)
        return part

    def forward(self, x: Tensor, rank: int) -> tuple[Tensor, Tensor | None]:
        """[rows, DIM] -> [rows, 1], and the output of the visit that is to be seen, [rows, DIM]."""
        plan = self.plan
        x = x * self.gain
        if plan.recomputes.startswith("all ") and torch.is_grad_enabled():
            both: Any = checkpoint(self._visits, x, rank, plan, use_reentrant="reentrant" in plan.recomputes)
            x, seen = both
        else:
            x, seen = self._visits(x, rank, plan)
        return self.head(x), seen

    def _visits(self, x: Tensor, rank: int, plan: Plan) -> tuple[Tensor, Tensor | None]:
        seen = None
        for visit, place in enumerate(plan.places(len(self.layers), rank)):
            x = self._visit(x, place, plan)
            if plan.hooked == visit and x.requires_grad:
                x.register_hook(_halve)
            if plan.breaks_at == visit and x.requires_grad:
                x.register_hook(_raise_in_backward)
            if plan.seen == visit:
                seen = x
        return x, seen

    def _visit(self, x: Tensor, place: int, plan: Plan) -> Tensor:
        layer = self.layer(place)
        if plan.recomputes not in ("once more", "reentrant") or not torch.is_grad_enabled():
            return layer(x)  # type: ignore[no-any-return]
        out: Any = checkpoint(layer, x, use_reentrant=plan.recomputes == "reentrant")
        return out  # type: ignore[no-any-return]


def _halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def _raise_in_backward(grad: Tensor) -> None:
    raise Trouble("backward")

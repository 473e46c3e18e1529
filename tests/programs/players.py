"""Those who run programs, what decides whether an operation is legal, and what an operation is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from streamshard import StreamShard
from tests.models import vector_batch
from tests.programs.model import Model, Plan, Trouble
from tests.reference import adamw, sgd

if TYPE_CHECKING:
    from tests.programs.generate import Program

Shown = dict[str, Tensor | None]  # what is to be compared, by a name for messages
FAILURES = ("trouble", "freed", "reentrant", "other recomputation")  # how an operation may fail in plain torch too


class Player:
    """A model, its optimizer and what a program keeps, of all the ranks that this process plays.

    Args:
        program: whose model and optimizer it is.
        ranks: those played. Plain torch plays every rank with one model.
        wrap: shards the model, or leaves it.

    Attributes:
        kept: losses that wait for a backward, each of all ranks.
        final: names of parameters whose gradient was reported as complete since it was last cleared.
        quiet: leaves the no_sync stretch that it is in.
    """

    def __init__(self, program: Program, ranks: Sequence[int], wrap: Callable[[Model], Any]) -> None:
        torch.manual_seed(11)
        self.program = program
        self.model = wrap(Model(program.depth, is_tied=program.is_tied))
        self.optimizer = (adamw if program.optimizer == "adamw" else sgd)(self.model)
        self.ranks = ranks
        self.kept: list[list[Tensor]] = []
        self.final: set[str] = set()
        self.quiet = contextlib.ExitStack()
        self.is_quiet = False
        for name, param in self.model.named_parameters():
            param.register_post_accumulate_grad_hook(functools.partial(self._note, name))

    def _note(self, name: str, param: Tensor) -> None:
        if param.requires_grad:  # torch calls hooks of what was frozen after its forward, and leaves no gradient
            self.final.add(name)

    @property
    def is_sharded(self) -> bool:
        """Whether it is StreamShard that plays."""
        return isinstance(self.model, StreamShard)

    def forward(self, number: int, plan: Plan, *, has_graph: bool) -> list[tuple[Tensor, Tensor | None]]:
        """Forwards of all ranks with the data of operation `number`: each one's loss, and the second one."""
        self.model.plan = plan
        self.model.train(has_graph)
        losses: list[tuple[Tensor, Tensor | None]] = []
        trouble: list[Trouble] = []
        with torch.set_grad_enabled(has_graph):
            for rank in self.ranks:
                try:
                    losses.append(self._losses(number, rank, has_graph and "reentrant" in plan.recomputes))
                except Trouble as error:
                    trouble.append(error.with_traceback(None))
        self.model.train()
        if trouble:
            raise trouble[0]
        return losses

    def _losses(self, number: int, rank: int, trains_input: bool) -> tuple[Tensor, Tensor | None]:
        out, seen = self.model(vector_batch(number, rank).requires_grad_(trains_input), rank)
        return out.square().mean(), None if seen is None else seen.square().mean()


@dataclass
class State:
    """What decides whether an operation is legal, for both players.

    Attributes:
        program: that runs.
        born: of each kept loss, how many edits of weights came before it.
        edits: how often weights were changed.
        is_quiet: inside a `no_sync` stretch.
        is_held: gradients are waiting.
        is_torn: a backward has failed, so gradients are partial until they are all cleared.
        is_unreached: no backward has come since the last forward with gradients.
        order: the route of the first forward that trained; None before.
    """

    program: Program
    born: list[int] = field(default_factory=list)
    edits: int = 0
    is_quiet: bool = False
    is_held: bool = False
    is_torn: bool = False
    is_unreached: bool = False
    order: Plan | None = None

    @property
    def holds(self) -> bool:
        """Whether gradients of `no_sync` wait in slots, so that nobody may read them."""
        return self.program.grad_slots == "all"

    @property
    def has_gradients_to_see(self) -> bool:
        """Whether they are comparable."""
        return not self.is_held and not self.is_torn


@dataclass(frozen=True)
class Operation:
    """Something that all ranks do. To add one: a dataclass with `perform`, a line in `tests.programs.generate`."""

    edits_weights: ClassVar[bool] = False

    def is_legal(self, state: State) -> bool:
        """Whether a user may do it now; if not it is left out."""
        return True

    def perform(self, player: Player, number: int) -> Shown:
        """Do it, as operation `number` of its program; returns what is to be compared."""
        raise NotImplementedError

    def after(self, state: State, outcome: str) -> None:
        """Note what it has changed; `outcome` is "done" or one of `FAILURES`."""
        state.edits += self.edits_weights

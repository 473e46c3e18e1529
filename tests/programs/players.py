"""Those who run programs, what decides whether an operation is legal, and what an operation is."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import StreamShard
from tests.models import vector_batch
from tests.programs.model import Brief, Model, Plan, Trouble
from tests.reference import adamw, full_weights, sgd

if TYPE_CHECKING:
    from tests.programs.generate import Program

Shown = dict[str, Tensor | None]  # what is to be compared, by a name for messages
FAILURES = (
    "trouble",
    "stale",
    "freed",
    "reentrant",
    "other recomputation",
)  # how an operation may fail in plain torch too


@dataclass
class Weights:
    """A copy of a model's state.

    Attributes:
        params: by name.
        buffers: by rank that the player plays, by name.
    """

    params: dict[str, Tensor]
    buffers: list[dict[str, Tensor]]


class Player:
    """A model, its optimizer and what a program keeps, of all the ranks that this process plays.

    Plain torch plays every rank with one model, so each has buffers of its own that take turns in it; before a forward
    they become rank 0's where DistributedDataParallel would send them.

    Args:
        program: whose model and optimizer it is.
        ranks: those played.
        wrap: shards the model, or leaves it.

    Attributes:
        me: this process's own rank.
        kept: losses that wait for a backward, each of all ranks.
        final: names of parameters whose gradient was reported as complete since it was last cleared.
        has_penalties: losses had terms of the parameters themselves.
    """

    def __init__(self, program: Program, ranks: Sequence[int], wrap: Callable[[Model], Any]) -> None:
        torch.manual_seed(11)
        self.program = program
        self.model = wrap(Model(program.depth, is_tied=program.is_tied, has_norm=program.has_norm))
        self.optimizer = _optimizer(program.optimizer, self.model)
        self.ranks = ranks
        self.me = dist.get_rank()
        self.kept: list[list[Tensor]] = []
        self.final: set[str] = set()
        self.saved: Weights | None = None
        self.quiet = contextlib.ExitStack()  # what leaves the no_sync stretch it is in
        self.is_quiet = False
        self.has_penalties = False
        self._buffers = [
            {key: buffer if number == 0 else buffer.clone() for key, buffer in self.model.named_buffers()}
            for number in range(len(ranks))
        ]
        self._sends_buffers = True
        for name, param in self.model.named_parameters():
            param.register_post_accumulate_grad_hook(functools.partial(self._note, name))

    def _note(self, name: str, param: Tensor) -> None:
        if param.requires_grad:  # torch calls hooks of what was frozen after its forward, and leaves no gradient
            self.final.add(name)

    @property
    def is_sharded(self) -> bool:
        """Whether it is StreamShard that plays."""
        return isinstance(self.model, StreamShard)

    def each_rank(self) -> Iterator[tuple[int, int]]:
        """Places in `ranks`, and the ranks: the model is that rank's meanwhile."""
        for place, rank in enumerate(self.ranks):
            self.become(place)
            yield place, rank

    def become(self, place: int) -> None:
        """The model has the buffers of the rank at `place`."""
        if len(self._buffers) > 1:
            for name, buffer in self._buffers[place].items():
                owner, _, key = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[key] = buffer

    def forward(self, number: int, plan: Plan, *, mode: str = "train") -> list[tuple[Tensor, Tensor | None]]:
        """Forwards of all ranks with the data of operation `number`: each one's loss, and the second one."""
        has_graph = mode != "evaluate"
        self._send_buffers(has_graph=has_graph)
        self.model.plan = plan
        self.model.train(mode == "train")
        losses: list[tuple[Tensor, Tensor | None]] = []
        trouble: list[Trouble] = []
        with torch.set_grad_enabled(has_graph):
            for _, rank in self.each_rank():
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
        return out.float().square().mean(), None if seen is None else seen.float().square().mean()

    def _send_buffers(self, *, has_graph: bool) -> None:
        if self._sends_buffers and len(self._buffers) > 1:
            for buffers in self._buffers[1:]:
                for name, buffer in buffers.items():
                    buffer.data.copy_(self._buffers[0][name])  # graphs that have seen it do not need it
        self._sends_buffers = has_graph and not self.is_quiet

    def copy_weights(self) -> Weights:
        """All parameters and buffers."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        params = {name: value for name, value in full_weights(self.model).items() if name in names}
        buffers = [
            {name: value.clone() for name, value in self._buffers_at(place).items()} for place in range(len(self.ranks))
        ]
        return Weights(params, buffers)

    def load_weights(self, weights: Weights) -> None:
        """The reverse; a player of one rank takes over his own of several ranks' buffers."""
        for place, rank in self.each_rank():
            buffers = weights.buffers[place if len(weights.buffers) == len(self.ranks) else rank]
            self.model.load_state_dict({**weights.params, **buffers})

    def _buffers_at(self, place: int) -> Mapping[str, Tensor]:
        return self._buffers[place] if len(self._buffers) > 1 else dict(self.model.named_buffers())

    def close(self) -> None:
        """The program has ended."""
        self.quiet.close()


def _optimizer(kind: str, model: nn.Module) -> Optimizer:
    if kind != "groups":
        return (adamw if kind == "adamw" else sgd)(model)
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    others = [param for name, param in model.named_parameters() if not name.endswith("weight")]
    groups: Any = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.0)


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
        is_spoilt: what was refused cannot be undone.
        order: the route of the first forward that trained; None before.
        outcomes: how many operations ended how.
    """

    program: Program
    born: list[int] = field(default_factory=list)
    edits: int = 0
    is_quiet: bool = False
    is_held: bool = False
    is_torn: bool = False
    is_unreached: bool = False
    is_spoilt: bool = False
    order: Plan | None = None
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def holds(self) -> bool:
        """Whether gradients of `no_sync` wait in slots, so that nobody may read them."""
        return self.program.grad_slots == "all"

    @property
    def has_gradients_to_see(self) -> bool:
        """Whether they are comparable."""
        return not self.is_held and not self.is_torn

    def forget(self) -> None:
        """Both players have let go of all graphs and gradients, and have the same weights."""
        self.born, self.edits = [], self.edits + 1
        self.is_held = self.is_torn = self.is_unreached = False


@dataclass(frozen=True, repr=False)
class Operation(Brief):
    """Something that all ranks do. To add one: a dataclass with `perform`, a line in `tests.programs.generate`."""

    edits_weights: ClassVar[bool] = False
    refusal_keeps: ClassVar[bool] = False  # plain torch has not changed anything if StreamShard refuses

    def is_legal(self, state: State) -> bool:
        """Whether a user may do it now; if not it is left out."""
        return True

    def may_be_refused(self, state: State) -> bool:
        """Whether StreamShard may raise an error of its own, on all ranks, where plain torch does it."""
        return False

    def perform(self, player: Player, number: int) -> Shown:
        """Do it, as operation `number` of its program; returns what is to be compared."""
        raise NotImplementedError

    def follow(self, plain: Player) -> None:
        """StreamShard has refused what plain torch did: let that have what it has, if it is not started over."""

    def after(self, state: State, outcome: str) -> None:
        """Note what it has changed; `outcome` is "done" or one of `FAILURES`."""
        state.edits += self.edits_weights

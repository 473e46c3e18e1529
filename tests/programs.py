"""Random training programs: what a user may do with a model, in any legal order, beside plain torch doing the same.

A `Program` is a list of operations, each done by all ranks: by plain torch, one process of which plays every rank in
turn, then by StreamShard. After each, losses and refusals are compared; at `Check` and at the end gradients and
weights.

    python -m tests.programs --minutes 5 --seed 3

tries programs for that long and prints the first that fails, shrunk, as Python.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard, full_optimizer_state_dict, load_optimizer_state_dict
from tests.models import DIM, Layer, vector_batch
from tests.ranks import RankContext, RankPool, open_pool
from tests.reference import FP32, Tolerance, adamw, assert_same, full_grads, full_weights, sgd
from tests.scenarios import over_sockets

__all__ = [
    "Backward",
    "Check",
    "Clip",
    "Direct",
    "Edit",
    "Forward",
    "Forget",
    "Freeze",
    "Load",
    "LoadOptimizer",
    "NoSync",
    "Program",
    "Save",
    "SaveOptimizer",
    "Step",
    "Summon",
    "ZeroGrad",
    "programs",
    "run_program",
]

NEAR = Tolerance(relative=1e-4, absolute=2e-6)
STALE = "modified by an inplace operation"  # what torch says of weights that were changed before their backward


class Trouble(Exception):
    """What a user's code raises in the middle of something."""


# ---------------------------------------------------------------------------------------------- the model


class Model(nn.Module):
    """Layers, a gain that the root uses itself, and a head; a `Forward` says what the next forward does with them."""

    def __init__(self, depth: int, *, is_tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, 1)
        if is_tied:
            first, last = self.layer(0), self.layer(-1)
            last.linear.weight = first.linear.weight
        self.plan = Forward()

    def layer(self, place: int) -> Any:
        """The layer with that number, counted round."""
        return self.layers[place % len(self.layers)]

    def part(self, place: int | None) -> nn.Module:
        """A layer; the head if it is -1, all of the model if None."""
        if place is None:
            return self
        part: nn.Module = self.head if place < 0 else self.layer(place)
        return part

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        plan = self.plan
        x = x * self.gain
        if plan.reads is not None and not plan.reads_late:
            x = x + 0.1 * F.linear(x, self.layer(plan.reads).linear.weight)
        for visit, place in enumerate(range(len(self.layers)) if plan.route is None else plan.route):
            layer = self.layer(place)
            if plan.recomputes is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                y: Any = checkpoint(layer, x, use_reentrant=plan.recomputes == "reentrant")
                x = y
            if plan.breaks_at == visit and x.requires_grad:
                x.register_hook(_raise_in_backward)
        if plan.reads is not None and plan.reads_late:
            x = x + 0.1 * F.linear(x, self.layer(plan.reads).linear.weight)
        out: Tensor = self.head(x)
        return out


def _raise_in_backward(grad: Tensor) -> None:
    raise Trouble("backward")


def _raise_in_forward(module: nn.Module, args: Any) -> None:
    raise Trouble("forward")


# ---------------------------------------------------------------------------------------------- those who run programs


class Player:
    """A model, its optimizer and the losses kept so far, of all the ranks that this process plays.

    Args:
        program: whose model and optimizer it is.
        ranks: those played.
        wrap: shards the model, or leaves it.
    """

    def __init__(self, program: Program, ranks: Sequence[int], wrap: Callable[[Model], Any]) -> None:
        torch.manual_seed(11)
        self.model = wrap(Model(program.depth, is_tied=program.is_tied))
        self.optimizer = (adamw if program.is_adam else sgd)(self.model)
        self.ranks = ranks
        self.kept: list[list[Tensor]] = []
        self.saved: dict[str, Tensor] = {}
        self.saved_optimizer: dict[str, Any] = {}
        self.quiet = contextlib.ExitStack()  # what leaves the no_sync stretch it is in
        self.is_quiet = False

    @property
    def is_sharded(self) -> bool:
        """Whether it is StreamShard that plays."""
        return isinstance(self.model, StreamShard)


@dataclass
class State:
    """What decides whether an operation is legal, for both players.

    Attributes:
        rank: of this process.
        holds: whether gradients of `no_sync` wait in slots, so that nobody may read them (``grad_slots="all"``).
        born: of each kept loss, how many edits of weights came before it.
        edits: how often weights were changed.
        is_quiet: inside a `no_sync` stretch.
        is_held: gradients are waiting.
        is_torn: a backward has failed, so gradients are partial until they are all cleared.
        outcomes: how many operations ended how.
    """

    rank: int
    holds: bool
    born: list[int] = field(default_factory=list)
    edits: int = 0
    is_quiet: bool = False
    is_held: bool = False
    is_torn: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def has_gradients_to_see(self) -> bool:
        """Whether they are comparable."""
        return not self.is_held and not self.is_torn


@dataclass(frozen=True, repr=False)
class Operation:
    """Something that all ranks do."""

    edits_weights: ClassVar[bool] = False

    def is_legal(self, state: State) -> bool:
        """Whether a user may do it now; if not it is left out."""
        return True

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        """Do it, as operation `number` of its program; returns what is to be compared."""
        raise NotImplementedError

    def after(self, state: State, outcome: str) -> None:
        """Note what it has changed; `outcome` is "done", "trouble" or "stale"."""
        state.edits += self.edits_weights

    def __repr__(self) -> str:
        """Python that makes it, defaults left out."""
        given_ = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given_)})"


@dataclass(frozen=True, repr=False)
class Forward(Operation):
    """A forward of the model.

    Attributes:
        mode: "train", "evaluate" (no gradients), or "evaluate with gradients".
        is_kept: its loss waits for a `Backward`; else its graph is dropped at once.
        route: layers that run, by number; None: all in turn.
        recomputes: checkpointing of each layer.
        reads: a layer whose weight the root reads, before the layers or after them.
        reads_late: after them.
        raises_in: a layer that raises.
        breaks_at: number of the visit whose output raises in backward.
        has_penalty: the loss has a term of the parameters themselves.
    """

    mode: str = "train"
    is_kept: bool = True
    route: tuple[int, ...] | None = None
    recomputes: str | None = None
    reads: int | None = None
    reads_late: bool = False
    raises_in: int | None = None
    breaks_at: int | None = None
    has_penalty: bool = False

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        model = player.model
        model.plan = self
        model.train(self.mode == "train")
        hook = None
        if self.raises_in is not None:
            hook = model.layer(self.raises_in).linear.register_forward_pre_hook(_raise_in_forward)
        try:
            with torch.set_grad_enabled(self.mode != "evaluate"):
                losses = [self._loss(player, number, rank) for rank in player.ranks]
        finally:
            if hook is not None:
                hook.remove()
            model.train()
        shown = _own(player, losses)
        if self.has_penalty and self.mode != "evaluate":  # of pieces, so its value is not to be compared
            losses = [loss + _penalty(model) for loss in losses]
        if self._keeps:
            player.kept.append(losses)
        return shown

    def _loss(self, player: Player, number: int, rank: int) -> Tensor:
        x = vector_batch(number, rank).requires_grad_(self.mode != "evaluate" and self.recomputes == "reentrant")
        loss: Tensor = player.model(x).square().mean()
        return loss

    @property
    def _keeps(self) -> bool:
        return self.is_kept and self.mode != "evaluate"

    def after(self, state: State, outcome: str) -> None:
        if self._keeps and outcome == "done":
            state.born.append(state.edits)


@dataclass(frozen=True, repr=False)
class Direct(Operation):
    """A layer that is called by itself; its loss is kept."""

    layer: int = 0

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        losses = [player.model.layer(self.layer)(vector_batch(number, rank)).square().mean() for rank in player.ranks]
        player.kept.append(losses)
        return _own(player, losses)

    def after(self, state: State, outcome: str) -> None:
        state.born.append(state.edits)


@dataclass(frozen=True, repr=False)
class Backward(Operation):
    """Backward of one kept loss or of a sum of several.

    Attributes:
        picks: which, counted round.
        retains: ``retain_graph``; they can be differentiated again.
    """

    picks: tuple[int, ...] = (0,)
    retains: bool = False

    def is_legal(self, state: State) -> bool:
        return bool(state.born)

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        picked = self._picked(len(player.kept))
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
                player.kept = [losses for pick, losses in enumerate(player.kept) if pick not in picked]
        if errors:
            raise errors[0]
        return {}

    def _picked(self, kept: int) -> list[int]:
        return list(dict.fromkeys(pick % kept for pick in self.picks))

    def is_stale(self, state: State) -> bool:
        """Whether weights have changed since one of its forwards."""
        return any(state.born[pick] != state.edits for pick in self._picked(len(state.born)))

    def after(self, state: State, outcome: str) -> None:
        picked = self._picked(len(state.born))
        if outcome != "done" or not self.retains:
            state.born = [born for pick, born in enumerate(state.born) if pick not in picked]
        state.is_torn |= outcome != "done"
        state.is_held = state.holds and (state.is_quiet or (state.is_held and outcome != "done"))


@dataclass(frozen=True, repr=False)
class Forget(Operation):
    """Drop a kept loss."""

    pick: int = 0

    def is_legal(self, state: State) -> bool:
        return bool(state.born)

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        del player.kept[self.pick % len(player.kept)]
        return {}

    def after(self, state: State, outcome: str) -> None:
        del state.born[self.pick % len(state.born)]


@dataclass(frozen=True, repr=False)
class NoSync(Operation):
    """Begin a `no_sync` stretch, or end the one that it is in."""

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
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

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        for name, param in player.model.part(self.part).named_parameters():
            if self.name is None or name.endswith(self.name):
                param.requires_grad_(self.trains)
        return {}


@dataclass(frozen=True, repr=False)
class ZeroGrad(Operation):
    """Clear gradients of a layer (-1: the head, None: all)."""

    part: int | None = None
    to_none: bool = True

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        player.model.part(self.part).zero_grad(set_to_none=self.to_none)
        return {}

    def after(self, state: State, outcome: str) -> None:
        if self.part is None and self.to_none:
            state.is_torn = state.is_held = False


@dataclass(frozen=True, repr=False)
class Step(Operation):
    """The optimizer's."""

    edits_weights = True

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        player.optimizer.step()
        return {}


@dataclass(frozen=True, repr=False)
class Clip(Operation):
    """Clip gradients to a norm, by the model's method or torch's function."""

    norm: float = 0.1
    by_torch: bool = False

    def is_legal(self, state: State) -> bool:
        return state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        if player.is_sharded and not self.by_torch:
            return {"norm": player.model.clip_grad_norm_(self.norm)}
        return {"norm": torch.nn.utils.clip_grad_norm_(player.model.parameters(), self.norm)}


@dataclass(frozen=True, repr=False)
class Edit(Operation):
    """Scale weights of a layer (-1: the head, None: all) in place."""

    part: int | None = None
    factor: float = 0.9

    edits_weights = True

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        with torch.no_grad():
            for param in player.model.part(self.part).parameters():
                param.mul_(self.factor)
        return {}


@dataclass(frozen=True, repr=False)
class Save(Operation):
    """Keep a copy of all weights."""

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        player.saved = full_weights(player.model)
        return dict(player.saved)


@dataclass(frozen=True, repr=False)
class Load(Operation):
    """Load the weights that were saved last."""

    edits_weights = True

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        if player.saved:
            player.model.load_state_dict(player.saved)
        return {}


@dataclass(frozen=True, repr=False)
class SaveOptimizer(Operation):
    """Keep the optimizer's whole state."""

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
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

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
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

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        place: Any = contextlib.nullcontext()
        if player.is_sharded:
            place = player.model.summon_full_params(writeback=self.factor != 1.0, with_grads=self.with_grads)
        with place, torch.no_grad():
            for param in player.model.parameters():
                if self.factor != 1.0:
                    param.mul_(self.factor)
                if self.with_grads and self.factor != 1.0 and param.grad is not None:
                    param.grad.mul_(self.factor)
            return {name: param.detach().clone() for name, param in player.model.named_parameters()}


@dataclass(frozen=True, repr=False)
class Check(Operation):
    """Compare weights, and gradients if there are any to see."""

    has_gradients: bool = True

    def is_legal(self, state: State) -> bool:
        return not self.has_gradients or state.has_gradients_to_see

    def perform(self, player: Player, number: int) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = dict(full_weights(player.model))
        if self.has_gradients:
            found.update({f"gradient of {name}": grad for name, grad in full_grads(player.model).items()})
        return found


def _own(player: Player, losses: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"loss of rank {rank}": loss.detach() for rank, loss in zip(player.ranks, losses, strict=True)}


def _penalty(model: nn.Module) -> Tensor:
    total: Any = sum(0.1 * param.square().sum() for param in model.parameters())
    return total  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, repr=False)
class Program(Operation):
    """Operations, and the model, ranks and settings that they are tried with.

    Attributes:
        ops: in order.
        ranks: how many.
        depth: number of layers.
        is_tied: the first and the last layer share their weight.
        is_adam: AdamW, else SGD with momentum.
        weight_slots: a setting of StreamShard, like the next two.
        grad_slots: as above.
        min_unit_size: as above.
        sockets: between ranks, not shared memory.
    """

    ops: tuple[Operation, ...] = ()
    ranks: int = 2
    depth: int = 3
    is_tied: bool = False
    is_adam: bool = False
    weight_slots: int | str = 2
    grad_slots: int | str = 2
    min_unit_size: int = 0
    sockets: bool = False


def run_program(context: RankContext, program: Program) -> Counter[str]:
    """Run `program` on this rank and compare; returns how many operations ended how."""
    with over_sockets() if program.sockets else contextlib.nullcontext():
        sharded = Player(program, [context.rank], lambda model: _sharded(program, model))
    plain = Player(program, range(context.world_size), lambda model: model)
    state = State(context.rank, holds=program.grad_slots == "all")
    for number, op in enumerate((*program.ops, Check(has_gradients=False), Check())):
        if not op.is_legal(state):
            continue
        what = f"operation {number}, {op!r}"
        wanted, refusal = _attempt(op, plain, number)
        if any(value is not None and not value.isfinite().all() for value in wanted.values()):
            break  # the program diverges: nothing can be compared with it
        found, complaint = _attempt(op, sharded, number)
        outcomes = {refusal, complaint}
        if isinstance(op, Backward) and op.is_stale(state) and outcomes == {"done", "stale"} and refusal == "done":
            # Torch refuses where it has saved what was changed, StreamShard where anything of the layer was changed.
            state.outcomes["refused by StreamShard alone"] += 1
        elif refusal != complaint and outcomes != {"trouble", "stale"}:
            raise AssertionError(f"{what}: {complaint}, and plain torch: {refusal}")
        else:
            shown = {name: value for name, value in wanted.items() if name in found or "loss of" not in name}
            assert_same(found, shown, what, NEAR)
        state.outcomes[f"{type(op).__name__} {complaint}"] += 1
        op.after(state, complaint)
    sharded.quiet.close()
    return state.outcomes


def _attempt(op: Operation, player: Player, number: int) -> tuple[dict[str, Tensor | None], str]:
    """What there is to compare, and how it ended."""
    try:
        return op.perform(player, number), "done"
    except Trouble:
        return {}, "trouble"
    except RuntimeError as error:
        if STALE not in str(error):
            raise
        return {}, "stale"


def _sharded(program: Program, model: Model) -> Any:
    return StreamShard(
        model,
        units=[Layer],
        precision=FP32,
        weight_slots=program.weight_slots,  # type: ignore[arg-type]  # a number or "all"
        grad_slots=program.grad_slots,  # type: ignore[arg-type]
        min_unit_size=program.min_unit_size,
    )


PARTS = st.none() | st.integers(-1, 3)
PLACES = st.integers(0, 3)
FACTORS = st.sampled_from([0.5, 0.9, 1.1])


def _rarely(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, more often than not."""
    return st.integers(0, 4).flatmap(lambda number: values if number == 4 else st.none())


FORWARDS = st.builds(
    Forward,
    mode=st.sampled_from(["train", "train", "train", "evaluate", "evaluate with gradients"]),
    is_kept=st.sampled_from([True, True, True, False]),
    route=_rarely(st.lists(PLACES, max_size=5).map(tuple)),
    recomputes=_rarely(st.sampled_from(["once more", "reentrant"])),
    reads=_rarely(PLACES),
    reads_late=st.booleans(),
    raises_in=_rarely(_rarely(PLACES)),
    breaks_at=_rarely(_rarely(PLACES)),
    has_penalty=st.sampled_from([False, False, False, False, True]),
)
BACKWARDS = st.builds(
    Backward,
    picks=st.lists(PLACES, min_size=1, max_size=3).map(tuple),
    retains=st.sampled_from([False, False, False, True]),
)
OTHERS: Sequence[st.SearchStrategy[Operation]] = [
    st.builds(ZeroGrad, part=PARTS, to_none=st.booleans()),
    st.just(NoSync()),
    st.just(NoSync()),
    st.builds(Freeze, part=PARTS, name=st.sampled_from([None, "weight", "bias"]), trains=st.booleans()),
    st.builds(Freeze, part=PARTS, name=st.sampled_from([None, "weight", "bias"]), trains=st.booleans()),
    st.builds(Direct, layer=PLACES),
    st.builds(Forget, pick=PLACES),
    st.builds(Clip, by_torch=st.booleans()),
    st.builds(Edit, part=PARTS, factor=FACTORS),
    st.just(Save()),
    st.just(Load()),
    st.just(SaveOptimizer()),
    st.just(LoadOptimizer()),
    st.builds(Summon, factor=st.just(1.0) | FACTORS, with_grads=st.booleans()),
    st.builds(Check, has_gradients=st.booleans()),
]


@st.composite
def _phrases(draw: st.DrawFn) -> tuple[Operation, ...]:
    """One operation, or a few that make sense one after another. By number, as `one_of` would weigh them alike."""
    kind = draw(st.integers(0, 11))
    if kind < 5:
        return (draw(OTHERS[draw(st.integers(0, len(OTHERS) - 1))]),)
    if kind < 7:
        return (draw(FORWARDS),)
    if kind < 9:
        return (draw(BACKWARDS),)
    if kind < 10:
        return (Step(), ZeroGrad(to_none=draw(st.booleans())))
    if kind < 11:
        return draw(FORWARDS), draw(BACKWARDS)
    return draw(FORWARDS), draw(BACKWARDS), Step(), ZeroGrad(to_none=draw(st.booleans()))


@st.composite
def programs(draw: st.DrawFn, longest: int = 16) -> Program:
    """Any program of up to `longest` phrases."""
    at_least = draw(st.sampled_from([1, longest // 4, longest // 2]))
    phrases = draw(st.lists(_phrases(), min_size=at_least, max_size=longest))
    slots: st.SearchStrategy[Any] = st.sampled_from([2, 3, "all"])
    return Program(
        ops=tuple(op for phrase in phrases for op in phrase),
        ranks=draw(st.sampled_from([2, 2, 2, 3])),
        depth=draw(st.integers(1, 4)),
        is_tied=draw(st.sampled_from([False, False, True])),
        is_adam=draw(st.booleans()),
        weight_slots=draw(slots),
        grad_slots=draw(slots),
        min_unit_size=draw(st.sampled_from([0, 0, 600])),
        sockets=draw(st.booleans()),
    )


# ---------------------------------------------------------------------------------------------- what is known


# ---------------------------------------------------------------------------------------------- by hand


class _Failed(Exception):
    """A program that fails, so that hypothesis shrinks it."""


def _outcome(context: RankContext, program: Program) -> tuple[Counter[str], str]:
    """What `run_program` returns, or the story of its failure: rank processes that go on make shrinking fast."""
    try:
        return run_program(context, program), ""
    except Exception:
        return Counter(), traceback.format_exc()


def _search(pool: RankPool, start: int, deadline: float, longest: int) -> tuple[Counter[str], Program | None, str]:
    """Try programs until the deadline or a failure: what was done, the smallest program that fails, its story."""
    done: Counter[str] = Counter()
    smallest: Program | None = None
    story = ""

    @seed(start)
    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(longest))
    def attempt(program: Program) -> None:
        nonlocal smallest, story
        if time.monotonic() > deadline and smallest is None:
            return
        done["programs"] += 1
        try:
            outcomes = pool(program.ranks).run(_outcome, program)
        except AssertionError as error:  # a rank has died or hangs
            outcomes = [(Counter(), str(error))]
        stories = [story for _, story in outcomes if story]
        done.update(outcomes[0][0])
        if stories:
            smallest, story = program, "\n".join(stories)
            raise _Failed

    try:
        attempt()
    except _Failed:
        pass
    except FlakyFailure:
        story = f"it did not fail again, but once:\n{story}"
    return done, smallest, story


def main(arguments: Iterable[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Try random training programs against plain torch.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=16, help="phrases of operations in a program")
    given_ = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * given_.minutes
    done: Counter[str] = Counter()
    with open_pool(run_timeout_s=45.0, group_timeout_s=30.0) as pool:
        for start in _from(given_.seed):
            if time.monotonic() > deadline:
                break
            more, smallest, story = _search(pool, start, deadline, given_.longest)
            done.update(more)
            if smallest is not None:
                print(f"seed {start}, after {done['programs']} programs:\n{story}\n\n{smallest!r}")
                return 1
    print(f"{done.pop('programs', 0)} programs, none failed; operations that were")
    print("\n".join(f"  {kind}: {count}" for kind, count in sorted(done.items())))
    return 0


def _from(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


if __name__ == "__main__":
    from tests import programs as itself  # functions of __main__ have no name that rank processes could import

    raise SystemExit(itself.main())

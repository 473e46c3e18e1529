"""One program on one rank: by plain torch, by StreamShard, and compared."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from streamshard import Precision, StreamShard
from streamshard.errors import CommunicationError, StreamShardError
from tests.programs.between import Check
from tests.programs.generate import Program
from tests.programs.model import Model, Part, Trouble
from tests.programs.passes import Backward
from tests.programs.players import FAILURES, Operation, Player, Shown, State
from tests.ranks import RankContext
from tests.reference import Tolerance, assert_same
from tests.scenarios import over_sockets

NEAR = Tolerance(relative=1e-4, absolute=2e-6)
CLOSE = Tolerance(relative=0.2, absolute=0.1)  # in bf16: not another tensor
BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": Precision(param_dtype=torch.float32),
    "bf16": Precision(),
    "bf16 sent": Precision(grad_dtype=BF16),
    "bf16 summed": Precision(reduce_dtype=BF16),
}
# What torch says, by what it is called here.
FAILED = {
    "modified by an inplace operation": "stale",
    "Trying to backward through the graph a second time": "freed",
    "already unpacked once": "freed",
    "torch.utils.checkpoint is incompatible with .grad()": "reentrant",
    "A different number of tensors was saved": "other recomputation",
}


def run_program(context: RankContext, program: Program) -> Counter[str]:
    """Run `program` on this rank and compare; returns how many operations ended how."""
    with over_sockets() if program.sockets else contextlib.nullcontext():
        sharded = Player(program, [context.rank], lambda model: _sharded(program, model))
    plain = Player(program, range(context.world_size), lambda model: model)
    state = State(program)
    for number, op in enumerate((*program.ops, Check(has_gradients=False), Check())):
        if not op.is_legal(state):
            continue
        outcome = _both(op, plain, sharded, state, number)
        if outcome is None:
            break  # the program diverges: nothing can be compared with it
        state.outcomes[f"{type(op).__name__} {outcome}"] += 1
        if outcome != "refused" or op.refusal_keeps:
            op.after(state, outcome)
        elif not state.is_spoilt:
            _start_over(plain, sharded)
            state.forget()
        if state.is_spoilt:
            break
    sharded.close()
    return state.outcomes


def _both(op: Operation, plain: Player, sharded: Player, state: State, number: int) -> str | None:
    """Let both players do it and compare; returns how it ended, None if plain torch's numbers are not finite."""
    what = f"operation {number}, {op!r}"
    wanted, wish, _ = _attempt(op, plain, number)
    if any(value is not None and not value.isfinite().all() for value in wanted.values()):
        return None
    found, outcome, error = _attempt(op, sharded, number)
    may_be_stale = isinstance(op, Backward) and op.is_stale(state) and wish == "done"
    if may_be_stale or op.may_be_refused(state):
        _agree(f"{number}", what, outcome)
    if outcome == "refused" and op.may_be_refused(state):
        state.is_spoilt |= isinstance(error, CommunicationError)
        if wish == "done":
            op.follow(plain)
    elif outcome == "stale" and may_be_stale:
        # Torch refuses where it has saved what was changed, StreamShard where anything of the layer was changed.
        state.outcomes["refused by StreamShard alone"] += 1
        op.follow(plain)
    elif outcome != wish and not (outcome in FAILURES and wish in FAILURES):
        raise AssertionError(f"{what}: {outcome}, and plain torch: {wish}") from error
    elif outcome == "done":
        mine = {name: value for name, value in wanted.items() if name in found or "loss of" not in name}
        _compare(found, mine, what, is_exact=state.program.precision == "fp32")
    return outcome


def _attempt(op: Operation, player: Player, number: int) -> tuple[Shown, str, Exception | None]:
    """What there is to compare, how it ended, and by which error."""
    try:
        return op.perform(player, number), "done", None
    except Trouble as error:
        return {}, "trouble", error.with_traceback(None)  # which has graphs
    except RuntimeError as error:
        for text, outcome in FAILED.items():
            if text in str(error):
                return {}, outcome, error.with_traceback(None)
        if isinstance(error, StreamShardError):
            return {}, "refused", error
        raise


def _agree(key: str, what: str, outcome: str) -> None:
    """Raise unless it ended alike on all ranks. Through the store: connections may be broken."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"outcome {key} {dist.get_rank()}", outcome)
    outcomes = [store.get(f"outcome {key} {rank}").decode() for rank in range(dist.get_world_size())]
    if len(set(outcomes)) > 1:
        raise AssertionError(f"{what}: by rank, {', '.join(outcomes)}")


def _compare(found: Shown, wanted: Shown, what: str, *, is_exact: bool) -> None:
    if is_exact:
        assert_same(found, wanted, what, NEAR)
        return

    def roughly(shown: Shown) -> Shown:
        """Of gradients and moments, which may be noise, whether they are there."""
        return {
            name: value
            if value is None or value.is_floating_point() and "." in name and "of" not in name
            else value * 0
            for name, value in shown.items()
        }

    assert_same(roughly(found), roughly(wanted), what, CLOSE)


def _start_over(plain: Player, sharded: Player) -> None:
    """StreamShard has refused what plain torch did: from here on both have what plain torch has, and no graphs."""
    for player in (plain, sharded):
        player.kept.clear()
        player.model.zero_grad()
    sharded.load_weights(plain.copy_weights())


def _sharded(program: Program, model: Model) -> Any:
    units: dict[str, Any] = {"layers": [Part], "layers and head": [Part, "head"], "found": None}
    return StreamShard(
        model,
        units=units[program.units],
        precision=PRECISIONS[program.precision],
        weight_slots=program.weight_slots,  # type: ignore[arg-type]  # a number or "all"
        grad_slots=program.grad_slots,  # type: ignore[arg-type]
        min_unit_size=program.min_unit_size,
        align_pieces_to=program.align_pieces_to,  # type: ignore[arg-type]
    )

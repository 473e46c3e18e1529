"""One program on one rank, run in two ways and compared: plain torch and StreamShard, or state on a device or not."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

from streamshard import StreamShard
from streamshard.core import late_step
from tests.models import Layer
from tests.programs.generate import Program
from tests.programs.model import Model, Trouble
from tests.programs.operations import Check
from tests.programs.players import FAILURES, Operation, Player, Shown, State
from tests.ranks import RankContext
from tests.reference import EXACT, FP32, Tolerance, assert_same
from tests.scenarios import over_sockets
from tests.simulated import simulated_device

NEAR = Tolerance(relative=1e-4, absolute=2e-6)
# What torch says, by what it is called here.
FAILED = {
    "Trying to backward through the graph a second time": "freed",
    "already unpacked once": "freed",
    "torch.utils.checkpoint is incompatible with .grad()": "reentrant",
    "A different number of tensors was saved": "other recomputation",
}


def run_program(context: RankContext, program: Program) -> None:
    """Run `program` on this rank by plain torch, which plays all ranks, and by StreamShard."""
    with over_sockets() if program.sockets else contextlib.nullcontext():
        sharded = Player(program, [context.rank], lambda model: _sharded(program, model))
    plain = Player(program, range(context.world_size), lambda model: model)
    _run(program, plain, sharded, NEAR)


def run_program_in_host_memory(context: RankContext, program: Program) -> None:
    """Run `program` on this rank with state on a simulated device, and in host memory: the same bits."""
    program = dataclasses.replace(program, weight_slots=2, grad_slots=None)
    with simulated_device(), mock.patch.object(late_step, "CHUNK_NUMEL", 100):
        resident, on_host = (
            Player(program, [context.rank], lambda model, place=place: _sharded(program, model, **place))
            for place in ({}, {"offload": "state", "device_budget": program.device_budget})
        )
        _run(program, resident, on_host, EXACT)


def _run(program: Program, plain: Player, sharded: Player, tolerance: Tolerance) -> None:
    state = State(program)
    for number, op in enumerate((*program.ops, Check(has_gradients=False), Check())):
        if op.is_legal(state):
            outcome = _both(op, plain, sharded, number, tolerance)
            if outcome is None:
                break  # the program diverges: nothing can be compared with it
            op.after(state, outcome)
    plain.quiet.close()
    sharded.quiet.close()


def _both(op: Operation, plain: Player, sharded: Player, number: int, tolerance: Tolerance) -> str | None:
    """Let both players do it and compare; returns how it ended, None if the numbers of `plain` are not finite."""
    what = f"operation {number}, {op!r}"
    wanted, wish, _ = _attempt(op, plain, number)
    if any(value is not None and not value.isfinite().all() for value in wanted.values()):
        return None
    found, outcome, error = _attempt(op, sharded, number)
    if outcome != wish and not (outcome in FAILURES and wish in FAILURES):
        raise AssertionError(f"{what}: {outcome}, wanted {wish}") from error
    if outcome == "done":
        mine = {name: value for name, value in wanted.items() if name in found or "loss of" not in name}
        assert_same(found, mine, what, tolerance)
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
        raise


def _sharded(program: Program, model: Model, **settings: Any) -> Any:
    units: dict[str, Any] = {"layers": [Layer], "layers and head": [Layer, "head"], "found": None}
    return StreamShard(
        model,
        units=units[program.units],
        precision=FP32,
        weight_slots=program.weight_slots,  # type: ignore[arg-type]  # a number or "all"
        grad_slots=program.grad_slots,  # type: ignore[arg-type]
        min_unit_size=program.min_unit_size,
        align_pieces_to=program.align_pieces_to,  # type: ignore[arg-type]
        **settings,
    )

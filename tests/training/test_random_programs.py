"""Random training programs against plain PyTorch: what users do between forward and step, in any order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs import (
    Backward,
    Direct,
    Edit,
    Forward,
    Freeze,
    NoSync,
    Plan,
    Program,
    Step,
    ZeroGrad,
    programs,
    run_program,
)
from tests.ranks import RankPool


@settings(max_examples=28, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(program=programs())
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, refusals, gradients (None where there are none), weights. More by hand: ``python -m tests.programs``."""
    ranks(program.ranks).run(run_program, program)


# Each is the smallest program that went wrong, by what it claims.
FOUND = {
    "after a failed backward another one counts, although no forward came between": Program(
        ops=(
            Forward(Plan(seen=0)),
            Forward(),
            Backward(),
            Backward(),  # of what is freed
            ZeroGrad(by_optimizer=True),
            Backward(),
            Step(),
        )
    ),
    "hooks hear of gradients that this backward has made, not of those that are kept": Program(
        ops=(Forward(Plan(seen=0)), Backward(retains=True), Backward(picks=(1,)))
    ),
    "a layer that is called by itself is not the model, although all layers are one unit": Program(
        ops=(Forward(), Direct()), has_norm=True, depth=2, min_unit_size=1500
    ),
    "what is frozen may hold a gradient while others wait": Program(
        ops=(
            *(Forward(), Backward(), NoSync(), Freeze(-1), Forward(has_penalty=True), Backward()),
            *(Freeze(-1, trains=True), Forward(has_penalty=True), Backward(), NoSync(), Forward(), Backward(), Step()),
        ),
        grad_slots="all",
    ),
    "ranks find at different layers that weights were changed": Program(
        ops=(
            Forward(Plan(seen=1, left_out=(1, 2))),
            Edit(1),
            Edit(-1),
            Backward((1,)),
            ZeroGrad(),
            Forward(),
            Backward(),
        )
    ),
}


@pytest.mark.parametrize("claim", FOUND)
def test_what_random_programs_have_found(ranks: RankPool, claim: str) -> None:
    """As above."""
    ranks(FOUND[claim].ranks).run(run_program, FOUND[claim])

"""Random training programs against plain PyTorch: what users do between forward and step, in any order."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.programs import Forward, Program, programs, run_program
from tests.ranks import RankPool


@settings(max_examples=30, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(program=programs())
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, refusals, gradients (None where there are none), weights. More by hand: ``python -m tests.programs``."""
    ranks(program.ranks).run(run_program, program)


def test_a_weight_that_layers_share_is_read_by_the_root(ranks: RankPool) -> None:
    """It lies in the edge unit, and is asked of one of the layers: the smallest program that gave a piece."""
    for depth in (2, 3):
        for reads in range(depth):
            ranks(2).run(run_program, Program(ops=(Forward(reads=reads),), depth=depth, is_tied=True))

"""Random training programs against plain PyTorch: what users do between forward and step, in any order."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings

from tests.programs import Program, known_fault, programs, run_program
from tests.ranks import RankPool


@settings(max_examples=30, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(program=programs())
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, refusals, gradients (None where there are none), weights. More by hand: ``python -m tests.programs``."""
    assume(known_fault(program) is None)
    ranks(program.ranks).run(run_program, program)

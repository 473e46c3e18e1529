"""Random programs, each a model, its settings and what a user does with it: they run like plain PyTorch."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.programs import Program, programs, run_program, run_program_in_host_memory
from tests.ranks import RankPool

_seldom = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], print_blob=True)


@settings(_seldom, max_examples=25)
@given(program=programs())
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, refusals, gradients (None where there are none), weights."""
    ranks(program.ranks).run(run_program, program)


@settings(_seldom, max_examples=15)
@given(program=programs())
def test_random_programs_give_the_same_bits_with_state_in_host_memory(ranks: RankPool, program: Program) -> None:
    """All of the state, or the part that the device has no room for."""
    ranks(program.ranks).run(run_program_in_host_memory, program)

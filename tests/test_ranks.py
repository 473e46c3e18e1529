"""What other tests run on: rank processes recover from failures, the adversary shows missing waits, mutants apply."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from streamshard.comm.streams import Rule
from tests.adversary import make_adversarial
from tests.mutants import MUTANTS, ROOT
from tests.ranks import PRELOADED, PRELOADED_LAST, PRELOADED_TOO, RankContext, RankFailure, RankPool, on_ranks
from tests.reference import FP32, case, full_weights
from tests.scenarios import BF16, dropping, sharded, train


def _sum_of_ranks(context: RankContext, offset: int) -> int:
    value = torch.tensor(context.rank + offset)
    dist.all_reduce(value)
    return int(value)


def _raise_on(context: RankContext, bad_rank: int) -> None:
    if context.rank == bad_rank:
        raise ValueError("the culprit says this")
    dist.barrier()


def test_an_exception_on_a_rank_comes_back_with_its_traceback(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*_raise_on.*ValueError: the culprit says this"):
        ranks(2).run(_raise_on, 1)
    assert ranks(2).run(_sum_of_ranks, 0) == [1, 1]


_REFUSING = """
import sys, torch
def refuse(*args, **kwargs):
    raise AssertionError("what ranks are forked from looks for a GPU")
for name in ("is_available", "device_count", "current_device", "init"):
    setattr(torch.cuda, name, refuse)
for name in ("is_available", "current_accelerator", "device_count"):
    setattr(torch.accelerator, name, refuse)
for name in sys.argv[1:]:
    __import__(name)
"""


@pytest.mark.ranks
def test_the_process_that_ranks_are_forked_from_does_not_start_cuda() -> None:
    """Looking for a GPU would start CUDA, which does not survive a fork, so no rank could use it."""
    preloaded = [*PRELOADED, *PRELOADED_TOO.values(), *PRELOADED_LAST]
    subprocess.run([sys.executable, "-c", _REFUSING, *preloaded], cwd=ROOT, check=True)


@on_ranks(2)
def test_to_the_adversary_a_missing_wait_for_a_slot_shows_as_nan(context: RankContext) -> None:
    """Weights that have not arrived, and gradients written into a slot that is still to be reduced."""
    for rule, precision, slots in ((Rule.WEIGHTS_ARRIVED, FP32, 2), (Rule.GRADS_DRAINED, BF16, "all")):
        model = sharded("plain", precision, weight_slots=slots)
        with make_adversarial(model), dropping(model, rule):
            train(model, "plain", context)
            assert any(value.isnan().any() for value in full_weights(model).values())


def test_each_mutant_can_be_applied_and_has_tests() -> None:
    for mutant in MUTANTS:
        with case(mutant):
            source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
            changed = mutant.apply(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.test_files

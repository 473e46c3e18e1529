"""What other tests run on: rank processes report what happens and recover from it, and mutants follow the code."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.mutants import MUTANTS, ROOT
from tests.ranks import PRELOADED, PRELOADED_LAST, PRELOADED_TOO, RankContext, RankFailure, RankPool
from tests.reference import case


def _sum_of_ranks(context: RankContext, offset: int) -> int:
    value = torch.tensor(context.rank + offset)
    dist.all_reduce(value)
    return int(value)


def _raise_on(context: RankContext, bad_rank: int) -> None:
    if context.rank == bad_rank:
        raise ValueError("the culprit says this")
    dist.barrier()


def test_an_exception_on_a_rank_comes_back_with_its_traceback(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure names the rank, the error and the line, and the pool works afterwards."""
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


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_each_mutant_can_be_applied_and_has_tests() -> None:
    """The fragment occurs once in the function, the result is valid Python, and the test files exist."""
    for mutant in MUTANTS:
        with case(mutant):
            source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
            changed = mutant.apply(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.test_files

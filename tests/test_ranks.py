"""What other tests run on: ranks can be forked, mutants apply."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutants import MUTANTS, ROOT
from tests.ranks import PRELOADED, PRELOADED_LAST, PRELOADED_TOO
from tests.reference import case

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


def test_each_mutant_can_be_applied_and_has_tests() -> None:
    for mutant in MUTANTS:
        with case(mutant):
            source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
            changed = mutant.apply(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.test_files

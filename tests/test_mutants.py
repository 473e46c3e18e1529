"""The list of mutants follows the code: each can be applied, and the tests that should notice it exist."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, named_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_it_can_be_applied_and_tried(mutant: Mutant) -> None:
    """What it replaces is in its file exactly once; its tests are where it says."""
    assert (ROOT / "streamshard" / f"{mutant.file}.py").read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    for path, test in named_tests(mutant, ROOT):
        assert not test or f"def {test}(" in (ROOT / path).read_text()

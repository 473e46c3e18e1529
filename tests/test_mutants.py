"""The list of mutants follows the code: each can be applied, and the tests that should notice it exist."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, named_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_it_can_be_applied_and_tried(mutant: Mutant) -> None:
    """Its place is in the function exactly once, what comes of it is Python, and its tests are where it says."""
    source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
    changed = mutant.apply(source)
    assert changed != source
    compile(changed, mutant.file, "exec")
    for path, test in named_tests(mutant, ROOT):
        assert not test or f"def {test}(" in (ROOT / path).read_text()

"""The list of mutants follows the code: each can be applied, and the tests that should notice it exist."""

from __future__ import annotations

import ast

from tests.mutants import MUTANTS, ROOT
from tests.reference import case


def test_each_mutant_can_be_applied_and_has_tests() -> None:
    """The fragment occurs once in the function, the result is valid Python, and the test files exist."""
    for mutant in MUTANTS:
        with case(mutant):
            source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
            changed = mutant.apply(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.test_files

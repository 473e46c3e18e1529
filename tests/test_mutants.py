"""Each mutant can be tried: ``python -m tests.mutants`` tries them."""

from __future__ import annotations

import ast

from tests.mutants import MUTANTS, ROOT
from tests.reference import case


def test_each_mutant_can_be_applied_and_has_tests() -> None:
    for mutant in MUTANTS:
        with case(mutant):
            source = (ROOT / "streamshard" / f"{mutant.file}.py").read_text()
            changed = mutant.apply(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.test_files

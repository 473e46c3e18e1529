"""Mutants of a file are what `python -m tests.mutants` says, and can be tried."""

from __future__ import annotations

import ast

from tests.mutants import ROOT, likely_tests, mutants_of

SOURCE = '''
class Slot:
    def close(self, works):
        """Close."""
        with self.on_stream, no_grad():
            count = len(works)
            self.content = None
        if self.fence and not count > 1:
            self.fence.record(*works, blocks=False)
'''
WANTED = {
    "outside of self.on_stream, no_grad()": "        if True:\n            count",
    "without self.content = None": "            pass\n        if",
    "as if not self.fence and not count > 1": "if False:",
    "without and self.fence": "if ((not count > 1)):",
    "without and not count > 1": "if ((self.fence)):",
    "without not: count > 1": "and bool(count > 1):",
    "the other limit: (count) >= (1)": "not (count) >= (1):",
    "without self.fence.record(*works, blocks=False)": "            pass\n",
    "blocks=True": "blocks=True)",
}


def test_a_mutant_leaves_out_a_statement_context_branch_or_condition_or_turns_a_flag() -> None:
    found = {mutant.what: mutant for mutant in mutants_of(SOURCE)}
    assert found.keys() == WANTED.keys()
    for what, text in WANTED.items():
        assert found[what].function == "Slot.close" and text in found[what].text


def test_mutants_of_a_file_can_be_tried() -> None:
    for file in ("core/slots", "comm/nccl"):
        for mutant in mutants_of((ROOT / "streamshard" / f"{file}.py").read_text()):
            ast.parse(mutant.text)
        assert likely_tests(file)

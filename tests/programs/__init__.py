"""Random training programs: what a user may do with a model, in any legal order, beside plain torch doing the same.

A `Program` is a list of operations, each done by all ranks: by plain torch, one process of which plays every rank in
turn, then by StreamShard. After each operation, losses and errors are compared; at `Check` and at the end gradients
and weights. What StreamShard refuses, and plain torch does not, is left out: other tests are of that.
"""

from __future__ import annotations

from tests.programs.generate import Program, programs
from tests.programs.run import run_program, run_program_in_host_memory

__all__ = ["Program", "programs", "run_program", "run_program_in_host_memory"]

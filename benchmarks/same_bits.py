"""Losses, norms and weights on further numbers of ranks, against one rank, to the bit.

    python benchmarks/same_bits.py [--ranks 6 8] [--output FILE]

Trains in all ways of `tests/test_same_bits.py`, with 24 micro-batches a step: 24 is a multiple of each number of ranks.
The exit code counts the ways that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.ranks import open_pool
from tests.test_same_bits import CASES, merged, run

MICRO_BATCHES = 24


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[6, 8], help="numbers of ranks; divisors of 24")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="ways to train")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    args = parser.parse_args()
    if wrong := [count for count in args.ranks if count < 1 or MICRO_BATCHES % count]:
        parser.error(f"--ranks {wrong[0]}: wanted a divisor of {MICRO_BATCHES}")
    results = {}
    with open_pool(run_timeout_s=300.0) as pool:
        for name in args.only:
            counts = (1, *args.ranks)
            alone, *others = (merged(pool(each).run(run, name, micro_batches=MICRO_BATCHES)) for each in counts)
            results[name] = [count for count, other in zip(args.ranks, others, strict=True) if other != alone]
            print(f"{name:40} {'differs on ' + str(results[name]) if results[name] else 'equal'}", flush=True)
    if args.output:
        args.output.write_text(json.dumps({"ranks": args.ranks, "differ": results}, indent=2) + "\n")
    return sum(map(bool, results.values()))


if __name__ == "__main__":
    sys.exit(main())

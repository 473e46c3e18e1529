"""The command that tries programs by hand: see `tests.programs`."""

from __future__ import annotations

import argparse
import itertools
import time
import traceback
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs import Program, programs, run_program
from tests.ranks import RankContext, RankPool, open_pool


def _outcome(context: RankContext, program: Program) -> tuple[Counter[str], str]:
    """What `run_program` returns, or its traceback: rank processes that go on make shrinking fast."""
    try:
        return run_program(context, program), ""
    except Exception:
        return Counter(), traceback.format_exc()


def _search(pool: RankPool, number: int, longest: int) -> Counter[str]:
    """Try 100 programs. Raises for the smallest that fails, which hypothesis prints."""
    done: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(longest))
    def attempt(program: Program) -> None:
        outcomes = pool(program.ranks).run(_outcome, program)
        done.update(outcomes[0][0])
        assert not any(text for _, text in outcomes), "\n".join(text for _, text in outcomes)

    attempt()
    return done


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Try random training programs against plain torch.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=16, help="phrases of operations in a program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * arguments.minutes
    done: Counter[str] = Counter()
    with open_pool(run_timeout_s=30.0, group_timeout_s=20.0) as pool:
        for number in itertools.count(arguments.seed):
            if time.monotonic() > deadline:
                break
            done.update(_search(pool, number, arguments.longest))
    print("no program failed; operations that were")
    print("\n".join(f"  {kind}: {count}" for kind, count in sorted(done.items())))


if __name__ == "__main__":
    from tests.programs import __main__ as itself  # functions of __main__ have no name that rank processes could import

    itself.main()

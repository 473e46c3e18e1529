"""The command that tries programs by hand: see `tests.programs`."""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import FlakyFailure

from tests.programs import Program, programs, run_program
from tests.ranks import RankContext, RankPool, open_pool

SHRINKING_S = 60.0


class _Failed(Exception):
    """A program that fails, so that hypothesis shrinks it."""


def _outcome(context: RankContext, program: Program) -> tuple[Counter[str], str]:
    """What `run_program` returns, or the story of its failure: rank processes that go on make shrinking fast."""
    try:
        return run_program(context, program), ""
    except Exception:
        return Counter(), traceback.format_exc()


def _search(pool: RankPool, start: int, deadline: float, longest: int) -> tuple[Counter[str], Program | None, str]:
    """Try programs until the deadline or a failure: what was done, the smallest program that fails, its story."""
    done: Counter[str] = Counter()
    smallest: Program | None = None
    story = ""

    @seed(start)
    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(longest))
    def attempt(program: Program) -> None:
        nonlocal smallest, story, deadline
        if time.monotonic() > deadline:
            if program == smallest:
                raise _Failed
            return
        done["programs"] += 1
        try:
            outcomes = pool(program.ranks).run(_outcome, program)
        except AssertionError as error:  # a rank has died or hangs
            outcomes = [(Counter(), str(error))]
        stories = [story for _, story in outcomes if story]
        done.update(outcomes[0][0])
        if stories:
            if smallest is None:
                print(
                    f"seed {start}: a program fails; making it smaller\n{chr(10).join(stories)}\n{program!r}",
                    flush=True,
                )
                deadline = time.monotonic() + SHRINKING_S
            smallest, story = program, "\n".join(stories)
            raise _Failed

    try:
        attempt()
    except _Failed:
        pass
    except FlakyFailure:
        story = f"it did not fail again, but once:\n{story}"
    return done, smallest, story


def main(arguments: Iterable[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Try random training programs against plain torch.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=16, help="phrases of operations in a program")
    given_ = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * given_.minutes
    done: Counter[str] = Counter()
    with open_pool(run_timeout_s=30.0, group_timeout_s=20.0) as pool:
        for start in _from(given_.seed):
            if time.monotonic() > deadline:
                break
            more, smallest, story = _search(pool, start, deadline, given_.longest)
            done.update(more)
            if smallest is not None:
                print(f"seed {start}, after {done['programs']} programs:\n{story}\n\n{smallest!r}")
                return 1
    print(f"{done.pop('programs', 0)} programs, none failed; operations that were")
    print("\n".join(f"  {kind}: {count}" for kind, count in sorted(done.items())))
    return 0


def _from(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


if __name__ == "__main__":
    from tests.programs import __main__ as itself  # functions of __main__ have no name that rank processes could import

    raise SystemExit(itself.main())

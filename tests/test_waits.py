"""Each line that waits because of a rule (``# rule 5``) is needed: without it the race detector names the rule.

A new line needs a way of training, in `_RUNS`, that has a race without it, or an entry in `_UNSEEN`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import streamshard
from streamshard import LocalSGD, StreamShard
from streamshard.comm.streams import Rule
from streamshard.core import late_step
from tests.optim.test_step_in_backward import step_in_hooks
from tests.races import detect_races
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import adamw, mesh_2d, stack_step, train_stack
from tests.scenarios import BF16, RoutedStack, train, without_waits
from tests.simulated import simulated_device
from tests.training.test_simulated_device import change_after_skipping

PACKAGE = Path(streamshard.__file__).parent
_WAIT = re.compile(r"\s*(.*\.wait\(.*\))  # rule (\d)")
_ELSEWHERE = ("optim/rounds",)  # test_each_wait_of_a_round_is_needed
# The detector does not see what these guard. Tests of events do, of chunks, factors, building and others' copies in
# host memory, in test_offload.
_UNSEEN = (
    "core/host: self._written.wait() 1",
    "core/host: self._written.wait() 2",
    "core/host: stored.wait() 1",
    "core/host: self._computed.wait() 1",
    # For writes through `.data` between a forward and its backward: test_forward_and_backward_wait_once_each.
    "core/backward: engine.weights_written.wait() 1",
    # For flags that another rank still reads: after an error, or on CPUs without an all-gather between two backwards.
    "core/reductions: self._arrived[0].wait() 1",
    "core/reductions: readers.wait() 1",
    # With a single unit only: test_offload.
    "core/host: self._stored[unit.index].wait() 1",
    "core/host: self._stored[unit.index].wait() 2",
)


def _lines() -> Iterator[tuple[str, str, int, int]]:
    """File, statement with its place among equal ones, line and rule."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file, counts = path.relative_to(PACKAGE).with_suffix("").as_posix(), Counter[str]()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if (found := _WAIT.match(line)) and file not in _ELSEWHERE:
                counts[found[1]] += 1
                yield file, f"{file}: {found[1]} {counts[found[1]]}", number, int(found[2])


def _accumulating(model: Any, context: RankContext) -> None:
    for step in range(2):
        with model.no_sync():
            for last in (0, 1, 0):
                model.route = range(2 - last)
                stack_step(model, context.call(step))
        stack_step(model, context.call(step))
        model.zero_grad()


def _local(model: Any, context: RankContext) -> None:
    train_stack(model, LocalSGD(adamw(model), model, period=1, warmup_steps=1), context)


def _stepping(model: Any, context: RankContext) -> None:
    step_in_hooks(model)
    for step in range(2):
        stack_step(model, context.call(step))


# By file, the lines that wait.
WAITS = {"core/backward": 1, "core/engine": 1, "core/forward": 1, "core/host": 17, "core/outer_shards": 3}
WAITS |= {"core/reductions": 7, "core/replicas": 3, "core/slots": 3, "core/unit": 2}

_SLOTS: dict[str, Any] = {"weight_slots": "all"}
_OFFLOAD: dict[str, Any] = {"offload": "state"}
_ON_MESHES = ("core/replicas", "core/outer_shards")
_PLAIN, _ROUTED, _ADDING = "two layers", "layers unused on some ranks", "a kept graph"
# By file: functions or scenarios, and their settings, of which one has a race without the wait.
_RUNS: dict[str, tuple[tuple[Any, dict[str, Any]], ...]] = {
    "core/engine": ((change_after_skipping, {}),),
    "core/forward": ((_PLAIN, {}),),
    "core/host": ((_PLAIN, _OFFLOAD), (change_after_skipping, _OFFLOAD)),
    "core/outer_shards": ((_PLAIN, {}), (_ADDING, {}), (_ROUTED, {})),
    "core/reductions": ((_PLAIN, {}), (_accumulating, _SLOTS), (_stepping, {})),
    "core/replicas": ((_ADDING, {}), (_local, {})),
    "core/slots": ((_PLAIN, {}), (_PLAIN, _SLOTS), (_ROUTED, {})),
    "core/unit": ((_PLAIN, {}), (_PLAIN, _OFFLOAD)),
}


def _broken(context: RankContext, run: Any, settings: dict[str, Any], file: str, line: int) -> set[Rule | None]:
    """The rules that training breaks without the wait in this line, on any rank."""
    settings = {"precision": BF16, **settings}
    if file in _ON_MESHES:
        settings["mesh"] = mesh_2d(2, 2)
        settings["shard_over_replicas"] = file == "core/outer_shards"
    with simulated_device(), mock.patch.object(late_step, "CHUNK_NUMEL", 100):
        model: Any = StreamShard(RoutedStack(2 if run in (_accumulating, _local, _stepping) else 5), **settings)
        without = without_waits(model, (str(PACKAGE / f"{file}.py"), line))
        with without, detect_races(model, raise_at_exit=False) as races:
            train(model, run, context) if isinstance(run, str) else run(model, context)
    return set().union(*everywhere({race.rule for race in races.found}))


_SEEN = [
    (4 if file in _ON_MESHES else 2, file, number, rule)
    for file, statement, number, rule in _lines()
    if statement not in _UNSEEN
]


@on_ranks()
@pytest.mark.parametrize(("world_size", "file", "number", "rule"), _SEEN)
def test_each_line_that_waits_is_needed(context: RankContext, file: str, number: int, rule: int) -> None:
    """`test_matrix`, `test_replicas` and `test_offload` break no rule with it."""
    assert any(Rule(rule) in _broken(context, *way, file, number) for way in _RUNS[file])


def test_no_wait_is_lost() -> None:
    """A line that goes, with its mark, changes a number. One that comes is named here too."""
    assert {*_UNSEEN} <= {statement for _, statement, *_ in _lines()}
    assert Counter(file for file, *_ in _lines()) == WAITS

"""Each line that waits because of a rule (``# rule 5``) is needed: without it the race detector names the rule.

A new line needs a way of training, in `_RUNS`, that has a race without it, or an entry in `_UNSEEN`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import streamshard
from streamshard import LocalSGD, StreamShard
from streamshard.comm.streams import Rule
from streamshard.core import late_step
from tests.models import vector_batch
from tests.optim.test_step_in_backward import step_in_hooks
from tests.races import detect_races
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import Call, adamw, stack_step, train_stack
from tests.scenarios import BF16, RoutedStack, dropping, train
from tests.simulated import simulated_device

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
    # Implied by that of the forward: weights that change between a forward and its backward are refused.
    "core/backward: engine.weights_written.wait() 1",
    # Implied by the waits for staging and chunks: there are two of each, and other units between.
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


def _in_a_way(scenario: str, model: Any, context: RankContext) -> None:
    train(model, scenario, context)


_plain, _routed, _adding = (
    functools.partial(_in_a_way, name) for name in ("two layers", "layers unused on some ranks", "a kept graph")
)


def _skipping(model: Any, context: RankContext) -> None:
    """Weights change after a forward that has skipped layers, which were all-gathered all the same."""
    with torch.no_grad():
        for route in (range(5), [0], [0]):
            model.route = route
            model(vector_batch(0, context.rank))
            for param in model.parameters():
                param.mul_(0.5)


def _accumulating(model: Any, context: RankContext) -> None:
    for step in range(2):
        with model.no_sync():
            for last in (0, 1, 0):
                model.route = range(2 - last)
                stack_step(model, Call(step, context.rank, 2, 1.0))
        stack_step(model, Call(step, context.rank, 2, 1.0))
        model.zero_grad()


def _local(model: Any, context: RankContext) -> None:
    train_stack(model, LocalSGD(adamw(model), model, period=1, warmup_steps=1), context)


def _stepping(model: Any, context: RankContext) -> None:
    step_in_hooks(model)
    for step in range(2):
        stack_step(model, Call(step, context.rank, context.world_size, 1.0))


# By file, the lines that wait.
WAITS = {"core/backward": 1, "core/engine": 1, "core/forward": 1, "core/host": 17, "core/outer_shards": 3}
WAITS |= {"core/reductions": 5, "core/replicas": 3, "core/slots": 3, "core/unit": 2}

Run = Callable[[Any, RankContext], None]
_SLOTS: dict[str, Any] = {"weight_slots": "all"}
_OFFLOAD: dict[str, Any] = {"offload": "state"}
_ON_MESHES = ("core/replicas", "core/outer_shards")
# By file: the ways and their settings, of which one has a race without the wait.
_RUNS: dict[str, tuple[tuple[Run, dict[str, Any]], ...]] = {
    "core/engine": ((_skipping, {}),),
    "core/forward": ((_plain, {}),),
    "core/host": ((_plain, _OFFLOAD), (_skipping, _OFFLOAD)),
    "core/outer_shards": ((_plain, {}), (_adding, {}), (_routed, {})),
    "core/reductions": ((_plain, {}), (_accumulating, _SLOTS), (_stepping, {})),
    "core/replicas": ((_adding, {}), (_local, {})),
    "core/slots": ((_plain, {}), (_plain, _SLOTS), (_routed, {})),
    "core/unit": ((_plain, {}), (_plain, _OFFLOAD)),
}


def _broken(context: RankContext, run: Run, settings: dict[str, Any], file: str, line: int) -> set[Rule | None]:
    """The rules that training breaks without the wait in this line, on any rank."""
    settings = {"precision": BF16, **settings}
    if file in _ON_MESHES:
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        settings["shard_over_replicas"] = file == "core/outer_shards"
    with simulated_device(), mock.patch.object(late_step, "CHUNK_NUMEL", 100):
        model: Any = StreamShard(RoutedStack(5 if run in (_plain, _skipping, _adding, _routed) else 2), **settings)
        with dropping(model, (str(PACKAGE / f"{file}.py"), line)), detect_races(model, raise_at_exit=False) as races:
            run(model, context)
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

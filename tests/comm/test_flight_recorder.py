"""If ranks do different things, all raise soon, with the same message, on every transport."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
import queue
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import streamshard.comm.flight_recorder as recorder
from streamshard import StreamShard, save_checkpoint
from streamshard.checkpoint.save import background_ranks
from streamshard.comm import watchdog
from streamshard.comm.flight_recorder import FlightRecorder, RecordKind, Shown, describe_difference
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import IssueLog
from streamshard.errors import CommunicationError, log
from tests.counts import engine_inside
from tests.faults import Trouble, failing
from tests.models import vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import mesh_2d
from tests.scenarios import BF16, RoutedStack, over_sockets

TRANSPORTS = ["shared memory", "sockets"]


def _model(over: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    with over_sockets() if over == "sockets" else contextlib.nullcontext():
        return StreamShard(RoutedStack(), **{"precision": BF16, **settings})


def _save(model: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(directory, model)


# What one rank does before each step, and how the error tells the first difference: what comes after follows from it.
WAYS: dict[str, tuple[int, Callable[[Any], object], str]] = {
    "layers in another order": (1, lambda model: setattr(model, "route", [4, 3, 2, 1, 0]),
                                "rank 0 reduces the gradients of 'layers.4', rank 1 gathers 'layers.2'"),
    "a norm on one rank": (0, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                           "rank 0 sums over all ranks (a norm, a check), rank 1 begins a forward"),
    "a save on one rank": (0, _save,
                           "rank 0 exchanges objects (set-up, an agreement in a forward, save_checkpoint, "
                           "load_checkpoint, an export), rank 1 begins a forward"),
}  # fmt: skip


def _caught(context: RankContext, over: str, way: str) -> str:
    alone, act, _ = WAYS[way]
    with mock.patch.object(recorder, "PATIENCE_S", 0.1):
        model = _model(over)
        with pytest.raises(CommunicationError, match="Join") as caught:
            for step in range(3):
                if context.rank == alone:
                    act(model)
                model(vector_batch(step, context.rank)).sum().backward()
    with pytest.raises(CommunicationError, match="is not possible any more: .*ranks do not do the same"):
        model(vector_batch(0, context.rank))
    with pytest.raises(CommunicationError, match="an earlier error, .* start the processes again"):
        _model(over)
    return str(caught.value).partition("ranks do not do the same: ")[2].partition(". All ranks")[0]


@pytest.mark.parametrize(
    ("way", "over"), [*zip(WAYS, TRANSPORTS * len(WAYS), strict=False), ("layers in another order", "sockets")]
)
def test_ranks_that_differ_raise_and_say_what_each_does(ranks: Any, over: str, way: str) -> None:
    """In the same words on both, long before the process group's timeout. Afterwards nothing waits any more."""
    *_, told = WAYS[way]
    if over == "sockets":  # an all-gather comes before the reduction of the unit before
        told = told.replace("gathers 'layers.2'", "gathers 'layers.1'")
    assert ranks(2).run(_caught, over, way) == 2 * [told]


@on_ranks(2)
def test_a_rank_that_evaluates_while_another_one_trains_and_leaves_out_layers_raises(context: RankContext) -> None:
    """It waits until the other rank has read its weights, which goes on to meet it at the end of a first pass."""
    model = _model("shared memory", precision="fp32", weight_slots="all")
    model.route = [] if context.rank else model.route
    raises = pytest.raises(CommunicationError, match="rank 0 begins a forward, rank 1 exchanges objects")
    with mock.patch.object(recorder, "PATIENCE_S", 0.1), torch.set_grad_enabled(context.rank == 1), raises:
        for step in range(2):
            model(vector_batch(step, context.rank))


@on_ranks(4)
def test_ranks_that_differ_raise_if_state_is_cut_over_replicas(context: RankContext) -> None:
    """Also where they wait inside a replica, or between replicas: a rank has caught an exception, and repeats."""
    model: Any = StreamShard(RoutedStack(), mesh=mesh_2d(2, 2), shard_over_replicas=True)
    told = "ranks do not do the same: .*, rank 3 begins a forward"
    with mock.patch.object(recorder, "PATIENCE_S", 0.1), pytest.raises(CommunicationError, match=told):
        for step in range(3):
            is_bad = (step, context.rank) == (1, 3)
            fails = failing(model.layers[2], backward=False) if is_bad else contextlib.nullcontext()
            with contextlib.suppress(Trouble), fails:
                model(vector_batch(step, context.rank)).sum().backward()


def _another_model_on_one_rank(rank: int, models: Sequence[Any]) -> None:
    if rank == 0:
        _model("shared memory")
    models[0](vector_batch(0, rank))


def _in_another_order(rank: int, models: Sequence[Any]) -> None:
    """Messages of equal models would fit each other; of a larger model they would end the process."""
    for model in models if rank == 0 else reversed(models):
        model(vector_batch(0, rank))


def _one_inside_the_other(rank: int, models: Sequence[Any]) -> None:
    """By one rank, after all gathers of the outer model have begun. At its end each rank waits until all have read."""
    outer, inner = models
    x = vector_batch(0, rank)
    if rank == 0:
        outer.layers[0].register_forward_hook(lambda *_: inner(x) and None)
    with torch.no_grad():  # the first passes with gradients meet at their end
        outer(x)
        inner(x)


def _first_layers_left_out(rank: int, models: Sequence[Any]) -> None:
    """In a backward through both models, by one rank. It reduces these layers last, behind the inner model's."""
    inner, outer = models
    for step in range(3):
        if step == 2 and rank == 1:
            outer.route = range(2, 5)
        x = vector_batch(step, rank)
        outer(x * inner(x)).sum().backward()


def _caught_in_models(
    context: RankContext, over: str, way: Callable[[int, Sequence[Any]], None], **settings: Any
) -> str:
    patience = {"PATIENCE_S": 0.1, "_SHOW_AFTER_S": 0.2, "_REPORT_AFTER_S": 0.5}
    models = [_model(over, **settings), _model(over, **settings)]  # before: a busy machine needs more patience
    with mock.patch.multiple(recorder, **patience), pytest.raises(CommunicationError) as caught:
        way(context.rank, models)
    return str(caught.value)


def test_ranks_that_are_in_different_models_raise(ranks: Any) -> None:
    """A teacher and a student, an actor and a critic: each rank would wait for the other one until the timeout."""
    in_fp32: dict[str, Any] = {"precision": "fp32", "weight_slots": "all"}
    for over, way, does in (
        ("shared memory", _first_layers_left_out, "of another model"),
        ("shared memory", _one_inside_the_other, "of another model"),
        ("sockets", _in_another_order, "of another model"),
        ("sockets", _another_model_on_one_rank, "has started another"),
    ):
        settings = in_fp32 if way is _one_inside_the_other else {}
        told = ranks(2).run(_caught_in_models, over, way, **settings)
        assert any(does in each and "Join" in each for each in told), told  # the other one may see a closed connection


@on_ranks(2)
def test_a_rank_that_is_only_late_is_waited_for(context: RankContext) -> None:
    """However long: it may write a checkpoint. Looked at many times here, in the middle of everything."""
    with mock.patch.object(recorder, "PATIENCE_S", 0.02):
        model = _model("shared memory")
        model.layers[1].register_forward_hook(lambda *_: time.sleep(0.2 * context.rank))
        for step in range(2):
            model(vector_batch(step, context.rank)).sum().backward()
    assert engine_inside(model).ranks.recorder.difference is None


# By transport: what one rank does, and the other library's collective that the other one is in.
ALONE: dict[str, tuple[Callable[[Any], object], str, Any]] = {
    "shared memory": (lambda model: next(model.parameters()).norm(), "all_reduce", torch.zeros(1)),
    "sockets": (lambda model: save_checkpoint(tempfile.mkdtemp(), model), "broadcast_object_list", [None]),
}


@on_ranks(2)
@pytest.mark.parametrize("over", ALONE)
def test_a_rank_alone_raises_the_line_of_the_others_who_log_it_first(context: RankContext, over: str) -> None:
    """The error of the other library would name neither. The user's group stays open until its ranks have been told."""
    alone, elsewhere, given = ALONE[over]
    with _warnings() as told:
        model = _model(over)
        model(vector_batch(0, context.rank)).sum().backward()
        missing = rf"which rank 0 has not called: dist\.{elsewhere}\(\) in {__name__.split('.')[-1]}\.py, line \d+: "
        if context.rank == 0:
            with pytest.raises(CommunicationError, match=f"rank 1 has not come: .*{missing}"):
                alone(model)
        else:
            with pytest.raises(RuntimeError, match="pair closure"):
                getattr(dist, elsewhere)(given)
            stories = [told.get_nowait() for _ in range(told.qsize())]
            first = next(story for story in stories if "waited for" not in story)  # a machine may be slow
            assert re.match(f"rank 1: rank 0 has failed: .*: rank 1 has not come: .*{missing}", first), stories


@on_ranks(2)
@pytest.mark.parametrize("over", TRANSPORTS)
def test_a_rank_whose_model_is_gone_ends_the_others_wait(context: RankContext, over: str) -> None:
    """It has caught an error, and left the function that held the model."""
    with mock.patch.object(recorder, "PATIENCE_S", 0.1):
        model = _model(over)
        model(vector_batch(0, context.rank)).sum().backward()
        if context.rank == 1:
            del model
            gc.collect()
        else:
            gone = r"rank 1 has not come: its model is gone \(last: it ends a backward\), and it is at dist.barrier"
            with pytest.raises(CommunicationError, match=gone):
                model.clip_grad_norm_(1.0)
        dist.barrier()  # of the user's group, which stays open


@contextlib.contextmanager
def _warnings() -> Iterator[queue.Queue[str]]:
    told: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: told.put(record.getMessage())  # type: ignore[method-assign]
    constants = {"PATIENCE_S": 0.05, "_REPORT_AFTER_S": 0.15, "_SHOW_AFTER_S": 0.1}
    log.addHandler(handler)
    try:
        with mock.patch.multiple(recorder, **constants):
            yield told
    finally:
        log.removeHandler(handler)


def _backward_and_note(model: Any, context: RankContext) -> None:
    model(vector_batch(0, context.rank)).sum().backward()
    engine_inside(model).ranks.recorder.log.add(RecordKind.BROADCAST)


@on_ranks(2)
@pytest.mark.parametrize("ahead", ["another library's collective", "the save itself"])
def test_a_rank_may_come_late_to_a_background_save_that_is_apart(context: RankContext, ahead: str) -> None:
    """Rank 1 is late with the one, and early with the other: rank 0 waits for it, and warns."""
    store, timeout = dist.distributed_c10d._get_default_store(), datetime.timedelta(minutes=2)
    model = _model("sockets")  # before the warnings
    with _warnings() as told:
        ranks = engine_inside(model).ranks
        beside = background_ranks(ranks)
        for each in (ranks, beside):
            each.gather_objects("meet", None)
        reduce, save = partial(dist.all_reduce, torch.ones(1)), partial(beside.gather_objects, "save", None)
        late, early = (beside, reduce) if ahead.startswith("another") else (ranks, save)
        waiting, met = Thread(target=late.gather_objects, args=("wait", None)), Thread(target=early)
        if context.rank == 0:
            store.wait([f"ahead: {ahead}"], timeout)
            waiting.start()
            for _ in range(4):
                while "rank 1 has not come: it has issued nothing" not in told.get(timeout=60):
                    pass
            store.set(f"told: {ahead}", "")
            met.start()
        else:
            met.start()
            store.set(f"ahead: {ahead}", "")
            store.wait([f"told: {ahead}"], timeout)
            waiting.start()
        for thread in (met, waiting):
            thread.join()
        assert ranks.gather_objects("meet", context.rank) == beside.gather_objects("meet", context.rank) == [0, 1]


def test_a_rank_is_in_another_librarys_collective_only_where_it_waits_for_all_ranks() -> None:
    """torch counts messages between two ranks, and calls in other threads, too."""
    entry = (0, RecordKind.BROADCAST, 0)
    for place, is_found in (
        ("dist.all_reduce() in train.py, line 3: dist.all_reduce(loss)", True),
        ("train.py, line 9: score(predictions)", False),
        ("dist.recv() in train.py, line 4: dist.recv(predictions, peer)", False),
        ("dist.isend() in train.py, line 4: dist.isend(predictions, 0)", False),
    ):
        logs = {0: Shown({0: entry}, 1, 0.0, 0), 1: Shown({}, 0, 0.0, 1, place)}
        assert (FlightRecorder(None)._find_difference(logs) is not None) is is_found, place


@on_ranks(2)
def test_an_idle_rank_on_a_device_reports_ranks_that_have_issued_less(context: RankContext) -> None:
    """No host waits there. A rank that is behind, or has company, is silent."""
    with _warnings() as told:
        ranks = RankGroup(dist.group.WORLD, streams=mock.Mock(has_streams=True))
        ranks.recorder.names = ("the root unit",)
        ranks.recorder.log.add(RecordKind.BROADCAST)
        if context.rank == 0:
            ranks.recorder.log.add(RecordKind.REDUCE, 0)
            story = told.get(timeout=60)
            while "a tensor of rank 0" not in story:
                story = told.get(timeout=60)
            assert "(last: it reduces the gradients of 'the root unit'): rank 1 has not come" in story
            dist.barrier()
        else:
            dist.barrier()
            assert told.empty()


@pytest.mark.parametrize("over", TRANSPORTS)
def test_the_error_after_the_groups_timeout_names_the_operation_and_the_missing_rank(ranks: Any, over: str) -> None:
    """Also through sockets, whose own error names neither. Rank 1 is in a barrier of torch's own; the log says so."""
    ranks(2, group_timeout_s=1.0).run(_times_out, over)


def _times_out(context: RankContext, over: str) -> None:
    apart = dist.new_group(timeout=datetime.timedelta(seconds=60))
    with _warnings() as told, mock.patch.object(recorder, "_LOGS_WITHIN_S", 0.3):
        model = _model(over)
        _backward_and_note(model, context)
        if context.rank == 0:
            with pytest.raises(CommunicationError) as caught:
                next(model.parameters()).norm()
            assert re.match("a sum over all ranks failed on rank 0 of 2: .*rank 1 has not come", str(caught.value))
            assert "a tensor of rank 0" in str(caught.value)
            warnings = [told.get_nowait() for _ in range(told.qsize())]
            missing = r"a sum over all ranks \(last: .*\): rank 1 has not come: it has issued nothing"
            assert any(re.match(rf"rank 0: waited for \d+ s in {missing}", each) for each in warnings), warnings
        dist.barrier(apart)  # where rank 1 is meanwhile


@on_ranks(2)
def test_another_model_of_the_same_ranks_ends_with_the_first_failure(context: RankContext) -> None:
    model, teacher = _model("sockets"), _model("sockets")
    if context.rank == 1:
        with pytest.raises(ValueError, match="bad"), engine_inside(teacher).ranks.waiting("the gather of", "layers.1"):
            raise ValueError("bad")
    else:
        said = "rank 1 has failed: the gather of 'layers.1' ended with ValueError: bad"
        with pytest.raises(CommunicationError, match=said):
            model(vector_batch(0, context.rank))


NAMES = ("the root unit", "layers.0")


def _log(*entries: tuple[RecordKind, int]) -> IssueLog:
    log = IssueLog()
    for kind, tag in entries:
        log.add(kind, tag)
    return log


def _differ(*logs: IssueLog | None) -> str | None:
    return describe_difference({rank: Shown.of(log) for rank, log in enumerate(logs) if log is not None}, NAMES)


def test_the_last_entry_is_told_although_another_one_comes_meanwhile() -> None:
    """The watchdog's thread reads the log while this rank goes on."""
    log, entries = _log((RecordKind.GATHER, 1)), IssueLog.entries

    def entries_then_another(log: IssueLog) -> Any:
        found = entries(log)
        log.add(RecordKind.REDUCE, 1)
        return found

    with mock.patch.object(IssueLog, "entries", entries_then_another):
        assert Shown.of(log).last(NAMES) == "gathers 'layers.0'"


def test_a_rank_that_is_behind_does_not_differ() -> None:
    """By more than a log holds, too. Two others may differ although this rank is behind both."""
    entries = [(RecordKind.GATHER, number % 7) for number in range(3000)]
    ahead, behind = _log(*entries), _log(*entries[:1500])
    assert _differ(ahead, behind, _log()) is None
    assert _differ(ahead, _log(*entries[:2900], (RecordKind.REDUCE, 1)), behind) is not None
    assert _log(*entries[1:]).digest != ahead.digest == _log(*entries).digest


@on_ranks(2)
def test_an_idle_rank_shows_its_log_and_takes_it_back_when_it_goes_on(context: RankContext) -> None:
    """An old log would look as if the rank stood in another library's collective."""
    own = FlightRecorder(dist.group.WORLD)
    for show_after_s, is_shown in ((0.0, True), (60.0, False)):
        with mock.patch.object(recorder, "_SHOW_AFTER_S", show_after_s):
            if context.rank == 1:
                own.log.add(RecordKind.SUM)
                own.look(mock.Mock())
            dist.barrier()
            if context.rank == 0:
                assert (1 in own._read()) == is_shown
            dist.barrier()


def test_what_the_watchdog_has_found_explains_an_error_at_once() -> None:
    """Other logs may have changed since, and their ranks may be gone."""
    own = FlightRecorder(None)
    own.difference = "rank 0 gathers 'layers.0', rank 1 reduces it"
    with mock.patch.object(own, "_read", side_effect=AssertionError):
        assert own.explain(RuntimeError("a closed connection")) == own.difference


@on_ranks(2)
def test_an_error_in_a_forked_child_is_not_the_ranks(context: RankContext) -> None:
    """The child must not talk over its parent's connection to the store, at its end either."""
    ranks = RankGroup(dist.group.WORLD)
    if context.rank == 1:
        child = os.fork()
        if child == 0:
            sys.last_value = ValueError("of the child alone")
            watchdog._watchdog.end()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    ranks.gather_objects("wait", None)
    assert ranks.recorder.read_failure() is None

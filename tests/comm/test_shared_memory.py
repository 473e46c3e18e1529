"""Ranks of one machine read each other's memory; where they cannot, gloo carries the same numbers."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import streamshard.comm.arena as arena
from streamshard import Precision, StreamShard
from streamshard.comm.arena import Counter, State, offer_memory
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.groups import host_group_of
from streamshard.comm.ranks import Ranks
from streamshard.comm.shared_memory import SharedMemoryTransport, _leave
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.errors import CommunicationError
from streamshard.inspect import engine_inside
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, RankFailure, RankPool, await_groups_of_before, on_ranks, open_pool
from tests.reference import EXACT, FP32, assert_same, full_weights
from tests.scenarios import BF16, PRECISIONS, over_sockets, reference, sharded, train


def _trained(context: RankContext, scenario: str, precision: Precision, wanted: type) -> dict[str, torch.Tensor]:
    model = sharded(scenario, precision)
    assert type(engine_inside(model).ranks.transport) is wanted
    train(model, scenario, context)
    return full_weights(model)


# -- the same numbers ---------------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_sockets_and_shared_memory_train_alike_bit_by_bit(context: RankContext, precision: str) -> None:
    """Both sum in rank order. With fp32 the main weights themselves are read. On two ranks the matrix has both."""
    for scenario in ("plain", "layers unused on some ranks", "weights elsewhere"):
        with over_sockets():
            found = _trained(context, scenario, PRECISIONS[precision], PairwiseTransport)
        assert_same(found, reference(context, scenario, PRECISIONS[precision]), scenario, EXACT)


# -- votes --------------------------------------------------------------------------------------------------------


def _vote(context: RankContext, ranks: Ranks) -> None:
    """Ranks come late in turn, so that each is ahead of the others once."""
    for number in range(60):
        if number % (7 * context.world_size) == 7 * context.rank:
            time.sleep(0.01)
        voters = [rank for rank in range(context.world_size) if (number * 7 + 3 * rank) % 5 == 0]
        assert ranks.any_rank(context.rank in voters) == bool(voters)


@on_ranks(1, 2, 4)
def test_any_rank_hears_of_every_vote(context: RankContext) -> None:
    """Through memory, through gloo, and over replicas that share memory within themselves only."""
    kinds: list[tuple[type, dict[str, Any]]] = [(SharedMemoryTransport, {}), (PairwiseTransport, {})]
    if context.world_size == 4:
        kinds.append((SharedMemoryTransport, {"mesh": init_device_mesh("cpu", (2, 2))}))
    for kind, settings in kinds:
        with over_sockets() if kind is PairwiseTransport else contextlib.nullcontext():
            ranks = engine_inside(StreamShard(Stack(), **settings)).ranks
        assert context.world_size == 1 or type(ranks.transport) is kind
        _vote(context, ranks)


@on_ranks(2)
def test_all_models_of_a_group_talk_over_one_further_group(context: RankContext) -> None:
    """Which is theirs alone: no other library's collective can take the place of one of theirs."""
    before = dict(dist.distributed_c10d._world.pg_map)
    for kind in (PairwiseTransport, SharedMemoryTransport):
        with over_sockets() if kind is PairwiseTransport else contextlib.nullcontext():
            ranks = engine_inside(StreamShard(Stack())).ranks
        assert type(ranks.transport) is kind
        assert ranks.group is ranks.all_ranks is ranks.host_group
        assert {*dist.distributed_c10d._world.pg_map} - {*before} == {ranks.group}
        _vote(context, ranks)


# -- whose memory it is -------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_edited_after_a_forward_do_not_reach_a_rank_that_is_still_in_it(
    context: RankContext, precision: str
) -> None:
    """Rank 1 dawdles in its first layer; rank 0 overwrites its weights as soon as its own forward is over."""
    torch.manual_seed(5)
    model: Any = StreamShard(Stack(), precision=PRECISIONS[precision])
    x = vector_batch(0, 0)
    with torch.no_grad():
        wanted = model(x)
        model.layers[0].register_forward_hook(lambda *_: time.sleep(0.3 * context.rank))
        found = model(x)
        for param in model.parameters():
            param.fill_(float("nan"))
    assert torch.equal(found, wanted)


@on_ranks(2)
def test_weights_stepped_after_a_backward_do_not_reach_a_rank_that_is_still_in_it(context: RankContext) -> None:
    """The frozen first layer has no reduction that could hold rank 0 back."""
    torch.manual_seed(5)
    model: Any = StreamShard(Stack(), precision=FP32)
    model.layers[0].requires_grad_(False)
    gradients = []
    for seconds in (0.0, 0.3 * context.rank):
        x = vector_batch(0, 0).requires_grad_()
        out = model(x)
        model.layers[1].register_full_backward_hook(lambda *_, wait=seconds: time.sleep(wait))
        out.sum().backward()
        with torch.no_grad():
            backup = [param.clone() for param in model.parameters()]
            for param in model.parameters():
                param.fill_(float("nan"))
        gradients.append(x.grad)
        torch.distributed.barrier()
        with torch.no_grad():
            for param, value in zip(model.parameters(), backup, strict=True):
                param.copy_(value)
    assert torch.equal(gradients[0], gradients[1])
    assert bool(gradients[0].isfinite().all())


def _mappings() -> int:
    return sum("memfd:streamshard" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _open_files(what: str = "") -> int:
    await_groups_of_before()  # which have sockets
    assert dist.group.WORLD is not None
    host_group_of(dist.group.WORLD)  # has some too
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(what in os.readlink(link) for link in links)


@on_ranks(2)
def test_memory_goes_with_the_model(context: RankContext) -> None:
    """Nothing is left on disk or in this process, however many models there were, one after the other or at once."""
    before, files = _mappings(), _open_files()
    for _ in range(3):
        models = [sharded("plain", BF16) for _ in range(2)]
        for model in models:
            train(model, "plain", context, steps=1)
        assert _mappings() == before + 4
        assert _open_files() == files + 2  # one for each, to see whether the other rank lives
        assert _open_files("memfd:streamshard") == 0  # so nobody else can open them any more
        del models, model
        gc.collect()
        assert (_mappings(), _open_files()) == (before, files)


# -- where it cannot be shared ------------------------------------------------------------------------------------


def _refuse(*_: object) -> int:
    raise OSError("not here")


class _NoSuchSystem:
    def __init__(self, **replaced: object) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(os, name)


def _open_other(path: str, flags: int, **of: Any) -> int:
    """Another file than the one that was offered."""
    found = os.open(path, flags, **of)
    if not path.startswith("fd/"):
        return found
    nbytes = os.fstat(found).st_size
    os.close(found)
    offered = offer_memory(nbytes)
    assert offered is not None
    return offered[1].descriptor


def _open_unsealed(path: str, flags: int, **of: Any) -> int:
    """The same content, in a file that may become shorter."""
    found = os.open(path, flags, **of)
    if not path.startswith("fd/"):
        return found
    copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.ftruncate(copy, os.fstat(found).st_size)
    os.pwrite(copy, os.pread(found, 32, 0), 0)
    os.close(found)
    return copy


@on_ranks(2)
@pytest.mark.parametrize("what", ["memfd_create", "ftruncate", "open", "another file", "a file without seals"])
def test_one_rank_that_cannot_share_makes_all_use_sockets(context: RankContext, what: str) -> None:
    """No anonymous files, another container, a process id that means something else there; nothing is left open."""
    original: Any = arena.os
    replaced = {"another file": {"open": _open_other}, "a file without seals": {"open": _open_unsealed}}
    files, mappings = _open_files(), _mappings()
    if context.rank == 1:
        arena.os = _NoSuchSystem(**replaced.get(what, {what: _refuse}))  # type: ignore[attr-defined]
    try:
        model: nn.Module = StreamShard(Stack(), precision=FP32)
    finally:
        arena.os = original  # type: ignore[attr-defined]
    assert type(engine_inside(model).ranks.transport) is PairwiseTransport
    assert (_open_files(), _mappings()) == (files, mappings)
    model(vector_batch(0, context.rank)).sum().backward()


@on_ranks(2)
def test_a_rank_that_may_write_no_large_files_makes_all_use_sockets(context: RankContext) -> None:
    """RLIMIT_FSIZE counts for anonymous files too."""
    files, before = _open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        model: nn.Module = StreamShard(Stack(), precision=FP32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert type(engine_inside(model).ranks.transport) is PairwiseTransport
    assert _open_files() == files
    model(vector_batch(0, context.rank)).sum().backward()


@on_ranks(1)
def test_one_rank_shares_nothing(context: RankContext) -> None:
    """There is nobody to read it."""
    before = _mappings()
    model = StreamShard(Stack(), precision=FP32)
    assert _mappings() == before
    model(vector_batch(0, 0)).sum().backward()


# -- the order in which things become visible ------------------------------------------------------------------


class _Recorder:
    """Stands for memory that other ranks read, and notes what is written to it when."""

    def __init__(self, inner: Any, name: str, notes: list[tuple[str, int]]) -> None:
        self._inner, self._name, self._notes = inner, name, notes

    def __getitem__(self, key: Any) -> Any:
        return self._inner[key]

    def __setitem__(self, key: int, value: int) -> None:
        self._notes.append((self._name, key))
        self._inner[key] = value

    def __len__(self) -> int:
        return len(self._inner)


def _recording(transport: SharedMemoryTransport) -> list[tuple[str, int]]:
    notes: list[tuple[str, int]] = []
    for name in ("counters", "shards", "published", "written"):
        setattr(transport._own, name, _Recorder(getattr(transport._own, name), name, notes))
    return notes


def _shared(model: nn.Module) -> SharedMemoryTransport:
    transport = engine_inside(model).ranks.transport
    assert isinstance(transport, SharedMemoryTransport)
    return transport


@on_ranks(2)
def test_what_a_count_promises_is_there_before_it(context: RankContext) -> None:
    """Where shards lie and what was issued before, then that they are published; likewise what is reduced."""
    model = sharded("plain", BF16)
    notes = _recording(_shared(model))
    train(model, "plain", context, steps=1)
    shards = {("shards", place) for place in range(len(engine_inside(model).units))}
    for counter, promised in ((Counter.PUBLISHED, {("published", 1), *shards}), (Counter.WRITTEN, {("written", 0)})):
        first = notes.index(("counters", counter))
        assert promised <= set(notes[:first])
        later = notes[first + 1 :]
        last = len(later) - 1 - later[::-1].index(("counters", counter)) if ("counters", counter) in later else -1
        assert not {note for note in later[last + 1 :] if note[0] in {name for name, _ in promised}}


def _transports_reduction(model: nn.Module, tag: int, out: torch.Tensor) -> Reduction:
    slot = engine_inside(model).units[tag].grads.slot
    assert slot is not None
    room = slot.buffer.view(torch.float32)
    room.fill_(float(torch.distributed.get_rank() + 1))
    return Reduction(room.narrow(0, 0, 2 * out.numel()), out, torch.empty(0), ReductionMode.FP32, False, tag)


@on_ranks(2)
def test_what_all_have_written_is_summed_with_the_next_gradient(context: RankContext) -> None:
    """Without anybody waiting for it: a sum that is left for later is a sum that others wait for."""
    model = sharded("plain", FP32)
    transport, out = _shared(model), torch.zeros(4)
    if context.rank == 0:
        work = transport.start_reduce(_transports_reduction(model, 1, out))
        transport.progress()
        assert out.tolist() == [0.0] * 4  # nobody waits for rank 1
        torch.distributed.barrier()
    else:
        torch.distributed.barrier()
        work = transport.start_reduce(_transports_reduction(model, 1, out))
    torch.distributed.barrier()
    transport.progress()
    assert out.tolist() == [1.5] * 4
    assert work is not None
    work.wait()
    assert out.tolist() == [1.5] * 4


@on_ranks(2)
def test_reductions_of_different_layers_are_never_added_up(context: RankContext) -> None:
    """Both ranks are told, before anything is summed."""
    model = sharded("plain", FP32)
    transport, out = _shared(model), torch.zeros(4)
    said = "rank 0 reduces the gradients of '.*0', rank 1 .* '.*1'"
    with pytest.raises(CommunicationError, match=said), transport.ranks.guard("a sum"):
        work = transport.start_reduce(_transports_reduction(model, 1 + context.rank, out))
        assert work is not None
        work.wait()
    assert out.tolist() == [0.0] * 4


@on_ranks(2)
def test_gathers_in_different_orders_are_told_at_the_next_forward(context: RankContext) -> None:
    """Although no gather needs a partner here: through sockets, or on GPUs, it would."""
    model = StreamShard(Stack(), precision=BF16)
    model(vector_batch(0, 0))
    transport, slot = _shared(model), torch.zeros(2)
    own = transport._own.view(transport._own.shards[0], 1, torch.bfloat16)
    transport.start_gather(own, slot, 1 + context.rank)
    with pytest.raises(CommunicationError, match=r"rank 0 gathers 'layers\.0', rank 1 gathers 'layers\.1'"):
        model(vector_batch(0, 0))


# -- forks ------------------------------------------------------------------------------------------------------


def _in_child(function: Callable[[], Any], meanwhile: Callable[[], None] = lambda: None) -> Any:
    """What `function` returns in a forked child, which calls it after this process has done something."""
    (inward, outward), (ready, go) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            os.read(ready, 1)
            answer = pickle.dumps(function())
        except BaseException as error:
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        os.write(outward, answer)
        os._exit(0)
    try:
        meanwhile()
        os.write(go, b"x")
        os.close(outward)
        with open(inward, "rb") as pipe:
            return pickle.load(pipe)
    finally:
        os.waitpid(child, 0)
        for descriptor in (ready, go):
            os.close(descriptor)


def _values(model: nn.Module) -> list[list[float]]:
    return [param.detach().as_subclass(torch.Tensor).flatten().tolist() for param in model.parameters()]


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def _grads(model: Any) -> list[list[float]]:
    """This rank's pieces."""
    return [param.grad.as_subclass(torch.Tensor).flatten().tolist() for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("slots", [2, "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forked_child_has_a_snapshot_of_its_own(context: RankContext, precision: str, slots: Any) -> None:
    """Weights and gradients as they were, whatever is done afterwards; what it writes nobody else sees."""
    torch.manual_seed(3)
    model = StreamShard(Stack(), precision=PRECISIONS[precision], weight_slots=slots, grad_slots=slots)
    for _ in range(2):  # the second snapshot is not the first
        model(vector_batch(0, context.rank)).sum().backward()
        wanted = (
            _values(model),
            _grads(model),
        )

        def snapshot() -> Any:
            found = (
                _values(model),
                _grads(model),
            )
            _fill(model, 123.0)
            return found

        assert _in_child(snapshot, meanwhile=lambda: _fill(model, 7.0)) == wanted
        assert all(set(values) <= {7.0} for values in _values(model))
        full = model.full_state_dict()
        assert full is None or all(bool((value == 7.0).all()) for value in full.values())


@on_ranks(2)
def test_a_child_of_a_child_has_one_too(context: RankContext) -> None:
    """A worker that starts workers."""
    model = sharded("plain", FP32)
    _fill(model, 5.0)
    found = _in_child(lambda: (_fill(model, 6.0), _in_child(lambda: _values(model), lambda: _fill(model, 8.0)))[1])
    assert {value for values in found for value in values} == {6.0}
    assert {value for values in _values(model) for value in values} == {5.0}


@on_ranks(2)
@pytest.mark.parametrize("shares", [True, False])
def test_a_model_in_a_forked_child_says_that_it_has_no_ranks(context: RankContext, shares: bool) -> None:
    """Instead of waiting for ever, or writing into what other ranks read."""
    with contextlib.nullcontext() if shares else over_sockets():
        model = StreamShard(Stack(), precision=FP32)
    for _ in range(2):
        model(vector_batch(0, context.rank)).sum().backward()
        for use in (lambda: model(vector_batch(0, 0)), lambda: full_weights(model)):
            said = _in_child(use)
            assert said.startswith("CommunicationError: ")
            assert f"this process was forked from rank {context.rank}" in said


@on_ranks(2)
def test_arenas_are_not_handed_on_by_the_kernel(context: RankContext) -> None:
    """Not to a child that was forked behind Python's back either; nor does a child keep their memory."""
    before = _mappings()
    model = sharded("plain", BF16)
    maps = Path("/proc/self/smaps").read_text().split("memfd:streamshard")[1:]
    assert len(maps) == before + 2
    for entry in maps:
        flags = next(line for line in entry.splitlines() if line.startswith("VmFlags:"))
        assert "dc" in flags.split()
    assert _in_child(lambda: (_mappings(), _open_files("memfd:streamshard"))) == (0, 0)
    del model


@on_ranks(2)
def test_a_child_without_memory_for_a_copy_ends_as_any_other(context: RankContext) -> None:
    """It has nothing where the arena was, and nothing to do there when it ends."""
    model = sharded("plain", FP32)
    own = _shared(model)._own
    parent = os.getpid()
    with mock.patch.object(arena, "_map_private", lambda _: None):
        assert _in_child(lambda: _leave(own, parent)) is None
    assert own.state is State.TAKES_PART
    del model
    gc.collect()
    assert own.state is State.HAS_LEFT


@on_ranks(2)
def test_forks_in_a_row_share_one_copy_which_goes_with_the_next_forward(context: RankContext) -> None:
    """The workers of a DataLoader."""
    model = StreamShard(Stack(), precision=FP32)
    own = _shared(model)._own
    copies = [_in_child(lambda: None) or own._copy for _ in range(3)]
    assert copies[0] is not None and len(set(copies)) == 1
    model(vector_batch(0, context.rank))
    assert own._copy is None


# -- when a rank is gone ------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_rank_whose_model_is_gone_has_left(context: RankContext) -> None:
    """All others are told at once, whoever they were waiting for."""
    model = sharded("plain", FP32)
    train(model, "plain", context, steps=1)
    if context.rank == 2:
        torch.distributed.barrier()
        del model
        gc.collect()
        return
    torch.distributed.barrier()
    with pytest.raises(CommunicationError, match="rank 2 has left|rank [01] has failed"):
        train(model, "plain", context, steps=2)


@on_ranks(2)
def test_a_rank_that_has_failed_is_not_waited_for(context: RankContext) -> None:
    """Although it lives and has its model."""
    model = StreamShard(Stack(), precision=FP32)
    if context.rank == 0:
        with pytest.raises(KeyboardInterrupt), _shared(model).ranks.guard("something"):
            raise KeyboardInterrupt
        kept.append(model)
    else:
        with pytest.raises(CommunicationError, match="rank 0 has failed: something ended with KeyboardInterrupt"):
            model(vector_batch(0, 0))


kept: list[Any] = []  # what is to live beyond its test


@on_ranks(2)
def test_a_rank_that_did_its_part_before_it_went_is_not_missed(context: RankContext) -> None:
    """It reached the count between the look at the count and the look at the rank."""
    model = sharded("plain", FP32)
    transport = _shared(model)
    other = transport._arenas[1 - context.rank]
    count = other.counters[Counter.RETRACTED] + 1

    class Late:
        def is_running(self) -> bool:
            if context.rank == 0:
                other.counters[Counter.RETRACTED] = count
            return False

    torch.distributed.barrier()
    other.process = Late()  # type: ignore[assignment]
    if context.rank == 0:
        transport._own.counters[Counter.RETRACTED] = count
        transport._await(Counter.RETRACTED, count)
    torch.distributed.barrier()


def _die(context: RankContext, where: str) -> str:
    model: Any = StreamShard(Stack(), precision=PRECISIONS["bf16"])
    model(vector_batch(0, context.rank)).sum().backward()

    def kill(*_: object) -> None:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    transport = engine_inside(model).ranks.transport
    if where in ("forward", "backward"):
        layer = model.layers[1]
        layer.register_forward_hook(kill) if where == "forward" else layer.register_full_backward_hook(kill)
    else:
        setattr(transport, where, kill if context.rank == 1 else getattr(transport, where))
    with pytest.raises(CommunicationError) as caught:
        for _ in range(3):
            model(vector_batch(1, context.rank)).sum().backward()
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["forward", "backward", "publish_shards", "_sum_next"])
def test_a_rank_that_is_killed_ends_the_others(where: str) -> None:
    """At any point; only the one that was killed has no answer."""
    with open_pool() as pool, pytest.raises(RankFailure) as caught:
        pool(3).run(_die, where)
    assert "---- rank 1 of 3 ----\ndied with exit code -9" in str(caught.value)
    assert "rank 0 of 3" not in str(caught.value)
    assert "rank 2 of 3" not in str(caught.value)


def _wait_for_rank_1(context: RankContext) -> str:
    model: nn.Module = StreamShard(Stack(), precision=FP32)
    model(vector_batch(0, context.rank))
    store = torch.distributed.distributed_c10d._get_default_store()
    if context.rank == 1:
        store.wait(["the error"], datetime.timedelta(seconds=60))  # alive all the time
        return ""
    with pytest.raises(CommunicationError) as caught:
        model(vector_batch(1, context.rank))
    store.set("the error", "is there")
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_does_not_come_ends_in_an_error_after_the_groups_timeout() -> None:
    """It says who was waited for, and for how long."""
    pool = RankPool(group_timeout_s=4.0)
    try:
        message, _ = pool(2).run(_wait_for_rank_1)
    finally:
        pool.close()
    assert "timed out after 4 s of waiting for ranks [1]" in message
    assert "waiting for all ranks between two forwards failed on rank 0 of 2" in message

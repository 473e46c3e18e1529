"""Ranks of one machine read each other's memory; where they cannot, gloo carries the same numbers."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from streamshard import StreamShard
from streamshard.comm import flight_recorder
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.host_groups import host_group_of
from streamshard.comm.shared_memory import Counter, Offer, SharedMemoryTransport, map_memory
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.errors import CommunicationError
from tests.counts import engine_inside
from tests.launched import in_child
from tests.models import Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, RankFailure, await_groups_of_before, on_ranks, open_pool
from tests.reference import FP32, lm_step, sharded_model
from tests.scenarios import BF16, sharded, train


def _shared(model: nn.Module) -> SharedMemoryTransport:
    transport = engine_inside(model).ranks.transport
    assert isinstance(transport, SharedMemoryTransport)
    return transport


@on_ranks(2)
def test_weights_edited_after_a_forward_do_not_reach_a_rank_that_is_still_in_it(context: RankContext) -> None:
    for precision in (FP32, BF16):
        model: Any = sharded_model(precision=precision)
        x = vector_batch(0, 0)
        with torch.no_grad():
            wanted = model(x)
            model.layers[0].register_forward_hook(lambda *_: time.sleep(0.2 * context.rank))
            found = model(x)
            for param in model.parameters():
                param.fill_(float("nan"))
        assert torch.equal(found, wanted)


@on_ranks(2)
def test_a_backward_ends_after_all_ranks_have_read_weights_that_the_user_may_write(context: RankContext) -> None:
    """Inside no_sync() no reduction lets ranks wait. In fp32 all-gathers read the main weights themselves."""
    model: Any = StreamShard(Stack(), precision=FP32, grad_slots="all")
    transport = _shared(model)
    model.layers[2].register_full_backward_pre_hook(lambda *_: time.sleep(0.3 * context.rank))
    with model.no_sync():
        for step in range(2):
            model(vector_batch(step, context.rank)).square().mean().backward()
            published = transport._own.counters[Counter.PUBLISHED]
            assert all(buffers.counters[Counter.READ] >= published for buffers in transport._buffers)
            dist.barrier()


def _held() -> tuple[int, int]:
    await_groups_of_before()  # which have sockets
    host_group_of(dist.group.WORLD)  # has some too
    StreamShard(Stack())
    gc.collect()
    while any(of() is None and not recorder.has_left for of, recorder in flight_recorder.watched):
        time.sleep(0.01)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:streamshard" in line for line in maps), len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_memory_goes_with_the_model(context: RankContext) -> None:
    with mock.patch.object(flight_recorder, "PATIENCE_S", 0.02):  # the watchdog lets go of what it has found gone
        before = _held()
        for _ in range(2):
            models = [sharded("plain", BF16) for _ in range(2)]
            for model in models:
                train(model, "plain", context, steps=1)
            assert _held()[0] == before[0] + 4
            del models, model
            assert _held() == before


def _pages() -> int:
    """Bytes of all memory that this process shares. Every rank has the other ranks' files open too."""
    found = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            if "memfd:streamshard" in os.readlink(file):
                found[file.stat().st_ino] = 512 * file.stat().st_blocks
    return sum(found.values())


@on_ranks(2)
def test_pages_of_slots_that_embedding_and_head_leave_go_back(context: RankContext) -> None:
    model = sharded_model(lambda: TinyLM(TinyConfig(vocabulary=2048)))
    pages = []
    for number in range(3):
        lm_step(model, context.call(number))
        model.zero_grad()
        dist.barrier()
        pages.append(_pages())
    embedding = engine_inside(model).units[1].layout.weight_bytes
    assert engine_inside(model).plan.ends and embedding > 10 * mmap.PAGESIZE
    assert pages[0] - pages[2] >= 2 * (embedding - 2 * mmap.PAGESIZE)


@on_ranks(2)
def test_one_rank_that_cannot_share_makes_all_use_sockets(context: RankContext) -> None:
    """An old kernel, a limit on file sizes, another container. Nothing stays open."""
    before = _held()
    for call in ("memfd_create", "ftruncate", "pidfd_open", "open"):
        refuse = mock.Mock(side_effect=OSError("not here"))
        with mock.patch.object(os, call, refuse if context.rank == 1 else getattr(os, call)):
            model: nn.Module = StreamShard(Stack(), precision=FP32)
        assert type(engine_inside(model).ranks.transport) is PairwiseTransport
        model(vector_batch(0, context.rank)).sum().backward()
    del model
    assert _held() == before


def test_memory_of_processes_on_other_hosts_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another machine or container a process number means another process."""
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert map_memory(Offer("another kernel 4 1", os.getppid(), 1), 1) is None


@on_ranks(2)
def test_a_rank_sums_while_it_waits_for_an_all_gather(context: RankContext) -> None:
    model = StreamShard(Stack(), precision=BF16, keep_main_grads=True)
    transport, flat = _shared(model), engine_inside(model).units[1].flat_params[0]
    given = flat.grads, flat.main_grads, flat.scratch, flat.kind.mode, False, flat.tag, 2.0
    works = [transport.start_reduce(Reduction(*given))]
    if context.rank == 1:  # waits until rank 0 has summed, and starts the all-gather only then
        works.pop().wait()
    for work in (transport.start_gather(flat.gather), *works):
        work.wait()


@on_ranks(2)
def test_collectives_of_different_layers_are_never_mixed(context: RankContext) -> None:
    """Both ranks raise before anything is summed; all-gathers, which need no partner here, at the next forward."""
    model = sharded("plain", FP32)
    transport, out, tag = _shared(model), torch.zeros(4), 1 + context.rank
    said = "rank 0 reduces the gradients of '.*0', rank 1 .* '.*1'"
    room = engine_inside(model).units[tag].grads.slot.buffer.view(torch.float32).fill_(tag)[:8]
    work = transport.start_reduce(Reduction(room, out, torch.empty(0), ReductionMode.FP32, False, tag, 2.0))
    assert work is not None
    dist.barrier()
    transport.advance()  # has no guard that would say what differs
    with pytest.raises(CommunicationError, match=said), engine_inside(model).ranks.waiting("a sum"):
        work.wait()
    assert out.tolist() == [0.0] * 4


@on_ranks(2)
def test_a_forked_child_has_no_ranks_and_no_shared_memory(context: RankContext) -> None:
    """It neither waits for ever, nor writes into what other ranks read, nor ends the model of its parent."""
    torch.manual_seed(3)
    models = [StreamShard(Stack(), precision=FP32)]
    models[0](vector_batch(0, context.rank)).sum().backward()
    _, said = in_child(lambda: models[0](vector_batch(0, 0)))
    assert said.startswith("CommunicationError: ")
    assert f"this process was forked from rank {context.rank}" in said
    assert "memfd:streamshard" not in in_child(Path("/proc/self/maps").read_text)[1]
    memory = [weakref.ref(buffers) for buffers in _shared(models[0])._buffers]

    def let_go() -> bool:
        models.clear()
        gc.collect()
        return all(buffers() is not None for buffers in memory)  # to free them is to unmap what is there instead

    assert in_child(let_go) == (0, "True")
    assert in_child(lambda: in_child(let_go)) == (0, "(0, 'True')")
    models[0](vector_batch(1, context.rank)).sum().backward()


@on_ranks(2)
def test_a_rank_that_exits_after_its_part_is_not_reported(context: RankContext) -> None:
    """The rank reaches the count after its peer has read the count, and exits before its peer looks at the process."""
    model = sharded("plain", FP32)
    transport = _shared(model)
    other = transport._buffers[1 - context.rank]
    count = other.counters[Counter.READ] + 1

    def die_late() -> bool:
        other.counters[Counter.READ] = count
        return True

    dist.barrier()
    if context.rank == 0:
        transport._own.counters[Counter.READ] = count
        with mock.patch.object(other, "has_died", die_late):
            transport._await(Counter.READ, count)
    dist.barrier()


def _die(context: RankContext) -> None:
    model = sharded("plain", BF16)
    train(model, "plain", context, steps=1)
    if context.rank == 1:
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        engine_inside(model).ranks.transport.copy_until = lambda *_, **__: kill()
    with mock.patch.object(flight_recorder, "_LOGS_WITHIN_S", 0.2), pytest.raises(CommunicationError) as caught:
        train(model, "plain", context)
    assert "rank 1 has died: its own output may say why" in str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_is_killed_ends_the_others() -> None:
    with open_pool() as pool, pytest.raises(RankFailure) as caught:
        pool(3).run(_die)
    assert "---- rank 1 of 3 ----\ndied with exit code -9" in str(caught.value)
    assert "rank 0 of 3" not in str(caught.value) and "rank 2 of 3" not in str(caught.value)

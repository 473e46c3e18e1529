"""Ranks of one machine read each other's memory; where they cannot, gloo carries the same numbers."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import streamshard.shared_memory as shared_memory
from streamshard import Precision, StreamShard
from streamshard.errors import CommunicationError
from streamshard.inspect import engine_inside
from streamshard.shared_memory import SharedMemoryTransport
from streamshard.transport import PairwiseTransport, Transport
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, FP32, assert_same, full_weights
from tests.scenarios import BF16, PRECISIONS, SCENARIOS, over_sockets, sharded, train


def _trained(context: RankContext, scenario: str, precision: Precision, wanted: type) -> dict[str, torch.Tensor]:
    model = sharded(scenario, precision)
    assert type(engine_inside(model).transport) is wanted
    train(model, scenario, context)
    return full_weights(model)


# -- the same numbers ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_sockets_and_shared_memory_train_alike_bit_by_bit(context: RankContext, scenario: str) -> None:
    """Both sum in rank order; every way of training."""
    found = _trained(context, scenario, BF16, SharedMemoryTransport)
    with over_sockets():
        wanted = _trained(context, scenario, BF16, PairwiseTransport)
    assert_same(found, wanted, "weights", EXACT)


@on_ranks(3, 4)
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_more_ranks_and_other_precisions_do_so_too(context: RankContext, precision: str) -> None:
    """With fp32 the main weights themselves are read."""
    for scenario in ("plain", "layers unused on some ranks", "weights elsewhere"):
        found = _trained(context, scenario, PRECISIONS[precision], SharedMemoryTransport)
        with over_sockets():
            wanted = _trained(context, scenario, PRECISIONS[precision], PairwiseTransport)
        assert_same(found, wanted, scenario, EXACT)


# -- votes --------------------------------------------------------------------------------------------------------


def _vote(context: RankContext, transport: Transport) -> None:
    """Ranks come late in turn, so that each is ahead of the others once."""
    for number in range(60):
        if number % (7 * context.world_size) == 7 * context.rank:
            time.sleep(0.01)
        voters = [rank for rank in range(context.world_size) if (number * 7 + 3 * rank) % 5 == 0]
        assert transport.any_rank(context.rank in voters) == bool(voters)


@on_ranks(1, 2, 4)
def test_any_rank_hears_of_every_vote(context: RankContext) -> None:
    """Through memory, through gloo, and over replicas that share memory within themselves only."""
    kinds: list[tuple[type, dict[str, Any]]] = [(SharedMemoryTransport, {}), (PairwiseTransport, {})]
    if context.world_size == 4:
        kinds.append((SharedMemoryTransport, {"mesh": init_device_mesh("cpu", (2, 2))}))
    for kind, settings in kinds:
        with over_sockets() if kind is PairwiseTransport else contextlib.nullcontext():
            transport = engine_inside(StreamShard(Stack(), **settings)).transport
        assert context.world_size == 1 or type(transport) is kind
        _vote(context, transport)


@on_ranks(2)
def test_hosts_vote_over_gloo_where_the_group_moves_what_is_on_devices_only(context: RankContext) -> None:
    """One more group of the same ranks, made once however many models there are."""
    group, get_backend = dist.group.WORLD, dist.ProcessGroup._get_backend

    def without_cpu(self: dist.ProcessGroup, device: torch.device) -> Any:
        if self is group:
            raise RuntimeError("no backend for device type cpu")
        return get_backend(self, device)

    with over_sockets():
        transports = [engine_inside(StreamShard(Stack())).transport for _ in range(2)]
    with mock.patch.object(dist.ProcessGroup, "_get_backend", without_cpu):
        before = len(dist.distributed_c10d._world.pg_map)
        for transport in transports:
            _vote(context, transport)
        assert len(dist.distributed_c10d._world.pg_map) == before + 1


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


def _open_files() -> int:
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum("memfd:streamshard" in os.readlink(link) for link in links)


@on_ranks(2)
def test_memory_goes_with_the_model(context: RankContext) -> None:
    """Nothing is left on disk or in this process."""
    before, files = _mappings(), _open_files()
    model = sharded("plain", BF16)
    train(model, "plain", context)
    assert _mappings() == before + 2
    assert _open_files() == files + 2  # mmap keeps one each
    del model
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


@on_ranks(2)
@pytest.mark.parametrize("what", ["memfd_create", "open", "another file"])
def test_one_rank_that_cannot_share_makes_all_use_sockets(context: RankContext, what: str) -> None:
    """No anonymous files, another container, a process id that means something else there."""
    original: Any = shared_memory.os
    if context.rank == 1:
        if what == "another file":
            other = os.memfd_create("other")
            os.ftruncate(other, 1 << 24)
            shared_memory.os = _NoSuchSystem(open=lambda *_: os.dup(other))  # type: ignore[assignment]
        else:
            shared_memory.os = _NoSuchSystem(**{what: _refuse})  # type: ignore[assignment]
    try:
        model: nn.Module = StreamShard(Stack(), precision=FP32)
    finally:
        shared_memory.os = original
    assert type(engine_inside(model).transport) is PairwiseTransport
    model(vector_batch(0, context.rank)).sum().backward()


@on_ranks(1)
def test_one_rank_shares_nothing(context: RankContext) -> None:
    """There is nobody to read it."""
    before = _mappings()
    model = StreamShard(Stack(), precision=FP32)
    assert _mappings() == before
    model(vector_batch(0, 0)).sum().backward()


# -- when a rank is gone ------------------------------------------------------------------------------------------


def _wait_for_rank_1(context: RankContext) -> str:
    model: nn.Module = StreamShard(Stack(), precision=FP32)
    model(vector_batch(0, context.rank))
    if context.rank == 1:
        time.sleep(8.0)  # twice the group's timeout, alive all the time
        return ""
    with pytest.raises(CommunicationError) as caught:
        model(vector_batch(1, context.rank))
    return str(caught.value)


def test_a_rank_that_does_not_come_ends_in_an_error_after_the_groups_timeout() -> None:
    """It says who was waited for, and for how long."""
    pool = RankPool(group_timeout_s=4.0)
    try:
        message, _ = pool(2).run(_wait_for_rank_1)
    finally:
        pool.close()
    assert "timed out after 4 s of waiting for ranks [1]" in message
    assert "waiting for all ranks between two forwards failed on rank 0 of 2" in message

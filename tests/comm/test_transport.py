"""What every transport does, whatever it moves bytes through. A new one is added to `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamshard.comm.connect import connect
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.ranks import Ranks
from streamshard.comm.shared_memory import SharedMemoryTransport, share_memory
from streamshard.comm.streams import Fence, Rule, StreamName, Streams, Work
from streamshard.comm.transport import Reduction, Transport, sum_in_rank_order
from streamshard.inspect.adversary import AdversarialTransport, Adversary
from tests.ranks import RankContext, on_ranks

NUMEL = 257  # of a shard; no multiple of anything
UNITS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _gloo(device: torch.device) -> Ranks:
    assert dist.group.WORLD is not None
    return connect(dist.group.WORLD, Streams(device))


def _shared(device: torch.device) -> Ranks:
    ranks = _gloo(device)
    share_memory(ranks, 1 << 20, UNITS)
    assert isinstance(ranks.transport, SharedMemoryTransport)
    return ranks


def _late(make: Callable[[torch.device], Ranks]) -> Callable[[torch.device], Ranks]:
    def made(device: torch.device) -> Ranks:
        ranks = make(device)
        Adversary(ranks)
        assert isinstance(ranks.transport, AdversarialTransport)
        return ranks

    return made


TRANSPORTS: dict[str, Callable[[torch.device], Ranks]] = {
    "sockets": _gloo,
    "shared memory": _shared,
    "sockets, late": _late(_gloo),
    "shared memory, late": _late(_shared),
}


def _wait(transport: Transport, work: Work | None) -> None:
    """What was started is in place for the compute stream."""
    fence = Fence(transport.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "results")
    fence.record(work)
    fence.wait()


def _numbers(rank: int, numel: int, like: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """Each rank's own, known to all; not all of them exact in 16 bits."""
    generator = torch.Generator().manual_seed(100 * rank + salt)
    return torch.randn(numel, generator=generator).to(like)


def _check_gathers(ranks: Ranks, dtype: torch.dtype) -> None:
    """All ranks' shards side by side: published ones, ones inside the slot, empty ones, others; later new values."""
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    shard = transport.allocate_visible(NUMEL, dtype)
    whole = transport.allocate_visible(size * NUMEL, dtype)
    own = whole.narrow(0, ranks.rank * NUMEL, NUMEL)
    empty = transport.allocate_visible(0, dtype)
    assert not shard.any()
    slot = torch.empty(size * NUMEL, dtype=dtype, device=device)
    nothing = torch.empty(0, dtype=dtype, device=device)
    for turn in range(3):
        _wait(transport, transport.retract_shards())
        shard.copy_(_numbers(ranks.rank, NUMEL, shard, turn))
        own.copy_(_numbers(ranks.rank, NUMEL, own, 10 + turn))
        transport.publish_shards([shard, own, empty])
        works = [
            transport.start_gather(*pair, tag)
            for tag, pair in enumerate([(shard, slot), (own, whole), (empty, nothing)])
        ]
        for work in works:
            _wait(transport, work)
        assert torch.equal(slot, torch.cat([_numbers(rank, NUMEL, shard, turn) for rank in range(size)]))
        assert torch.equal(whole, torch.cat([_numbers(rank, NUMEL, own, 10 + turn) for rank in range(size)]))
    mine, full = _numbers(ranks.rank, NUMEL, slot, 20), torch.empty_like(slot)
    transport.gather_now(mine, full, 1)
    assert torch.equal(full, torch.cat([_numbers(rank, NUMEL, slot, 20) for rank in range(size)]))


def _check_reductions(ranks: Ranks, dtype: torch.dtype, *, exact: bool) -> None:
    """Means over ranks, in fp32 whatever was sent; added to what is there, or in its place; several under way."""
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    slots = [transport.allocate_visible(size * NUMEL, dtype) for _ in range(2)]
    outs = [torch.full((NUMEL,), 3.0, device=device) for _ in range(2)]
    scratch_numel = transport.scratch_numel(NUMEL, dtype, torch.float32, adds=True)
    scratches = [torch.empty(scratch_numel, dtype=dtype, device=device) for _ in range(2)]
    for turn in range(3):
        wanted, works = [], []
        for tag, (slot, out, scratch) in enumerate(zip(slots, outs, scratches, strict=True)):
            slot.copy_(_numbers(ranks.rank, size * NUMEL, slot, 30 + 2 * turn + tag))
            chunks = [_numbers(rank, size * NUMEL, slot, 30 + 2 * turn + tag) for rank in range(size)]
            accumulate = tag == 1
            mean = out.clone()
            sum_in_rank_order([chunk.view(size, -1)[ranks.rank] for chunk in chunks], mean, accumulate=accumulate)
            wanted.append(mean)
            works.append(transport.start_reduce(Reduction(slot, out, scratch, accumulate, tag)))
            transport.progress()
        for work, out, mean in zip(works, outs, wanted, strict=True):
            _wait(transport, work)
            assert out.dtype is torch.float32
            if exact:
                assert torch.equal(out, mean)
            else:
                torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)


def _check_main_grads_in_the_slot(ranks: Ranks) -> None:
    """The mean may replace this rank's own range of the slot."""
    transport, size = ranks.transport, ranks.world_size
    slot = transport.allocate_visible(size * NUMEL, torch.float32)
    own = slot.narrow(0, ranks.rank * NUMEL, NUMEL)
    slot.copy_(_numbers(ranks.rank, size * NUMEL, slot, 50))
    numel = transport.scratch_numel(NUMEL, torch.float32, torch.float32, adds=False)
    scratch = torch.empty(numel, device=ranks.streams.device)
    _wait(transport, transport.start_reduce(Reduction(slot, own, scratch, False, 2)))
    chunks = [_numbers(rank, size * NUMEL, slot, 50).view(size, -1)[ranks.rank] for rank in range(size)]
    torch.testing.assert_close(own, torch.stack(chunks).mean(0), rtol=1e-5, atol=1e-6)


def _check_talk(ranks: Ranks) -> None:
    """Ranks hear of each other while something is under way."""
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    values = _numbers(ranks.rank, NUMEL, torch.empty(0, device=device), 60)
    work = transport.start_average(values)
    for voter in range(size):
        assert ranks.any_rank(ranks.rank == voter)
    assert not ranks.any_rank(False)
    assert ranks.gather_objects(("rank", ranks.rank)) == [("rank", rank) for rank in range(size)]
    total, most = (torch.tensor([float(ranks.rank)], device=device) for _ in range(2))
    ranks.all_reduce(total)
    ranks.all_reduce(most, maximum=True)
    assert (float(total), float(most)) == (sum(range(size)), size - 1)
    sent = torch.tensor([float(ranks.rank)], device=device)
    ranks.broadcast(sent, source=size - 1)
    assert float(sent) == size - 1
    _wait(transport, work)
    wanted = torch.stack([_numbers(rank, NUMEL, values, 60) for rank in range(size)]).mean(0)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    assert ranks.find_difference() is None
    assert not ranks.has_failed


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through", TRANSPORTS)
def test_what_every_transport_does(context: RankContext, through: str, dtype: str) -> None:
    """Gathers, reductions in rank order, averages, and what ranks say to each other."""
    ranks = TRANSPORTS[through](torch.device("cpu"))
    _check_gathers(ranks, DTYPES[dtype])
    _check_reductions(ranks, DTYPES[dtype], exact=True)
    _check_main_grads_in_the_slot(ranks)
    _check_talk(ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this test needs a GPU")
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_nccl_does(context: RankContext, dtype: str, is_late: bool) -> None:
    """The same; sums in the backend's own order where it sums."""
    make: Any = _late(_gloo) if is_late else _gloo
    ranks = make(torch.device("cuda", torch.cuda.current_device()))
    _check_gathers(ranks, DTYPES[dtype])
    _check_reductions(ranks, DTYPES[dtype], exact=False)
    _check_main_grads_in_the_slot(ranks)
    _check_talk(ranks)


@on_ranks(2)
def test_the_adversary_is_put_in_one_place(context: RankContext) -> None:
    """Whoever holds the ranks moves bytes through it, and through the ranks' own transport afterwards."""
    ranks = _gloo(torch.device("cpu"))
    own = ranks.transport
    with Adversary(ranks) as adversary:
        assert ranks.transport is adversary.transport
        assert adversary.transport.inner is own
        _check_gathers(ranks, torch.float32)
    assert ranks.transport is own
    assert type(own) is PairwiseTransport
    _check_gathers(ranks, torch.float32)

"""What every transport does, whatever it moves bytes through. A new one is added to `TRANSPORTS`."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from streamshard.comm.communicator import Communicator
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.shared_memory import SharedMemoryTransport
from streamshard.comm.streams import Fence, Rule, StreamName, Streams, Work
from streamshard.comm.transport import AllToAll, Gather, Reduction, Transport, sum_in_rank_order
from streamshard.config import Precision, ReductionMode
from tests.adversary import AdversarialTransport
from tests.ranks import RankContext, on_ranks
from tests.simulated import LateTransport, simulated_device

NUMEL = 257  # of a shard; no multiple of anything
UNITS = 3
PRECISIONS = {  # by how gradients are reduced
    precision.reduction_mode: precision
    for precision in (
        Precision(param_dtype=torch.bfloat16),
        Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16),
        Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )
}


def _gloo(device: torch.device) -> Communicator:
    return Communicator(dist.group.WORLD, Streams(device))


def _shared(device: torch.device) -> Communicator:
    ranks = _gloo(device)
    ranks.share_memory(1 << 20, UNITS)
    assert isinstance(ranks.transport, SharedMemoryTransport)
    return ranks


def _experts(device: torch.device) -> Communicator:
    """Every second rank, beside the others."""
    model, me = _shared(device), dist.get_rank()
    group = dist.new_group([*range(me % 2, dist.get_world_size(), 2)], use_local_synchronization=True)
    assert group is not None
    ranks = Communicator(group, model.streams, all_ranks=dist.group.WORLD)
    ranks.share_memory_of(model)
    assert isinstance(ranks.transport, SharedMemoryTransport)
    return ranks


def _late(make: Callable[[torch.device], Communicator]) -> Callable[[torch.device], Communicator]:
    def made(device: torch.device) -> Communicator:
        ranks = make(device)
        ranks.transport = AdversarialTransport(ranks)
        return ranks

    return made


def _on_a_device(device: torch.device) -> Communicator:
    """What GPUs go through, with gloo's collectives beneath."""
    with simulated_device():
        ranks = _gloo(device)
    assert type(ranks.transport) is NcclTransport
    return ranks


def _late_on_a_device(device: torch.device) -> Communicator:
    ranks = _on_a_device(device)
    ranks.transport = LateTransport(ranks)
    return ranks


TRANSPORTS: dict[str, Callable[[torch.device], Communicator]] = {
    "sockets": _gloo,
    "a device": _on_a_device,
    "sockets, late": _late(_gloo),
    "shared memory, late": _late(_shared),
    "a device, late": _late_on_a_device,
}


def _wait(transport: Transport, work: Work | None) -> None:
    fence = Fence(transport.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "results")
    fence.record(work)
    fence.wait()


def _let_read(transport: Transport) -> None:
    fence = Fence(transport.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "what is sent")
    fence.record()
    fence.wait()


def _numbers(rank: int, numel: int, like: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """Each rank's own, known to all; not all of them exact in 16 bits."""
    generator = torch.Generator().manual_seed(100 * rank + salt)
    return torch.randn(numel, generator=generator).to(like)


def _check_gathers(ranks: Communicator, dtype: torch.dtype) -> None:
    """All ranks' shards side by side: published, inside the slot, empty, cast on the way, others; later new values."""
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    shard = transport.allocate_visible(NUMEL, dtype)
    whole = transport.allocate_visible(size * NUMEL, dtype)
    own = whole.narrow(0, ranks.rank * NUMEL, NUMEL)
    empty = transport.allocate_visible(0, dtype)
    main, cast = torch.empty(NUMEL, device=device), transport.allocate_visible(size * NUMEL, torch.bfloat16)
    casts = {3: cast.narrow(0, ranks.rank * NUMEL, NUMEL)}
    assert not shard.any()
    slot = torch.empty(size * NUMEL, dtype=dtype, device=device)
    nothing = torch.empty(0, dtype=dtype, device=device)
    readers: list[Work | None] = []
    for turn in range(3):
        for each in readers:
            _wait(transport, each)
        shard.copy_(_numbers(ranks.rank, NUMEL, shard, turn))
        own.copy_(_numbers(ranks.rank, NUMEL, own, 10 + turn))
        main.copy_(_numbers(ranks.rank, NUMEL, main, 15 + turn))
        _let_read(transport)
        works, readers = [], []
        for tag, pair in enumerate([(shard, slot), (own, whole), (empty, nothing), (main, cast)]):
            works.append(transport.start_gather(Gather(*pair, tag, casts.get(tag))))
            readers.extend(transport.readers(works[-1:]))
        for work in works:
            _wait(transport, work)
        assert torch.equal(slot, torch.cat([_numbers(rank, NUMEL, shard, turn) for rank in range(size)]))
        assert torch.equal(whole, torch.cat([_numbers(rank, NUMEL, own, 10 + turn) for rank in range(size)]))
        assert torch.equal(cast, torch.cat([_numbers(rank, NUMEL, cast, 15 + turn) for rank in range(size)]))
    mine, full = _numbers(ranks.rank, NUMEL, slot, 20), torch.empty_like(slot)
    ranks.gather_now(mine, full, 1)
    assert torch.equal(full, torch.cat([_numbers(rank, NUMEL, slot, 20) for rank in range(size)]))


def _check_reductions(ranks: Communicator, *, sums: bool) -> None:
    for mode, precision in PRECISIONS.items():
        for dtype in dict.fromkeys((precision.sent_grad_dtype, torch.bfloat16)):
            _check_reductions_of(dtype, ranks, mode, sums=sums)


def _check_reductions_of(dtype: torch.dtype, ranks: Communicator, mode: ReductionMode, *, sums: bool) -> None:
    """Means and other quotients of sums over ranks, fp32 whatever was sent; added to what is there, or in its place.

    Several are under way, one is empty. With the smallest scratch, a reduction that can be made in parts has five.
    `sums`: the backend itself sums where it can, in its own order, in what is sent.
    """
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    numels = (NUMEL, NUMEL, 0)
    slots = [transport.allocate_visible(size * numel, dtype) for numel in numels]
    outs = [torch.full((numel,), 3.0, device=device) for numel in numels]
    scratch_numels = [transport.scratch_numel(numel, mode, dtype, limit=1) for numel in numels]
    scratches = [torch.empty(numel, dtype=dtype, device=device) for numel in scratch_numels]
    for turn, divisor in enumerate((size, 1.0, 7.0)):
        wanted, works = [], []
        for tag, (slot, out, scratch) in enumerate(zip(slots, outs, scratches, strict=True)):
            slot.copy_(_numbers(ranks.rank, slot.numel(), slot, 30 + 3 * turn + tag))
            chunks = [_numbers(rank, slot.numel(), slot, 30 + 3 * turn + tag) for rank in range(size)]
            accumulate = tag == 1
            mean = out.clone()
            own = [chunk.view(size, -1)[ranks.rank] for chunk in chunks]
            sum_in_rank_order(own, mean, accumulate=accumulate, divisor=divisor)
            wanted.append(mean)
            _let_read(transport)
            works.append(transport.start_reduce(Reduction(slot, out, scratch, mode, accumulate, tag, divisor)))
            transport.advance()
        for work, out, mean in zip(works, outs, wanted, strict=True):
            _wait(transport, work)
            assert out.dtype is torch.float32
            if not sums or not out.numel() or mode is ReductionMode.IN_ORDER:
                assert torch.equal(out, mean)
            elif mode is ReductionMode.SUM_16:
                torch.testing.assert_close(out, mean, rtol=2e-2, atol=3e-2)
                assert not torch.equal(out, mean)
            else:
                torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)


def _check_all_to_all(ranks: Communicator) -> None:
    """Chunks of any length, empty ones too, arrive where they belong; several exchanges are under way at a time."""
    transport, size, me = ranks.transport, ranks.world_size, ranks.rank
    like = torch.empty(0, device=ranks.streams.device)

    def numel(source: int, target: int, turn: int) -> int:
        return 7 * ((source + 2 * target + turn) % 3)

    exchanges, works = [], []
    for turn in range(4):
        to, of = ([numel(me, rank, turn) for rank in range(size)], [numel(rank, me, turn) for rank in range(size)])
        send = torch.cat([_numbers(me, to[rank], like, 70 + 10 * turn + rank) for rank in range(size)])
        exchanges.append(AllToAll(send, to, like.new_empty(sum(of)), of))
        _let_read(transport)
        works.append(transport.start_all_to_all(exchanges[-1]))
    for turn, (exchange, work) in enumerate(zip(exchanges, works, strict=True)):
        _wait(transport, work)
        for rank in range(size):
            wanted = _numbers(rank, numel(rank, me, turn), like, 70 + 10 * turn + me)
            assert torch.equal(exchange.received.split(exchange.received_numels)[rank], wanted)


def _check_flags(ranks: Communicator) -> None:
    """A flag is 1 if it is 1 on any rank: a sum in uint8 would be 0 on 256 ranks."""
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    flags = torch.tensor([1, 0, int(ranks.rank == 1)], dtype=torch.uint8, device=device)
    gathered = torch.empty(transport.flags_numel(3), dtype=torch.uint8, device=device)
    _let_read(transport)
    _wait(transport, transport.start_flags(flags, gathered, 1))
    assert int(gathered.max()) == 1
    assert gathered.view(-1, 3).amax(0).tolist() == [1, 0, int(size > 1)]


def _check_talk(ranks: Communicator) -> None:
    transport, size, device = ranks.transport, ranks.world_size, ranks.streams.device
    values = _numbers(ranks.rank, NUMEL, torch.empty(0, device=device), 60)
    _let_read(transport)
    work = transport.start_average(values, None)
    for voter in range(size):
        assert any(ranks.gather_objects("vote", ranks.rank == voter))
    assert ranks.gather_objects("count", ("rank", ranks.rank)) == [("rank", rank) for rank in range(size)]
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
    assert ranks.failure is None


@on_ranks(3)
@pytest.mark.parametrize("through", TRANSPORTS)
def test_every_transport_gathers_reduces_averages_and_exchanges_objects(context: RankContext, through: str) -> None:
    """And flags. Through gloo and shared memory sums are in fp32 in rank order, whatever is sent."""
    ranks = TRANSPORTS[through](torch.device("cpu"))
    _check_gathers(ranks, torch.float32)
    _check_gathers(ranks, torch.bfloat16)
    _check_reductions(ranks, sums=ranks.streams.has_streams)
    _check_flags(ranks)
    _check_all_to_all(ranks)
    _check_talk(ranks)


@on_ranks(4)
def test_ranks_with_the_same_experts_gather_and_reduce_beside_others(context: RankContext) -> None:
    ranks = _late(_experts)(torch.device("cpu"))
    gc.collect()
    inner: Any = ranks.transport
    assert not inner.inner._own.gone[0], "the communicator of all has gone, and its memory is needed"
    _check_gathers(ranks, torch.float32)
    _check_gathers(ranks, torch.bfloat16)
    _check_reductions(ranks, sums=False)


@pytest.mark.gpu
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("is_late", [False, True])
def test_the_nccl_transport_gathers_reduces_and_exchanges(context: RankContext, is_late: bool) -> None:
    make: Any = _late(_gloo) if is_late else _gloo
    ranks = make(context.device)
    _check_gathers(ranks, torch.float32)
    _check_gathers(ranks, torch.bfloat16)
    _check_reductions(ranks, sums=ranks.world_size > 1)
    _check_all_to_all(ranks)
    _check_talk(ranks)


@on_ranks(3)
@pytest.mark.parametrize("through", ["a device", "sockets"])
def test_sums_are_divided_afterwards(context: RankContext, through: str) -> None:
    """The mean of equal numbers is that number, where N-ths rounded before give another one; fp16 does not overflow."""
    ranks = TRANSPORTS[through](torch.device("cpu"))
    transport, size = ranks.transport, ranks.world_size
    numbers = ((torch.bfloat16, 1.0), (torch.float16, 24000.0))
    for (dtype, value), divisor in itertools.product(numbers, (size, 1.0)):
        slot = transport.allocate_visible(size * NUMEL, dtype).fill_(value)
        out = torch.ones(NUMEL)
        scratch = torch.empty(transport.scratch_numel(NUMEL, ReductionMode.SUM_16, dtype, limit=1), dtype=dtype)
        for accumulate in (False, True):
            slot.fill_(value)
            reduction = Reduction(slot, out, scratch, ReductionMode.SUM_16, accumulate, 0, divisor)
            _wait(transport, transport.start_reduce(reduction))
        torch.testing.assert_close(out, torch.full((NUMEL,), 2 * value * size / divisor), rtol=1e-3, atol=0.0)


@on_ranks(2)
def test_abandoned_messages_do_not_block_others(context: RankContext) -> None:
    """A wait that an exception ends, a model that is deleted while its weights are under way."""
    transport = _gloo(context.device).transport
    store = dist.distributed_c10d._get_default_store()
    shard, slot = torch.ones(NUMEL), torch.empty(2 * NUMEL)
    if context.rank == 0:
        work: Any = transport.start_gather(Gather(shard, slot, 0))
        work.messages.insert(0, mock.Mock(wait=mock.Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        del work
        store.set("nobody waits", "")
    else:
        store.wait(["nobody waits"])
        _wait(transport, transport.start_gather(Gather(shard, slot, 0)))
    dist.barrier()


def test_over_sockets_a_rank_receives_before_it_sends() -> None:
    """gloo tells a peer that it may send behind the bytes of an earlier send: a link's directions would take turns."""
    transport: Any = object.__new__(PairwiseTransport)
    transport.rank, transport.world_size, transport.recorder = 1, 3, mock.Mock(number=0)
    chunks = [torch.ones(2), torch.ones(2)]
    with mock.patch.object(PairwiseTransport, "group", group := mock.Mock()):
        transport._swap(chunks, chunks, 0)
    calls = [(name, arguments[1]) for name, arguments, _ in group.method_calls]
    assert calls == [("recv", 0), ("send", 0), ("recv", 2), ("send", 2)]

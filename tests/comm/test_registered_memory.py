"""`registered_memory=True`: which buffers are in NCCL's pool, and when it is registered. No GPU: NCCL is played."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import Precision, StreamShard
from streamshard.comm import registered_memory
from streamshard.comm.groups import close_connections
from streamshard.comm.streams import Observer, StreamName
from streamshard.errors import ConfigError, RankMismatchError
from streamshard.inspect import engine_inside
from streamshard.planning.memory import Category
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, assert_same, full_weights
from tests.scenarios import BF16, PRECISIONS, sharded, train
from tests.simulated import SimulatedDevice, SimulatedStream, simulated_device

ZERO_1: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}


class _Pool(TorchDispatchMode):
    """In the place of ``torch.cuda.MemPool``. Knows the addresses of what is allocated in it."""

    def __init__(self, allocator: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        assert allocator == "ncclMemAlloc"
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.addresses.add(result.untyped_storage().data_ptr())
        return result

    def snapshot(self) -> list[dict[str, int]]:
        """Two segments."""
        return [{"total_size": 20 << 20, "allocated_size": size << 20} for size in (1, 20)]


class _Call(NamedTuple):
    """A call of a backend: what it does, of which group, with which pool, which has so many buffers by then."""

    what: str
    group: dist.ProcessGroup
    pool: _Pool
    buffers: int


class _Nccl:
    """In the place of a group's backend."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, group: dist.ProcessGroup, calls: list[_Call]) -> None:
        self._group, self._calls = group, calls

    def name(self) -> str:
        """Of the library."""
        return "nccl"

    def register_mem_pool(self, pool: _Pool) -> None:
        """What torch's backend for NCCL has."""
        self._calls.append(_Call("register", self._group, pool, len(pool.addresses)))

    def deregister_mem_pool(self, pool: _Pool) -> None:
        """What torch's backend for NCCL has."""
        self._calls.append(_Call("deregister", self._group, pool, len(pool.addresses)))


@contextlib.contextmanager
def _nccl_played() -> Iterator[list[_Call]]:
    """A simulated device whose backend registers memory. Gives the backend's calls."""
    calls: list[_Call] = []
    with (
        simulated_device(),
        mock.patch.object(registered_memory, "backend_of", lambda group, _: _Nccl(group, calls)),
        mock.patch.object(SimulatedDevice, "MemPool", _Pool, create=True),
        mock.patch.object(SimulatedDevice, "use_mem_pool", staticmethod(lambda pool, _: pool), create=True),
    ):
        yield calls


class _Sent(Observer):
    """Storages that collectives read and write, by address."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()

    def on_collective(self, stream: StreamName, collective: Any, tag: int | None, reads: Any, writes: Any) -> None:
        """See `Observer`."""
        self.addresses |= {each.untyped_storage().data_ptr() for each in (*reads, *writes) if each.numel()}


def _train_watched(model: Any, scenario: str, context: RankContext) -> set[int]:
    """The memory, by address, that collectives use in steps of `model`, except flags."""
    engine, sent = engine_inside(model), _Sent()
    with engine.streams.observed_by(sent):
        train(model, scenario, context)
    flags = {buffer.data_ptr() for kind, buffer in engine.ledger.buffers if kind is Category.FLAGS}
    return sent.addresses - flags


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        (FP32, {}),
        (FP32, ZERO_1),
        (BF16, {}),
        (BF16, ZERO_1),
        (PRECISIONS["16-bit"], {}),
        (PRECISIONS["16-bit wire"], {}),
        (Precision(param_dtype=torch.float32, wire_dtype=torch.bfloat16), {}),
    ],
)
def test_all_that_collectives_of_a_step_use_is_registered(
    context: RankContext, precision: Precision, settings: dict[str, Any]
) -> None:
    """Once, behind the last allocation. Main grads that leave their slot later are in the pool too."""
    with _nccl_played() as calls:
        model = sharded("micro-batches", precision, registered_memory=True, **settings)
        (registered,) = calls
        assert registered.what == "register"
        assert registered.buffers == len(registered.pool.addresses)
        used = _train_watched(model, "micro-batches", context)
        found = full_weights(model)
        assert used
        assert used <= registered.pool.addresses
        assert model.memory_report().held_bytes["main grads"]
        assert len(calls) == 1
        assert model.memory_report().held_bytes["pool rounding"] == 19 << 20
        plain: Any = sharded("micro-batches", precision, **settings)
        train(plain, "micro-batches", context)
        assert_same(found, full_weights(plain), "weights", EXACT)
        assert len(calls) == 1
        assert "pool rounding" not in plain.memory_report().held_bytes


@on_ranks(4)
@pytest.mark.parametrize(("shape", "axes"), [((2, 2), ("shard", "replicate")), ((4, 1), ("replicate",))])
def test_replicas_register_the_pool_with_both_groups(
    context: RankContext, shape: tuple[int, int], axes: tuple[str, ...]
) -> None:
    """Main grads are reduced over one and averaged over the other. A group of one rank sends nothing."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    with _nccl_played() as calls:
        model = sharded("plain", BF16, mesh=mesh, registered_memory=True)
        assert [(call.what, call.group) for call in calls] == [("register", mesh.get_group(axis)) for axis in axes]
        used = _train_watched(model, "plain", context)
        assert used
        assert used <= calls[0].pool.addresses


@on_ranks(2)
def test_a_pool_is_deregistered_with_its_model(context: RankContext) -> None:
    """Behind its collectives: NCCL's kernels may still be at the memory. Not if a rank has failed, or at exit."""
    waits: list[SimulatedStream] = []
    unraised: list[Any] = []

    def destroyed(*_: object) -> None:
        raise RuntimeError("NCCL communicator has not been initialized")

    with (
        _nccl_played() as calls,
        mock.patch.object(sys, "unraisablehook", unraised.append),
        mock.patch.object(SimulatedStream, "synchronize", lambda stream: waits.append(stream)),
    ):
        model: Any = StreamShard(Stack(), registered_memory=True)
        comm = engine_inside(model).streams.device_stream(StreamName.COMM)
        waits.clear()
        del model
        gc.collect()
        registered, deregistered = calls
        assert deregistered == registered._replace(what="deregister")
        assert waits == [comm]
        with mock.patch.object(_Nccl, "deregister_mem_pool", destroyed):
            model = StreamShard(Stack(), registered_memory=True)
            del model
            gc.collect()
        assert not unraised
        calls.clear()
        model = StreamShard(Stack(), registered_memory=True)
        at_exit = [each for each in weakref.finalize._registry if each.atexit]  # type: ignore[attr-defined]
        assert not any((each.peek() or [None])[0] is engine_inside(model).ledger.registered for each in at_exit)
        close_connections(dist.group.WORLD)
        waits.clear()
        del model
        gc.collect()
        assert [call.what for call in calls] == ["register"]
        assert not waits


@on_ranks(1, 2)
def test_cpus_have_nothing_to_register(context: RankContext) -> None:
    """On one rank too: the message says what to do. Ranks have to agree, and a number is no switch."""
    with pytest.raises(ConfigError, match="backend 'gloo' of .* cpu, cannot register .* Leave registered_memory out"):
        StreamShard(Stack(), registered_memory=True)
    with pytest.raises(ConfigError, match="registered_memory='yes': wanted one of False, True"):
        StreamShard(Stack(), registered_memory="yes")  # type: ignore[arg-type]
    if context.world_size > 1:
        with pytest.raises(RankMismatchError, match="different settings: rank 0 has registered_memory=True"):
            StreamShard(Stack(), registered_memory=context.rank == 0)
    StreamShard(Stack(), registered_memory=False)


@on_ranks(2)
def test_a_library_without_an_allocator_is_refused(context: RankContext) -> None:
    """NCCL before 2.19, or torch's allocator for CUDA replaced by another."""

    def refuse(*_: object) -> None:
        raise RuntimeError("not in this version")

    for where, what in ((_Nccl, "mem_allocator"), (SimulatedDevice, "MemPool")):
        with _nccl_played() as calls, mock.patch.object(where, what, property(refuse)):
            with pytest.raises(ConfigError, match=r"cannot register memory \(not in this version\)"):
                StreamShard(Stack(), registered_memory=True)
            assert not calls


@on_ranks(1)
def test_a_single_rank_needs_no_pool(context: RankContext) -> None:
    """It sends nothing."""
    with _nccl_played() as calls:
        model = sharded("plain", FP32, registered_memory=True)
        train(model, "plain", context)
        assert not calls

"""The ranks that train a model together: their transport, small exchanges between them, and failures.

[Note: ranks that differ]
A rank that fails posts its error's text on the board and closes its connections. That ends the waits of the other
ranks, which then read the text. So all ranks end soon, with the same text. If a wait can never succeed, the watchdog
makes its rank fail (`streamshard.comm.flight_recorder`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import Board, Guard, Log, RecordKind, Watch
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.groups import close_connections, host_group_of
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.objects import gather_bytes, gather_results
from streamshard.comm.shared_memory import SharedBuffers, SharedMemoryTransport, make_memory, map_memory
from streamshard.comm.streams import StreamName, Streams
from streamshard.comm.transport import Transport
from streamshard.device import serves
from streamshard.errors import CommunicationError, ConfigError, ShardingError, StreamShardError

__all__ = ["Communicator"]

_T = TypeVar("_T")


class Communicator:
    """The ranks of a shard group, and all ranks of its model. Making one is collective: it connects the ranks.

    Args:
        group: the shard group. Its ranks all-gather, reduce and sum norms together.
        streams: the engine's streams.
        stream: the transport's stream.
        all_ranks: all ranks that train this model, in all replicas; None: the shard group.
        replica: number of this rank's replica.

    Attributes:
        transport: moves bytes between the ranks; chosen by the device of `streams`. Tests replace it.
        rank: this rank's number in the shard group.
        world_size: N, the number of ranks in the shard group.
        replica: see above; replica 0 writes weights to files.
        number: this rank's number among all ranks.
        is_first: whether `number` is 0. The first rank's weights are broadcast at the start, and it writes manifests.
        total_size: number of ranks in `all_ranks`.
        failure: how a collective has failed; None: none has.
        board: the logs of all ranks, and the first failure.
        watch: this rank's current wait.

    Raises:
        ConfigError: the group has no backend for the device.
    """

    transport: Transport

    def __init__(
        self,
        group: dist.ProcessGroup,
        streams: Streams,
        stream: StreamName = StreamName.COMM,
        all_ranks: dist.ProcessGroup | None = None,
        replica: int = 0,
    ) -> None:
        if not serves(group, streams.device.type):
            backend = dist.get_default_backend_for_device(streams.device)
            raise ConfigError(
                f"parameters are on {streams.device}, for which the process group ({dist.get_backend_config(group)}) "
                f"has no backend: torch.distributed.init_process_group({backend!r}), or without a name for all devices"
            )
        self.failure: str | None = None
        # Weak: destroy_process_group() has to end gloo's threads before Python ends, because they take its lock.
        self._users_group_of = weakref.ref(all_ranks or group)
        if not streams.has_streams:
            group, all_ranks = _host_group(group), _host_group(all_ranks or group)
        self._group_of = weakref.ref(group)
        self._all_ranks_of = weakref.ref(all_ranks or group)
        self.streams = streams
        self.stream = stream
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.replica = replica
        self.number: int = dist.get_rank(self.all_ranks)
        self.is_first = self.number == 0
        self.total_size: int = dist.get_world_size(self.all_ranks)
        self.board = Board(self.all_ranks, self.number, self.total_size)
        self.watch = Watch(self.board, has_streams=streams.has_streams, abort=self.abort)
        _alive_ones.add(self)
        self.transport = NcclTransport(self) if streams.has_streams else PairwiseTransport(self)
        if self.world_size > 1:
            with self.guard("the first meeting of a process group's ranks"):
                self.transport.meet()

    def share_memory(self, nbytes: int, units: int) -> None:
        """Switch to the shared-memory transport if all CPU ranks can map each other's memory. Collective.

        Args:
            nbytes: `Transport.allocate_visible` will allocate at most so much.
            units: how many shards will be published.
        """
        if self.streams.has_streams or self.world_size == 1:
            return
        mine = make_memory(nbytes, units)
        buffers: list[SharedBuffers] = []
        try:
            offers = self.gather_objects(None if mine is None else mine[1], with_replicas=False)
            for rank, offer in enumerate(offers):
                is_own = mine is not None and rank == self.rank
                mapped = SharedBuffers(mine[0], units, None) if mine and is_own else map_memory(offer, units)
                if mapped is not None:
                    buffers.append(mapped)
            all_can = all(self.gather_objects(len(buffers) == self.world_size, with_replicas=False))
        finally:
            if mine is not None:
                os.close(mine[1].descriptor)  # the mappings stay valid
        if all_can:
            self.transport = SharedMemoryTransport(self, buffers)

    @property
    def log(self) -> Log:
        """This rank's log."""
        return self.board.log

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed. If so, this rank issues nothing more."""
        return self.failure is not None

    # -- groups -----------------------------------------------------------------------------------------------------

    @property
    def users_group(self) -> dist.ProcessGroup:
        """All ranks that train this model, as the user's own group, which other libraries use too.

        Raises:
            CommunicationError: the group has been destroyed.
        """
        return _alive(self._users_group_of)

    @property
    def group(self) -> dist.ProcessGroup:
        """The shard group: on devices the user's own, on CPUs StreamShard's. See `host_group_of`.

        Raises:
            CommunicationError: this group or the user's has been destroyed.
        """
        _alive(self._users_group_of)
        return _alive(self._group_of)

    @property
    def all_ranks(self) -> dist.ProcessGroup:
        """All ranks that train this model: on devices the user's own group, on CPUs StreamShard's.

        Raises:
            CommunicationError: the group has been destroyed.
        """
        _alive(self._users_group_of)
        return _alive(self._all_ranks_of)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """A group of all ranks for tensors in CPU memory. The first call is collective."""
        return _host_group(self.all_ranks)

    def guard(self, action: str, subject: str = "") -> Guard:
        """A context around collectives, and around waits for them. See `Guard`."""
        return Guard(self, action, subject)

    # -- what ranks tell each other ---------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy `tensor` of rank number `source` into `tensor` of every rank. Blocks."""
        if self.total_size > 1:
            self.transport.before_talk()
            with self.guard("a broadcast"):
                self.log.add(RecordKind.BROADCAST)
                dist.broadcast(tensor, src=dist.get_global_rank(self.all_ranks, source), group=self.all_ranks)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False, with_replicas: bool = False) -> None:
        """Replace `tensor` by the sum (or maximum) over ranks, on the compute stream.

        Args:
            tensor: any shape.
            maximum: take the maximum instead of the sum.
            with_replicas: reduce over all replicas too.
        """
        if (self.total_size if with_replicas else self.world_size) > 1:
            self.transport.before_talk()
            group = self.all_ranks if with_replicas else self.group
            with self.guard("a sum over all ranks"):
                self.log.add(RecordKind.SUM)
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank, replicas included. Blocks the host, but no device stream."""
        return self._maximum([int(value)]) == [1]

    def are_equal(self, text: str) -> bool:
        """Whether `text` is the same on all ranks, replicas included. Blocks the host."""
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return self._maximum([number, -number]) == [number, -number]

    def _maximum(self, numbers: list[int]) -> list[int]:
        if self.total_size == 1:
            return numbers
        found = torch.tensor(numbers)
        self.transport.before_talk()
        with self.guard("a vote of all ranks"):
            self.log.add(RecordKind.VOTE)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.host_group)
        return found.tolist()

    def gather_objects(self, value: object, *, with_replicas: bool = True) -> list[Any]:
        """Every rank's `value`, in rank order. Blocks; for set-up and errors, not for steps.

        Args:
            value: any object that can be pickled.
            with_replicas: include the ranks of other replicas.

        Raises:
            ShardingError: on every rank: a value cannot be pickled or unpickled. The ranks can go on.
        """
        return self.gather_results("send an object to the other ranks", lambda: value, with_replicas=with_replicas)

    def gather_results(
        self,
        doing: str,
        action: Callable[[], _T],
        raises: type[StreamShardError] = ShardingError,
        *,
        with_replicas: bool = True,
    ) -> list[_T]:
        """See `streamshard.comm.objects.gather_results`."""
        if (self.total_size if with_replicas else self.world_size) == 1:
            return gather_results(None, doing, action, raises)
        return gather_results(functools.partial(self.gather_bytes, with_replicas=with_replicas), doing, action, raises)

    def gather_bytes(self, data: bytes, *, with_replicas: bool = True) -> list[bytes]:
        """Every rank's `data`, in rank order. Blocks."""
        self.transport.before_talk()
        with self.guard("a meeting of all ranks"):
            self.log.add(RecordKind.MEETING)
            return gather_bytes(self.host_group if with_replicas else _host_group(self.group), data)

    def send_to_first(self, tensor: torch.Tensor, source: int) -> None:
        """Copy `tensor` of rank number `source` into `tensor` of the first rank. Only these two ranks call it. Blocks.

        Args:
            tensor: contiguous, in CPU memory; same shape and dtype on both ranks.
            source: any rank but the first.
        """
        with self.guard("a tensor on its way to the first rank"):
            if self.number == source:
                dist.send(tensor, dst=dist.get_global_rank(self.host_group, 0), group=self.host_group)
            else:
                dist.recv(tensor, src=dist.get_global_rank(self.host_group, source), group=self.host_group)

    def of_first(self, value: object) -> Any:
        """The first rank's `value`, pickled. Blocks; for set-up."""
        return self.gather_objects(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.gather_objects(None)

    # -- failures ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End this rank's waits, and the waits of ranks that wait for it. The watchdog calls this."""
        if self.failure is None:
            self._close()

    def fail(self, failure: str) -> None:
        """Stop issuing collectives, and end the waits of other ranks for this one. Only the first failure is kept."""
        is_first = self.failure is None
        if is_first:
            self.failure = failure
            self.board.post_failure(failure)  # first: other ranks read it when their waits end
        self.transport.leave()
        if is_first:
            self._close()

    def _close(self) -> None:
        """Close StreamShard's own groups, then the user's: a rank whose wait over the latter ends finds all closed."""
        alive = [group for of in (self._group_of, self._all_ranks_of, self._users_group_of) if (group := of())]
        hosts = [host for group in alive if (host := host_group_of(group, makes=False))]
        for group in dict.fromkeys((*hosts, *alive)):
            if serves(group, "cpu"):
                close_connections(group)

    @contextlib.contextmanager
    def fails_if_alone(self, action: str) -> Iterator[None]:
        """A context around work that raises `StreamShardError` on all ranks, but other errors on one rank alone.

        Another error, such as out of memory or a bug, makes all ranks fail with its text.
        """
        try:
            yield
        except StreamShardError:
            raise
        except BaseException as error:
            self.fail(f"{action} ended with {type(error).__name__}: {error}")
            raise


def _alive(group_of: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = group_of()
    if group is None:
        raise CommunicationError(_DESTROYED)
    return group


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    host_group = host_group_of(group)
    if host_group is None:
        raise CommunicationError(_DESTROYED)
    return host_group


_DESTROYED = "the process group was destroyed (destroy_process_group) while the model needs it"


_alive_ones: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ranks in _alive_ones:
        if ranks.total_size > 1:
            ranks.failure = (
                f"this process was forked from rank {ranks.rank} and has no connection to other ranks: start processes "
                "with the spawn method"
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

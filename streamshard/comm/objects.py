"""Ranks that exchange Python objects, outside of training steps. If one rank fails, all ranks raise the same error.

[Note: errors of one rank]
In a collective, ranks wait for each other. So each rank does its own work, and pickles the result, before the
collective starts. If that fails, the rank sends the error's text instead, and every rank raises. No rank leaves a
collective early, so training and later saves go on.

[Note: ranks that differ]
A rank that fails posts its error's text in the store and closes the connections of StreamShard's own groups. That ends
the waits of the other ranks, which then read the text. So all ranks end soon, with the same text. If a wait can never
succeed, the watchdog makes its rank fail (`streamshard.comm.flight_recorder`). A rank in another library's collective
reads the text too: its own watchdog logs the text, and then closes the user's group.
"""

from __future__ import annotations

import datetime
import hashlib
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import FlightRecorder, RecordKind
from streamshard.comm.groups import CONTROL_TIMEOUT, alive, close_connections, host_group_of
from streamshard.errors import CheckpointError, CommunicationError, ShardingError, StreamShardError, describe
from streamshard.torch_private import AllgatherOptions

_VALUE, _ERROR = b"v", b"e"  # first bytes of what a rank sends

# RuntimeErrors of this rank alone, such as out of memory. They are no sign that a collective failed.
_OWN: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

_T = TypeVar("_T")


class Guard:
    """A context around a wait for other ranks. Turns a backend's error into a `CommunicationError` that names the wait.

    Args:
        ranks: the ranks. After an error they are marked as failed and issue nothing more: other ranks may be gone.
        action: what happens inside, such as "the gather of".
        subject: what `action` is about, such as a unit's name; "" if nothing.

    Raises:
        CommunicationError: on entry, if `ranks` has failed before.
    """

    __slots__ = ("_action", "_outer", "_ranks", "_subject")

    def __init__(self, ranks: RankGroup, action: str, subject: str = "") -> None:
        self._ranks = ranks
        self._action = action
        self._subject = subject

    def __str__(self) -> str:
        """The wait, in words. Made when somebody asks: each layer has several waits."""
        return f"{self._action} {self._subject!r}" if self._subject else self._action

    def __enter__(self) -> None:
        ranks = self._ranks
        if ranks.failure is not None:
            raise CommunicationError(f"{self} is not possible any more: {ranks.failure}")
        self._outer, ranks.recorder.wait = ranks.recorder.wait, (self, time.time())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ranks = self._ranks
        ranks.recorder.wait = self._outer
        if error is None or (ranks.failure is not None and isinstance(error, StreamShardError)):
            return
        if not isinstance(error, RuntimeError) or isinstance(error, (StreamShardError, *_OWN)):
            ranks.fail(f"{self} ended with {type(error).__name__}: {error}")
            return
        ranks.abort()  # so that the others show their logs
        message = f"{self} failed on {ranks.recorder}: {ranks.recorder.explain(error)}"
        ranks.fail(message)
        raise CommunicationError(message) from None  # the message says what the backend did


class RankGroup:
    """Ranks that exchange objects over a gloo group of StreamShard's own.

    Args:
        group: the ranks; None: this process alone.
        world_size: how many ranks share one replica of the model; None: all.
        replica: number of this rank's replica of the model.
        has_streams: the ranks are on devices.
        meeting: what an exchange is, in errors.
        timeout: of an exchange; None: `CONTROL_TIMEOUT`. With a timeout no watchdog looks: a disk may be slow.

    Attributes:
        number: this rank's number, from 0.
        is_first: whether `number` is 0. The first rank does work for all, such as making a directory.
        total_size: how many ranks there are in all replicas.
        world_size, replica: see above.
        failure: how a collective has failed; None: none has.
        recorder: the logs of all ranks, this rank's wait, and the first failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        world_size: int | None = None,
        replica: int = 0,
        has_streams: bool = False,
        meeting: str = "a meeting of all ranks",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self.number, self.total_size = (0, 1) if group is None else (group.rank(), group.size())
        self.is_first = self.number == 0
        self.world_size = self.total_size if world_size is None else world_size
        self.replica = replica
        self.failure: str | None = None
        # Weak: destroy_process_group() has to end gloo's threads before Python ends, because they take its lock.
        self._users_group_of = None if group is None else weakref.ref(group)
        self._group_of = self._users_group_of
        self._meeting = meeting
        self._timeout = timeout
        self.recorder = FlightRecorder(group, has_streams=has_streams, abort=self.abort if timeout is None else None)

    @property
    def users_group(self) -> dist.ProcessGroup:
        """All ranks, as the user's own group, which other libraries use too.

        Raises:
            CommunicationError: the group has been destroyed.
        """
        return alive(self._users_group_of)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share one replica. Raises as `users_group` does."""
        return alive(self._group_of)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """A group of all ranks for tensors in CPU memory. The first call is collective."""
        return host_group_of(self.users_group)

    def guard(self, action: str, subject: str = "") -> Guard:
        """A context around collectives, and around waits for them. See `Guard`."""
        return Guard(self, action, subject)

    def talk(self, action: str, kind: RecordKind) -> Guard:
        """A context around an exchange outside of steps: logs `kind`, and guards `action`."""
        self.recorder.log.add(kind)
        return self.guard(action)

    # -- objects ----------------------------------------------------------------------------------------------------

    def gather_results(
        self,
        doing: str,
        action: Callable[[], _T],
        raises: type[StreamShardError] = ShardingError,
        *,
        with_replicas: bool = True,
    ) -> list[_T]:
        """Run `action` on every rank, and return all results in rank order. See [Note: errors of one rank].

        Args:
            doing: what the action does, for the message: "could not <doing>".
            action: this rank's work; it must not communicate. Its result is pickled.
            raises: the class of the error.
            with_replicas: include the ranks of other replicas.

        Raises:
            StreamShardError: of class `raises`, with the same text on every rank: on some rank `action` raised, or its
                result cannot be pickled or unpickled. An interrupted rank raises `KeyboardInterrupt` or `SystemExit`
                instead.
        """
        is_alone = (self.total_size if with_replicas else self.world_size) == 1
        error: BaseException | None = None
        try:
            value = action()
            sent = _VALUE if is_alone else _VALUE + pickle.dumps(value)
        except BaseException as caught:
            error, sent = caught, _ERROR + describe(caught).encode(errors="backslashreplace")
        gathered = [sent] if is_alone else self.gather_bytes(sent, with_replicas=with_replicas)
        if error is not None and not isinstance(error, Exception):
            raise error
        errors = {rank: each[1:].decode() for rank, each in enumerate(gathered) if each.startswith(_ERROR)}
        if errors:
            failed = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
            if len(errors) == len(gathered) and len(set(errors.values())) == 1:
                failed = f"all ranks: {errors[0]}" if len(errors) > 1 else errors[0]
            raise raises(f"could not {doing}: {failed}") from error
        if is_alone:
            return [value]
        try:
            return [pickle.loads(memoryview(each)[1:]) for each in gathered]
        except Exception as bad:  # on all ranks alike: they unpickle the same bytes
            raise raises(f"could not {doing}: {describe(bad)}") from bad

    def gather_objects(self, value: object, *, with_replicas: bool = True) -> list[Any]:
        """Every rank's `value`, pickled, in rank order. Blocks; for set-up and errors, not for steps."""
        return self.gather_results("send an object to the other ranks", lambda: value, with_replicas=with_replicas)

    def gather_bytes(self, data: bytes, *, with_replicas: bool = True) -> list[bytes]:
        """Every rank's `data`, in rank order. Blocks. Two collectives; one if `data` is empty on all ranks.

        Args:
            data: of any length, which may differ between ranks.
            with_replicas: include the ranks of other replicas.
        """
        with self.talk(self._meeting, RecordKind.MEETING):
            group = self.host_group if with_replicas else host_group_of(self.group)
            sizes = self._all_gather(group, torch.tensor([len(data)])).flatten().tolist()
            if not any(sizes):
                return [b""] * len(sizes)
            padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
            gathered = self._all_gather(group, padded).numpy()
        return [row[:size].tobytes() for row, size in zip(gathered, sizes, strict=True)]

    def _all_gather(self, group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
        results = tensor.new_empty(group.size(), tensor.numel())
        options = AllgatherOptions()
        options.timeout = self._timeout or CONTROL_TIMEOUT
        group.allgather([list(results.unbind())], [tensor], options).wait()
        return results

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank, replicas included. Blocks the host, but no device stream."""
        return value if self.total_size == 1 else any(self.gather_bytes(b"yes" if value else b""))

    def of_first(self, value: object) -> Any:
        """The first rank's `value`, pickled. Blocks; for set-up."""
        return self.gather_objects(value if self.is_first else None)[0]

    def are_equal(self, text: str) -> bool:
        """Whether `text` is the same on all ranks, replicas included. Blocks the host."""
        return len(set(self.gather_objects(hashlib.sha256(text.encode(errors="surrogatepass")).digest()))) == 1

    # -- failures ---------------------------------------------------------------------------------------------------

    def fail(self, failure: str) -> None:
        """Stop issuing collectives, and end the waits of other ranks for this one. Only the first failure is kept."""
        if self.failure is None:
            self.failure = failure
            self.recorder.post_failure(failure)  # first: other ranks read it when their waits end
            self.close()

    def abort(self, *, users_too: bool = False) -> None:
        """End this rank's waits, and the waits of ranks that wait for it. The watchdog calls this.

        Args:
            users_too: end waits in other libraries' collectives too.
        """
        if self.failure is None:
            self.close(users_too=users_too)

    def close(self, *, users_too: bool = False) -> None:
        """Close StreamShard's own groups; with `users_too` the user's group as well."""
        groups = [of() for of in (self._group_of, self._users_group_of) if of is not None]
        close_connections(*(group for group in groups if group is not None), users_too=users_too)


def refuse_together(group: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Tell the other ranks whether this rank refuses its model. Collective; blocks.

    On a rank that passes an error this returns; the caller raises the error.

    Args:
        group: all ranks of the model; None: the default group.
        error: why this rank refuses its model; None: it does not.

    Raises:
        ShardingError: this rank accepts its model, but another one refuses; names that rank and its reason.
        CommunicationError: another rank did not come.
    """
    ranks = RankGroup(
        group or dist.group.WORLD, meeting="the start of StreamShard(model), which all ranks have to call"
    )
    try:
        ranks.gather_results("shard the model", lambda: raise_if(error), ShardingError)
    except (CommunicationError, ShardingError):
        if error is None:
            raise


def run_on_all_ranks(
    group: RankGroup, doing: str, action: Callable[[], _T], raises: type[StreamShardError] = CheckpointError
) -> _T:
    """Run `action` on every rank. If it fails on one rank, raise on all.

    Args:
        group: the ranks.
        doing: what the action does, for the message: "could not <doing>".
        action: this rank's work; it must not communicate.
        raises: the class of the error.

    Raises:
        StreamShardError: of class `raises`; names the ranks on which the action failed, and why.
    """
    result: list[_T] = []
    group.gather_results(doing, lambda: result.append(action()), raises)
    return result[0]


def gather_from_all_ranks(group: RankGroup, doing: str, action: Callable[[], _T]) -> list[_T]:
    """As `run_on_all_ranks`; returns the results of all ranks, in rank order. Results are pickled."""
    return group.gather_results(doing, action, CheckpointError)


def run_on_first(group: RankGroup, doing: str, action: Callable[[], _T]) -> _T:
    """The result of `action` on the first rank, which alone runs it. Pickled. If it fails, raise on all ranks."""
    return cast(_T, gather_from_all_ranks(group, doing, lambda: action() if group.is_first else None)[0])


def raise_if(error: Exception | None) -> None:
    """Raise `error` if there is one: the action of `gather_results` for an error that this rank has kept until now."""
    if error is not None:
        raise error

"""Ranks that exchange Python objects, outside of training steps. If one rank fails, all ranks raise the same error.

[Note: errors of one rank]
In a collective, ranks wait for each other. So each rank does its own work, and pickles the result, before the
collective starts. If the work fails, the rank sends the error's text instead, and every rank raises. No rank leaves a
collective early, so training and later saves go on. The first rank may work in the middle
(`RankGroup.join_results`): all messages have come by then, and its answer, or its error, goes to all.

Each message begins with the name of its exchange. So ranks that came to different ones, such as a save and an
optimizer's step, do not read each other's messages: all raise.

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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import FlightRecorder, RecordKind
from streamshard.comm.host_groups import CONTROL_TIMEOUT, alive, close_connections, host_group_of, state_of, weak
from streamshard.comm.streams import RankWait, StreamName, Streams
from streamshard.comm.tree import gather_to_first, send_to_all
from streamshard.comm.watchdog import look_after
from streamshard.errors import (
    CheckpointError,
    CommunicationError,
    RankMismatchError,
    ShardingError,
    StreamShardError,
    describe,
)

_VALUE, _ERROR, _OTHER = b"v", b"e", b"o"  # the first byte of a message

# RuntimeErrors of this rank alone, such as out of memory: no collective has failed.
_OWN: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

_T = TypeVar("_T")
_Joined = TypeVar("_Joined")


class RankGroup:
    """Ranks that exchange objects over a gloo group of StreamShard's own.

    Args:
        group: all ranks; None: this process alone.
        shard_group: the ranks that share one replica of the model; None: all.
        replica: number of this rank's replica of the model.
        streams: the streams of the ranks' device; None: the CPU's.
        stream: the stream on which the ranks communicate.
        meeting: the name of all exchanges, in errors; "": "the exchange to " and its own name.
        timeout: of an exchange; None: `CONTROL_TIMEOUT`.
        is_beside_training: ranks meet in a thread of their own.

    Attributes:
        rank: this rank's number in its replica, of `world_size`.
        total_rank: this rank's number in all replicas, of `total_size`.
        is_first: whether `total_rank` is 0. The first rank does work for all, such as making a directory.
        replica, streams, stream: see above.
        group_of: returns the process group of the ranks that share one replica; None once it was destroyed.
        recorder: the logs of all ranks, this rank's waits, and the first failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        shard_group: dist.ProcessGroup | None = None,
        replica: int = 0,
        streams: Streams | None = None,
        stream: StreamName = StreamName.COMM,
        meeting: str = "",
        timeout: datetime.timedelta | None = None,
        is_beside_training: bool = False,
    ) -> None:
        shard_group = shard_group or group
        self.total_rank, self.total_size = (0, 1) if group is None else (group.rank(), group.size())
        self.rank, self.world_size = (0, 1) if shard_group is None else (shard_group.rank(), shard_group.size())
        self.is_first = self.total_rank == 0
        self.replica = replica
        self.streams = streams or Streams(torch.device("cpu"))
        self.stream = stream
        self.group_of, self.users_group_of = weak(shard_group), weak(group)
        self._is_fake = group is not None and dist.get_backend(group) == "fake"  # torch's: the other ranks do not exist
        self._meeting = meeting
        self._timeout = timeout
        has_streams = self.streams.has_streams
        self.recorder = FlightRecorder(group, has_streams=has_streams, is_beside_training=is_beside_training)
        if self.total_size > 1:
            look_after(self.recorder, self.abort)

    @property
    def users_group(self) -> dist.ProcessGroup:
        """All ranks, as the user's group, which other libraries use too.

        Raises:
            CommunicationError: the group has been destroyed.
        """
        return alive(self.users_group_of)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share one replica. Raises as `users_group` does."""
        return alive(self.group_of)

    def refuse_destroyed(self) -> None:
        """Raise as `users_group` does. Ranks that share memory could go on, and the ends of their waits could not."""
        if self.total_size > 1:
            alive(self.users_group_of)

    def waiting(self, action: str, subject: str = "") -> RankWait:
        """A context around collectives, and around waits for them. See `RankWait`."""
        return RankWait(self.recorder.log, self.end_wait, action, subject)

    def talk(self, action: str, kind: RecordKind) -> RankWait:
        """A context around an exchange outside of steps: logs `kind`, and guards `action`."""
        self.recorder.log.add(kind)
        return self.waiting(action)

    # -- objects ----------------------------------------------------------------------------------------------------

    def gather_results(
        self,
        doing: str,
        action: Callable[[], _T],
        raises: type[StreamShardError] = CheckpointError,
        *,
        at: object = "",
        with_replicas: bool = True,
    ) -> list[_T]:
        """Run `action` on every rank, and return all results in rank order. See [Note: errors of one rank].

        Args:
            doing: the action in words, the same on all ranks: the name of the exchange, and in "could not <doing>".
            action: this rank's work, without communication. Its result is pickled. Equal results are one object.
            raises: the class of the error.
            at: a path that follows `doing` in errors. It may differ between ranks.
            with_replicas: include the ranks of other replicas.

        Raises:
            RankMismatchError: ranks came to exchanges of different names.
            StreamShardError: of class `raises`, with the same text on every rank: on some rank `action` raised, or its
                result cannot be pickled. An interrupted rank raises `KeyboardInterrupt` or `SystemExit`.
        """
        return self.join_results(doing, action, list, raises, at=at, with_replicas=with_replicas)

    def join_results(
        self,
        doing: str,
        action: Callable[[], _T],
        join: Callable[[list[_T]], _Joined],
        raises: type[StreamShardError] = CheckpointError,
        *,
        at: object = "",
        with_replicas: bool = True,
    ) -> _Joined:
        """Run `action` on every rank, and on the first rank `join` with all results. Returns its result on every rank.

        So results may be different and large: only the first rank gets them. For the arguments see `gather_results`.

        Raises:
            StreamShardError: as `gather_results`; also if `join` raised on the first rank.
        """
        sent, error = _attempt(action)

        def answer(gathered: list[bytes]) -> bytes:
            nonlocal error
            if _failure_in(gathered) is None:
                reply, error = _attempt(lambda: join(_loaded(gathered)))
                # In the place of this rank's message: an error of `join` is reported as rank 0's.
                gathered = [reply, *gathered[1:]]
            failure = _failure_in(gathered)
            return gathered[0] if failure is None else _ERROR + failure.encode()

        reply = self._meet(doing, sent, answer, with_replicas=with_replicas)
        _raise_failed(f"{doing} {at}".rstrip(), reply[1:].decode() if reply.startswith(_ERROR) else None, raises, error)
        # A view: a slice of bytes copies them, and replies may be large.
        joined: _Joined = pickle.loads(memoryview(reply)[1:])
        return joined

    def gather_objects(self, doing: str, value: object, *, with_replicas: bool = True) -> list[Any]:
        """Every rank's `value`, in rank order. See `gather_results`. Blocks: for set-up and errors, not for steps."""
        return self.gather_results(doing, lambda: value, ShardingError, with_replicas=with_replicas)

    def of_first(self, doing: str, value: object) -> Any:
        """The first rank's `value`, pickled. Blocks: for set-up, not for steps."""
        return self.join_results(doing, lambda: None, lambda _: value, ShardingError)

    def are_equal(self, doing: str, text: str) -> bool:
        """Whether `text` is the same on all ranks, replicas included. Blocks the host."""
        # Paths in another encoding have surrogates.
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        return len(set(self.gather_objects(doing, digest))) == 1

    def _meet(self, name: str, data: bytes, answer: Callable[[list[bytes]], bytes], *, with_replicas: bool) -> bytes:
        """Call `answer`, which does not raise, on the first rank with all ranks' `data`. Returns its bytes. Blocks.

        Raises:
            RankMismatchError: another rank has given another `name`.
        """
        size = self.total_size if with_replicas else self.world_size
        if size == 1:
            return answer([data])
        if self._is_fake:  # the others would say the same
            self.recorder.log.add(RecordKind.MEETING)
            return answer([data] * size)
        timeout, what = self._timeout or CONTROL_TIMEOUT, self._meeting or f"the exchange to {name}"
        with self.talk(what, RecordKind.MEETING):
            group = host_group_of(self.users_group if with_replicas else self.group)
            gathered = gather_to_first(group, (name, data), timeout)
        try:
            reply = None if gathered is None else _answer_if_alike(gathered, answer)
            with self.waiting(what):  # no second entry in the log: children come here before their parents
                reply = send_to_all(group, reply, timeout)
        except BaseException as error:  # between the two halves too: this rank has come, and others wait for it
            self.fail(f"{what} ended with {describe(error)}")
            raise
        if reply.startswith(_OTHER):
            raise RankMismatchError(reply[1:].decode())
        return reply

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """The text of the first failure of a collective; None: none has failed."""
        return self.recorder.log.failure

    def end_wait(self, wait: RankWait, error: BaseException) -> None:
        """An error leaves `wait`: from now on this rank issues nothing, because other ranks may be gone.

        Raises:
            CommunicationError: the error is a backend's. Names the wait and the reason.
        """
        if self.failure is not None and isinstance(error, StreamShardError):  # a wait inside this one has ended so
            return
        if not isinstance(error, RuntimeError) or isinstance(error, (StreamShardError, *_OWN)):
            # Other ranks get its text. Here the error itself goes on, with its own class.
            self.fail(f"{wait} ended with {type(error).__name__}: {error}")
            return
        self.abort()  # so that the others show their logs
        message = f"{wait} failed on rank {self.total_rank} of {self.total_size}: {self.recorder.explain(error)}"
        self.fail(message)
        raise CommunicationError(message) from None  # the message quotes the backend

    def fail(self, failure: str) -> None:
        """Stop issuing collectives, and end other ranks' waits for this rank. A second call changes nothing."""
        if self.failure is None:
            self.recorder.log.failure = failure
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
        groups = [group for of in (self.group_of, self.users_group_of) if (group := of()) is not None]
        close_connections(*groups, users_too=users_too)


def _attempt(action: Callable[[], object]) -> tuple[bytes, BaseException | None]:
    """The message with the result of `action`, pickled, or with its error; and the error."""
    try:
        return _VALUE + pickle.dumps(action()), None
    except BaseException as caught:  # of an interrupt too: the other ranks wait for a message
        return _ERROR + describe(caught).encode(errors="backslashreplace"), caught  # a path may have surrogates


def _answer_if_alike(gathered: Sequence[tuple[str, bytes]], answer: Callable[[list[bytes]], bytes]) -> bytes:
    """The result of `answer`; the names of exchanges if ranks came to different ones."""
    names = [name for name, _ in gathered]
    if len(set(names)) == 1:
        return answer([data for _, data in gathered])
    first = names[0]
    rank, other = next((rank, name) for rank, name in enumerate(names) if name != first)
    text = f"ranks came to different exchanges: rank 0 is about to {first}, rank {rank} to {other}"
    return _OTHER + f"{text}. All ranks have to call the same methods in the same order".encode()


def _loaded(gathered: Sequence[bytes]) -> list[Any]:
    # Each message once: in most exchanges all ranks send the same.
    results = {each: pickle.loads(memoryview(each)[1:]) for each in dict.fromkeys(gathered)}
    return [results[each] for each in gathered]


def _failure_in(gathered: Sequence[bytes]) -> str | None:
    """The errors in the messages of `_attempt`, with their ranks; None: there are none."""
    errors = {rank: each[1:].decode() for rank, each in enumerate(gathered) if each.startswith(_ERROR)}
    if not errors:
        return None
    if len(errors) == len(gathered) and len(set(errors.values())) == 1:
        return f"all ranks: {errors[0]}" if len(errors) > 1 else errors[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())


def _raise_failed(doing: str, failure: str | None, raises: type[StreamShardError], error: BaseException | None) -> None:
    """Raise if an exchange has found a `failure`; `error` is this rank's own part of it."""
    if error is not None and not isinstance(error, Exception):  # an interrupt stays one
        raise error
    if failure is not None:
        raise raises(f"could not {doing}: {failure}") from error


def refuse_together(group: dist.ProcessGroup | None, error: Exception | None, told: object = None) -> list[Any]:
    """Tell the other ranks whether this rank refuses its model. Collective; blocks.

    Args:
        group: all ranks of the model; None: the default group.
        error: the reason to refuse this rank's model; None: the rank accepts it.
        told: what else to tell them, pickled.

    Returns:
        What each rank has told. Empty on a rank that gives an `error`: the caller raises it.

    Raises:
        ShardingError: this rank accepts its model, but another rank refuses. Names that rank and its reason.
        CommunicationError: another rank did not come, or an earlier error has closed the group.
    """
    meeting = "the start of StreamShard(model), which all ranks have to call"
    if (group := group or dist.group.WORLD) is not None and state_of(group).is_closed:
        raise CommunicationError(
            "StreamShard(model): an earlier error, raised then, has ended all exchanges of this process group, so that "
            "no rank waits for ever: start the processes again"
        )
    ranks = RankGroup(group, meeting=meeting)

    def tell() -> object:
        raise_if(error)
        return told

    try:
        return ranks.gather_results("shard the model", tell, ShardingError)
    except (CommunicationError, ShardingError):
        if error is None:
            raise
        return []


def run_on_all_ranks(
    ranks: RankGroup,
    doing: str,
    action: Callable[[], _T],
    raises: type[StreamShardError] = CheckpointError,
    *,
    at: object = "",
) -> _T:
    """Run `action` on every rank, and return this rank's result. If it fails on one rank, raise on all.

    Args:
        ranks: the ranks.
        doing, action, raises, at: see `RankGroup.gather_results`. The result is not pickled.

    Raises:
        StreamShardError: of class `raises`; names the ranks on which the action failed, and their reasons.
    """
    result: list[_T] = []
    ranks.gather_results(doing, lambda: result.append(action()), raises, at=at)
    return result[0]


def run_on_first(ranks: RankGroup, doing: str, action: Callable[[], _T], *, at: object = "") -> _T:
    """Run `action` on the first rank only, and return its result, pickled. If it fails, raise on all ranks."""
    return ranks.join_results(doing, lambda: None, lambda _: action(), at=at)


def refuse_differences(what: str, given: Sequence[object]) -> None:
    """Raise on all ranks alike, unless all of them have `given` the same to `what`.

    Raises:
        RankMismatchError: has the first rank's, and each one that differs.
    """
    first, *others = given
    if told := "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(others, 1) if theirs != first):
        raise RankMismatchError(f"{what} wants the same on all ranks. Rank 0 gives {first}; {told}")


def raise_if(error: Exception | None) -> None:
    """Raise `error` if there is one. For the action of `gather_results`, with an error of an earlier moment."""
    if error is not None:
        raise error

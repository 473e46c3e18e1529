"""Exchange Python objects between ranks. If one rank fails, all ranks raise the same error.

[Note: errors of one rank]
In a collective, ranks wait for each other. So each rank does its own work, and pickles the result, before the
collective starts. If that fails, the rank sends the error's text instead, and every rank raises. No rank leaves a
collective early, so training and later saves go on.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from streamshard.errors import CheckpointError, StreamShardError
from streamshard.torch_private import AllgatherOptions

__all__ = [
    "RankGroup",
    "SingleProcess",
    "describe",
    "gather_bytes",
    "gather_from_all_ranks",
    "gather_results",
    "raise_if",
    "run_on_all_ranks",
]

_VALUE, _ERROR = b"v", b"e"  # first bytes of what a rank sends

_T = TypeVar("_T")


class RankGroup(Protocol):
    """The ranks that read or write files together."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does work for all, such as making a directory."""

    @property
    def replica(self) -> int:
        """Number of this rank's replica of the model, from 0."""

    @property
    def number(self) -> int:
        """This rank's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks share one replica of the model."""

    @property
    def total_size(self) -> int:
        """How many ranks there are in all replicas."""

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Every rank's `data`, in rank order. Blocks until all ranks have called it. A single rank need not call it."""


class SingleProcess:
    """The only rank: one process without a process group."""

    is_first = True
    replica = 0
    number = 0
    world_size = 1
    total_size = 1

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """`data` alone."""
        return [data]


def run_on_all_ranks(group: RankGroup, doing: str, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank. If it fails on one rank, raise on all.

    Args:
        group: the ranks.
        doing: what the action does, for the message: "could not <doing>".
        action: this rank's work; it must not communicate.

    Raises:
        CheckpointError: names the ranks on which the action failed, and why.
    """
    result: list[_T] = []
    gather_from_all_ranks(group, doing, lambda: result.append(action()))
    return result[0]


def gather_from_all_ranks(group: RankGroup, doing: str, action: Callable[[], _T]) -> list[_T]:
    """As `run_on_all_ranks`; returns the results of all ranks, in rank order. Results are pickled."""
    return gather_results(group.gather_bytes if group.total_size > 1 else None, doing, action, CheckpointError)


def gather_results(
    gather: Callable[[bytes], list[bytes]] | None,
    doing: str,
    action: Callable[[], _T],
    raises: type[StreamShardError],
) -> list[_T]:
    """Run `action` on every rank, and return all results in rank order. See [Note: errors of one rank].

    Args:
        gather: returns the bytes of all ranks, in rank order; None: this is the only rank.
        doing: what the action does, for the message: "could not <doing>".
        action: this rank's work; it must not communicate. Its result is pickled.
        raises: the class of the error.

    Raises:
        StreamShardError: of class `raises`, with the same text on every rank: on some rank `action` raised, or its
            result cannot be pickled or unpickled. An interrupted rank raises `KeyboardInterrupt` or `SystemExit`
            instead.
    """
    error: BaseException | None = None
    sent = _VALUE
    try:
        value = action()
        if gather is not None:
            sent += pickle.dumps(value)
    except BaseException as caught:
        error, sent = caught, _ERROR + describe(caught).encode(errors="backslashreplace")
    gathered = [sent] if gather is None else gather(sent)
    if error is not None and not isinstance(error, Exception):
        raise error
    errors = {rank: each[1:].decode() for rank, each in enumerate(gathered) if each.startswith(_ERROR)}
    if errors:
        failed = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
        if len(errors) == len(gathered) and len(set(errors.values())) == 1:
            failed = f"all ranks: {errors[0]}" if len(errors) > 1 else errors[0]
        raise raises(f"could not {doing}: {failed}") from error
    if gather is None:
        return [value]
    try:
        return [pickle.loads(memoryview(each)[1:]) for each in gathered]
    except Exception as bad:  # on all ranks alike: they unpickle the same bytes
        raise raises(f"could not {doing}: {describe(bad)}") from bad


def raise_if(error: Exception | None) -> None:
    """Raise `error` if there is one: the action of `gather_results` for an error that this rank has kept until now."""
    if error is not None:
        raise error


def describe(error: BaseException) -> str:
    """`error` in words, for other ranks. The package's own errors need no class name."""
    try:
        words = str(error)
    except Exception:  # a class of the user's may fail to say what it is
        words = ""
    if isinstance(error, StreamShardError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def gather_bytes(group: dist.ProcessGroup, data: bytes, timeout: datetime.timedelta | None = None) -> list[bytes]:
    """Every rank's `data`, in rank order. Blocks. Two collectives; one if `data` is empty on all ranks.

    Args:
        group: has a backend for the CPU.
        data: of any length, which may differ between ranks.
        timeout: of each collective; None: the group's own.
    """
    sizes = _all_gather(group, torch.tensor([len(data)]), timeout).flatten().tolist()
    if not any(sizes):
        return [b""] * len(sizes)
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    gathered = _all_gather(group, padded, timeout).numpy()
    return [row[:size].tobytes() for row, size in zip(gathered, sizes, strict=True)]


def _all_gather(group: dist.ProcessGroup, tensor: torch.Tensor, timeout: datetime.timedelta | None) -> torch.Tensor:
    results = tensor.new_empty(group.size(), tensor.numel())
    options = AllgatherOptions()
    if timeout is not None:
        options.timeout = timeout
    group.allgather([list(results.unbind())], [tensor], options).wait()
    return results

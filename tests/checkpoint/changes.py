"""Kills and errors at each moment of some code, in turn: at changes of a file system, or operations of a store."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import pytest

from streamshard.errors import CheckpointError

Act = Callable[[Callable[[], Any]], Any]
_Place = TypeVar("_Place")
CHANGES = {"open", "ftruncate", "pwrite", "fsync", "link", "replace", "rename", "unlink", "mkdir", "rmdir"}


class Killed(BaseException):
    """The process is no more."""


def kill(call: Callable[[], Any]) -> None:
    """From here on nothing happens."""
    raise Killed


def fail(call: Callable[[], Any]) -> None:
    """The disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_late(call: Callable[[], Any]) -> None:
    """It has taken place, and its answer is lost."""
    call()
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def answer_badly(call: Callable[[], Any]) -> None:
    """The same, from a store."""
    call()
    raise RuntimeError("the connection is lost")  # of a class of its own, as many stores have


def sweep(
    at: Callable[..., Any], act: Act, prepare: Callable[[int], _Place], attempt: Callable[[_Place], object]
) -> Iterator[tuple[int, _Place, BaseException | None]]:
    """Call ``attempt(prepare(number))`` with `act` at its moment of this number, from 0, while it has so many.

    Args:
        at: `at_change` or `at_operation`. A kill lasts.
        act: as for them.
        prepare: makes a place for the attempt.
        attempt: ends with a kill, a `CheckpointError`, or well.

    Yields:
        The number, the place, and how the attempt ended.
    """
    for number in itertools.count():
        place, error = prepare(number), None
        with at(number, act, lasting=act is kill) as done:
            try:
                attempt(place)
            except (Killed, CheckpointError) as raised:
                error = raised
        if len(done) <= number:
            return
        yield number, place, error


def acting(done: list[str], number: int, act: Act, lasting: bool) -> Callable[[str, Callable[[], Any]], Any]:
    """A function that carries out a call, noting it in `done`; ``act(call)`` instead at the number, or `lasting`."""

    def carry_out(what: str, call: Callable[[], Any]) -> Any:
        done.append(what)
        is_now = len(done) - 1 == number or (lasting and len(done) > number)
        return act(call) if is_now else call()

    return carry_out


@contextlib.contextmanager
def at_change(number: int, act: Act, *, lasting: bool = False, calls: Collection[str] = CHANGES) -> Iterator[list[str]]:
    """Inside, ``act(real_call)`` takes the place of the change with this number, from 0, or of `lasting` ones.

    Only `calls` count, and opening a file that is there does not.

    Yields:
        The changes so far, as "rename".
    """
    done: list[str] = []
    carry_out = acting(done, number, act, lasting)

    def watch(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            return carry_out(name, lambda: real(*args, **kwargs))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, watch(getattr(os, name), name))
        yield done

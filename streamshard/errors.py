"""Every error StreamShard raises on purpose, as one tree.

    StreamShardError
    +-- ConfigError         an argument or setting that cannot work (also a ValueError)
    +-- UnitError           units that overlap, are empty, or are not part of the model
    +-- ShardingError       a model that cannot be sharded, or is used in a way sharding forbids
    +-- RankMismatchError   ranks disagree about the model or the settings
    +-- OptimizerError      an optimizer's step raised on some rank; raised on all
    +-- CommunicationError  a collective failed or timed out: a rank has died, or ranks ran different things
    +-- CheckpointError     files that cannot be written or read
    +-- HostMemoryError     host memory that cannot be pinned (also a MemoryError)
    +-- StateError          an invariant of the engine is broken

A message names the given value, the wanted one, and the parameter, layer or rank. Warnings go through `warn_user` or
`log`.
"""

from __future__ import annotations

import errno
import linecache
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence


class StreamShardError(RuntimeError):
    """Base of all errors raised on purpose."""


class ConfigError(StreamShardError, ValueError):
    """An argument or setting that cannot work."""


class UnitError(StreamShardError):
    """Units that overlap, are empty, or are not part of the model."""


class ShardingError(StreamShardError):
    """A model that cannot be sharded, or is used in a way that sharding forbids."""


class RankMismatchError(StreamShardError):
    """Ranks disagree about the model or the settings."""


class OptimizerError(StreamShardError):
    """An optimizer's step raised on some rank; raised on all."""


class CommunicationError(StreamShardError):
    """A collective failed or timed out: a rank has died, or ranks ran different things."""


class HostMemoryError(StreamShardError, MemoryError):
    """Host memory that cannot be pinned."""


class CheckpointError(StreamShardError):
    """Files of a checkpoint, an export or a conversion that cannot be written or read.

    The message is one line of printable characters: names come from files, and may hold terminal commands. The lists
    are complete and as in the files, while the message may show only some names. They are empty if something else is
    wrong.

    Attributes:
        missing: names of tensors that the model wants and the files do not have.
        unexpected: names of tensors that the files have and the model does not.
        mismatched: names of tensors whose shape or kind differs, each with the difference.
    """

    def __init__(
        self, *args: object, missing: Sequence[str] = (), unexpected: Sequence[str] = (), mismatched: Sequence[str] = ()
    ) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))
        self.missing, self.unexpected, self.mismatched = list(missing), list(unexpected), list(mismatched)


class StateError(StreamShardError):
    """A broken invariant of the engine: a bug here, not in the user's code.

    Args:
        subject: the unit, slot or object.
        state: its state.
        wanted: the right state.
    """

    def __init__(self, subject: str, state: str, wanted: str) -> None:
        super().__init__(f"{subject} is {state}, wanted {wanted}")


def want_positive(numbers: Mapping[str, float | None]) -> None:
    """Raise a ConfigError that names the first of `numbers` that is not positive. None is not given."""
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ConfigError(f"{name}={number}: wanted a positive number")


_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def warn_user(message: str) -> None:
    """Issue a UserWarning that points at the line of the user's code that called the package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


log = logging.getLogger("streamshard")


def _name_rank(record: logging.LogRecord) -> bool:
    dist = sys.modules.get("torch.distributed")  # not imported: `streamshard --help` does without torch
    if dist is not None and dist.is_initialized() and dist.get_world_size() > 1:
        record.msg = f"rank {dist.get_rank()}: {record.msg}"
    return True


log.addFilter(_name_rank)


def describe(error: BaseException) -> str:
    """`error` in words, for other ranks. Errors of the package are shown without their class."""
    return str(error) if isinstance(error, StreamShardError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def is_shortage(error: BaseException | None) -> bool:
    """Whether `error` says that this process lacks memory or file descriptors. The files that it reads may be fine."""
    lacking = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    is_memory = isinstance(error, MemoryError) or os.strerror(errno.ENOMEM) in str(error)  # torch's: a RuntimeError
    return is_memory or isinstance(error, OSError) and error.errno in lacking


def is_of_this_rank(error: BaseException) -> bool:
    """Whether only this rank raises `error`. Other errors of the package are raised by all ranks, or quote another."""
    return isinstance(error, HostMemoryError) or not isinstance(error, StreamShardError)


def uncaught() -> BaseException | None:
    """The exception that ends this process, for functions at exit. In an interactive session: the last one shown."""
    return getattr(sys, "last_value", None)


_INSTALLED = re.compile(r"<frozen|.*[/\\](site|dist)-packages[/\\]|" + re.escape(os.path.dirname(os.__file__) + os.sep))


def line_reached() -> str:
    """The line of the user's script that the main thread has reached, behind torch's collective if it is in one.

    For example "dist.barrier() in train.py, line 15: accelerator.wait_for_everyone()".
    """
    collective = ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for each, number in traceback.walk_stack(frame) if frame is not None else ():
        file = each.f_code.co_filename
        if file.endswith("distributed_c10d.py"):
            collective = f"dist.{each.f_code.co_name}() in "
        elif not file.startswith(_PACKAGE) and not _INSTALLED.match(file):
            number = number or 0  # None if the thread has gone on meanwhile
            text = linecache.getline(file, number).strip()
            return f"{collective}{os.path.basename(file)}, line {number}" + (f": {text}" if text else "")
    return f"{collective}an unknown line"


def printable(text: str) -> str:
    """`text` in one line, with control characters escaped: file names and files may hold terminal commands."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)

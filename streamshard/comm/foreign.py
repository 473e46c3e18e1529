"""Collectives that others than StreamShard call: how many there were, and in which one a thread is now.

A rank that waits in another library's collective (``accelerator.gather``, ``dist.barrier()``) issues nothing of
StreamShard's. Whether the ranks that wait for it wait in vain follows from the two answers here; see
`streamshard.comm.flight_recorder.Board.find_foreign`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["collective_counter", "find_call"]

_C10D = "distributed_c10d.py"
_WRAPPERS = {"wrapper"}  # of torch.distributed's loggers, around each of its functions
# A message between two ranks says nothing about the others.
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}


def collective_counter() -> Callable[[], int]:
    """A function that says how many collectives this rank has issued on the default process group.

    It says 0 where that is not known: without a group, or on a backend that does not count (the fake one).
    """
    try:
        _count_collectives()
    except RuntimeError:
        return int
    return _count_collectives


def _count_collectives() -> int:
    world: Any = dist.group.WORLD  # the stubs lack the method
    return 0 if world is None else int(world._get_sequence_number_for_group())


def find_call(thread: int) -> str | None:
    """The collective of torch.distributed in which a thread is, and who called it; None if it is in none.

    Args:
        thread: its `threading.get_ident()`.

    Returns:
        For example ``torch.distributed.all_gather_into_tensor, called at accelerate/utils/operations.py:347``.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    called = None
    while frame is not None and (_is_of_c10d(frame) or (called and frame.f_code.co_name in _WRAPPERS)):
        if _is_of_c10d(frame):
            called = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or called is None or called in _POINT_TO_POINT:
        return None
    place = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"torch.distributed.{called}, called at {place}:{frame.f_lineno}"


def _is_of_c10d(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).name == _C10D

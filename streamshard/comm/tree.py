"""Messages of all ranks to the first rank, and one message of the first rank to all, along a binomial tree.

Children of rank r are the ranks r + 1, r + 2, r + 4, .. as long as the step is below the lowest set bit of r. Children
of the first rank are all powers of two. So a rank connects to log2(N) others, and a message takes log2(N) hops. Equal
messages are sent on once: most exchanges send a digest or a list of settings, the same on all ranks, whose bytes do not
grow with N. gloo's all-gather takes N - 1 hops, and receives N messages of the longest one's size.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

TAG = (1 << 31) - 2  # of no flat parameter
_FIRST_BYTES, _LENGTH_BYTES = 512, 8  # a short message takes one send

_Message = TypeVar("_Message", bound=Hashable)  # can be pickled


def gather_to_first(group: dist.ProcessGroup, message: _Message, timeout: datetime.timedelta) -> list[_Message] | None:
    """Every rank's `message`, in rank order, on the first rank; None on the others. Equal ones are one object. Blocks.

    Args:
        group: serves the CPU.
        message: bytes, or a tuple with bytes, of any size.
        timeout: of each hop.
    """
    rank = group.rank()
    known, messages = {message: message}, [message]  # of the ranks from this one to the last one below it
    for child in _children(rank, group.size()):
        messages += [known.setdefault(each, each) for each in _unpack(_receive(group, child, timeout))]
    if not rank:
        return messages
    _send(group, _pack(messages), [rank & (rank - 1)], timeout)  # the parent lacks the lowest set bit
    return None


def send_to_all(group: dist.ProcessGroup, data: bytes | None, timeout: datetime.timedelta) -> bytes:
    """The first rank's `data`, on every rank. Blocks. Other ranks give None."""
    rank = group.rank()
    if data is None:
        data = _receive(group, rank & (rank - 1), timeout)
    _send(group, data, list(_children(rank, group.size()))[::-1], timeout)  # the longest way first
    return data


def _pack(messages: Sequence[Hashable]) -> bytes:
    """One message of many. It has equal ones once."""
    place_of = {each: place for place, each in enumerate(dict.fromkeys(messages))}
    return pickle.dumps((list(place_of), [place_of[each] for each in messages]))


def _unpack(data: bytes) -> list[Any]:
    """The messages that `_pack` has packed. Equal ones are one object."""
    different, places = pickle.loads(data)
    return [different[place] for place in places]


def _children(rank: int, size: int) -> Iterator[int]:
    step = 1
    while not rank & step and rank + step < size:
        yield rank + step
        step *= 2


def _send(group: dist.ProcessGroup, data: bytes, to: Sequence[int], timeout: datetime.timedelta) -> None:
    # A bytearray: torch warns of memory that is read-only.
    text = torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data), dtype=torch.uint8)
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8, device="cpu")
    first[: text.numel()] = text[:_FIRST_BYTES]
    parts = [first, text[_FIRST_BYTES:]] if text.numel() > _FIRST_BYTES else [first]
    for work in [group.send([part], rank, TAG) for rank in to for part in parts]:
        work.wait(timeout)


def _receive(group: dist.ProcessGroup, source: int, timeout: datetime.timedelta) -> bytes:
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8, device="cpu")
    group.recv([first], source, TAG).wait(timeout)
    begin = first.numpy().tobytes()
    size = int.from_bytes(begin[:_LENGTH_BYTES], "little")
    data = begin[_LENGTH_BYTES:][:size]
    if missing := size - len(data):
        rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
        group.recv([rest], source, TAG).wait(timeout)
        data += rest.numpy().tobytes()
    return data

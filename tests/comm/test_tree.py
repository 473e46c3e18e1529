"""Messages along a tree of ranks, which are threads here, so that there can be many."""

from __future__ import annotations

import datetime
import math
import queue
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamshard.comm.tree import gather_to_first, send_to_all

_SOON = datetime.timedelta(seconds=60)


class _Ranks:
    """A process group of threads. Counts each rank's peers, and the bytes that it sends."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank, self.size = lambda: rank, lambda: size
        self._me, self._mail = rank, mail
        self.peers: set[int] = set()
        self.sent_bytes = 0

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.peers.add(to)
        self.sent_bytes += tensors[0].numel()
        self._mail[self._me, to].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.peers.add(source)
        mail = self._mail[source, self._me]
        return SimpleNamespace(wait=lambda timeout: tensors[0].copy_(mail.get(timeout=10)))


def _exchange(messages: list[bytes]) -> tuple[list[_Ranks], list[Any], list[bytes]]:
    """The ranks, what each has gathered, and what each was sent from the first one."""
    size, mail = len(messages), defaultdict[tuple[int, int], queue.Queue[torch.Tensor]](queue.Queue)
    ranks = [_Ranks(rank, size, mail) for rank in range(size)]
    for one in range(size):
        for other in range(size):
            mail[one, other]  # made before threads look for it
    gathered: list[list[bytes] | None] = [None] * size
    told = [b""] * size

    def run(rank: int) -> None:
        group: Any = ranks[rank]
        gathered[rank] = found = gather_to_first(group, messages[rank], _SOON)
        told[rank] = send_to_all(group, None if found is None else b"/".join(sorted(set(found))), _SOON)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ranks, gathered, told


@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_the_first_rank_gets_all_messages_in_order_and_all_ranks_get_its_answer(size: int) -> None:
    """Of any length: empty, in one send, in two."""
    messages = [bytes([rank]) * (rank * 97 % 1500) for rank in range(size)]
    ranks, gathered, told = _exchange(messages)
    assert gathered == [messages] + [None] * (size - 1)
    assert told == [b"/".join(sorted(messages))] * size
    assert max(len(each.peers) for each in ranks) <= math.ceil(math.log2(size))


def test_equal_messages_travel_once() -> None:
    """Once up to the first rank and once down on each connection, however many ranks send them."""
    data = bytes(10_000)
    for size in (4, 16):
        ranks, gathered, _ = _exchange([data] * size)
        assert all(each.sent_bytes < (1 + len(each.peers)) * 11_000 for each in ranks)
        assert len({id(each) for each in gathered[0]}) == 1
    halves = _exchange([data, data[1:]] * 8)[1][0]
    assert [len(each) for each in halves] == [10_000, 9_999] * 8

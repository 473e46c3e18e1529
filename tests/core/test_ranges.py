"""Copies are joined where they follow each other in memory."""

from __future__ import annotations

import torch

from streamshard.core.ranges import Range, joined


def test_copies_from_two_tensors_are_not_joined_although_their_ranges_follow_each_other() -> None:
    buffer, first, second = (torch.zeros(8) for _ in range(3))
    copies = [(Range(buffer, 0, 4), Range(first, 0, 4)), (Range(buffer, 4, 4), Range(second, 4, 4))]
    assert len(joined(copies)) == 2

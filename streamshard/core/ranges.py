"""Copies of many parameters at once: ranges of contiguous tensors, joined where they follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

GAP_NUMEL = 256  # a copy takes as many elements along, rather than end


class Range(NamedTuple):
    """Elements of a contiguous tensor, whatever its shape."""

    tensor: torch.Tensor
    start: int
    numel: int

    def distance(self, other: Range) -> int | None:
        """Elements from the first of this to the first of `other`; None: they are in other memory."""
        mine, its = self.tensor, other.tensor
        if mine is its:
            return other.start - self.start
        if mine._base is None or mine._base is not its._base:
            return None
        return int(its.storage_offset() + other.start - mine.storage_offset() - self.start)

    def view(self) -> torch.Tensor:
        """[numel], an alias with a version counter of its own."""
        return self.tensor.data.as_strided((self.numel,), (1,), self.tensor.storage_offset() + self.start)


Copy = tuple[Range, Range]  # to, from


def joined(copies: Iterable[Copy]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same copies, as few as possible: those that follow each other on both sides become one.

    It copies gaps too. In a gap are elements of alignment, or of a small parameter that is not stepped: they are
    copied to the device, and back as they were.
    """
    joined: list[Copy] = []
    for to, source in copies:
        if joined:
            to_first, first = joined[-1]
            distance = first.distance(source)
            if distance is not None and 0 <= distance - first.numel <= GAP_NUMEL and distance == to_first.distance(to):
                numel = distance + source.numel
                joined[-1] = to_first._replace(numel=numel), first._replace(numel=numel)
                continue
        joined.append((to, source))
    return [(to.view(), source.view()) for to, source in joined]


def cut(buffer: torch.Tensor, places: Iterable[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Views of `buffer`, in the order of its memory, each from a begin on and of a length. One operator."""
    sizes, end = [], 0
    for begin, numel in places:
        sizes += [begin - end, numel]
        end = begin + numel
    return buffer.split_with_sizes([*sizes, buffer.numel() - end])[1::2]

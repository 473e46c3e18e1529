"""Sums of parts are put together to the sum of the whole, and what does not fit together is refused."""

from __future__ import annotations

import random
import zlib
from io import FileIO
from pathlib import Path

import pytest

from streamshard.checkpoint.checksum import Extent, Extents, join_extents, read_extent, share_of
from streamshard.errors import CheckpointError


def _parts(data: bytes, number: int, generator: random.Random) -> list[Extent]:
    cuts = sorted({0, len(data), *(generator.randrange(len(data)) for _ in range(generator.randrange(6)))})
    return [Extent(number, a, b, zlib.crc32(data[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_any_order_give_the_sum_of_the_whole(seed: int) -> None:
    """As zlib's own, of parts of any length from one byte on."""
    generator = random.Random(seed)
    files = [generator.randbytes(generator.choice((1, 2, 1000, 70_000, 1 << 20))) for _ in range(3)]
    parts = [part for number, data in enumerate(files) for part in _parts(data, number, generator)]
    generator.shuffle(parts)
    assert join_extents(parts, [len(data) for data in files]) == [zlib.crc32(data) for data in files]


def test_what_goes_by_is_one_extent_as_long_as_neighbours_follow_each_other() -> None:
    """Ranks tell each other of runs, not of every chunk."""
    data = memoryview(bytes(range(100)))
    extents = Extents()
    for file, start, stop in ((0, 0, 10), (0, 10, 25), (0, 30, 40), (1, 40, 50), (1, 50, 51)):
        extents.add(file, start, data[start:stop])
    assert extents.found == [
        Extent(file, start, stop, zlib.crc32(data[start:stop]))
        for file, start, stop in ((0, 0, 25), (0, 30, 40), (1, 40, 51))
    ]


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 4), (5, 10)],
        [(0, 4), (3, 10)],
        [(1, 10)],
        [(0, 9)],
        [(0, 11)],
        [],
        [(0, 10), (2, 4)],
        [(0, 10), (0, 10)],
    ],
)
def test_parts_that_do_not_cover_a_file_once_are_refused(extents: list[tuple[int, int]]) -> None:
    """A gap, an overlap, nothing at the beginning or at the end, too much, the same twice."""
    with pytest.raises(CheckpointError, match="file 2 of 2"):
        join_extents([Extent(0, 0, 10, 7), *(Extent(1, *each, 7) for each in extents)], [10, 10])


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_readers_share_all_bytes_evenly(parts: int, tmp_path: Path) -> None:
    """However few files there are; together they read each byte once."""
    generator = random.Random(parts)
    files = [generator.randbytes(size) for size in (13, 1, 20)]
    opened = []
    for number, data in enumerate(files):
        (tmp_path / str(number)).write_bytes(data)
        opened.append(FileIO(tmp_path / str(number)))
    sizes = [len(data) for data in files]
    shares = [list(share_of(sizes, part, parts)) for part in range(parts)]
    lengths = [sum(stop - start for _, start, stop in share) for share in shares]
    assert sum(lengths) == sum(sizes)
    assert max(lengths) - min(lengths) <= 1
    counts: list[int] = []
    found = [
        read_extent(opened[file], file, start, stop, sizes[file], counts.append)
        for share in shares
        for file, start, stop in share
    ]
    for each in opened:
        each.close()
    assert sum(counts) == sum(sizes)
    assert join_extents(found, sizes) == [zlib.crc32(data) for data in files]


@pytest.mark.parametrize(("size", "what"), [(99, "shorter"), (101, "longer")])
def test_a_file_of_another_length_is_named(size: int, what: str, tmp_path: Path) -> None:
    """By whoever reads its end."""
    (tmp_path / "file").write_bytes(b"x" * size)
    with FileIO(tmp_path / "file") as file, pytest.raises(CheckpointError, match=f"file is {what} than 100 bytes"):
        read_extent(file, 0, 50, 100, 100, lambda count: None)

"""CRC-32 of files of which several ranks write or read parts.

Sums of neighbouring parts give the sum of both without another look at their bytes: appending n bytes multiplies what
came before by x^8n modulo the polynomial. It is zlib's ``crc32_combine``, which Python's zlib does not have. So whoever
writes bytes sums them up on the way, and reading a file again is shared out evenly, however few files there are.

Against damage, which is what it is for, 32 bits are enough: one flipped bit, or any 32 in a row, always change it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from io import FileIO
from typing import NamedTuple

from streamshard.errors import CheckpointError

__all__ = ["Extent", "Extents", "join_extents", "read_extent", "share_of", "shown"]

_READ_BYTES = 1 << 20  # at once

_POLYNOMIAL = 0xEDB88320  # reflected: the highest bit is the coefficient of x^0
_ONE = 1 << 31


class Extent(NamedTuple):
    """Bytes [start, stop) of one of several files.

    Attributes:
        file: its number among them.
        start: first byte.
        stop: one past the last.
        crc32: of those bytes.
    """

    file: int
    start: int
    stop: int
    crc32: int


class Extents:
    """Sums up bytes as they go by.

    Attributes:
        found: what has gone by, neighbours that came one after the other as one.
    """

    def __init__(self) -> None:
        self.found: list[Extent] = []

    def add(self, file: int, start: int, data: memoryview) -> None:
        """`data`, one byte or more, lies in file number `file` from byte `start` on."""
        last = self.found[-1] if self.found else None
        if last is not None and (last.file, last.stop) == (file, start):
            self.found[-1] = Extent(file, last.start, start + len(data), zlib.crc32(data, last.crc32))
        else:
            self.found.append(Extent(file, start, start + len(data), zlib.crc32(data)))


def share_of(sizes_bytes: Sequence[int], part: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """What one of `parts` readers reads of files of these sizes, an equal share of all bytes: (file, start, stop)."""
    total = sum(sizes_bytes)
    first, last = total * part // parts, total * (part + 1) // parts
    before = 0  # bytes of the files in front of this one
    for number, size in enumerate(sizes_bytes):
        start, stop = max(first - before, 0), min(last - before, size)
        if start < stop:
            yield number, start, stop
        before += size


def read_extent(
    file: FileIO, number: int, start: int, stop: int, size_bytes: int, advance: Callable[[int], object]
) -> Extent:
    """Read and sum up bytes [start, stop) of a file.

    Args:
        file: open for reading.
        number: of the file, among those that are read.
        start: first byte.
        stop: one past the last.
        size_bytes: as long as the file should be.
        advance: is told how many bytes were read, now and then.

    Raises:
        CheckpointError: the file is shorter, or longer.
        OSError: of reading.
    """
    crc32, position = 0, start
    buffer = memoryview(bytearray(_READ_BYTES))
    while position < stop:
        count = os.preadv(file.fileno(), [buffer[: stop - position]], position)
        if not count:
            raise CheckpointError(f"{os.fsdecode(file.name)} is shorter than {size_bytes} bytes")
        crc32 = zlib.crc32(buffer[:count], crc32)
        position += count
        advance(count)
    if stop == size_bytes and os.pread(file.fileno(), 1, stop):
        raise CheckpointError(f"{os.fsdecode(file.name)} is longer than {size_bytes} bytes")
    return Extent(number, start, stop, crc32)


def join_extents(extents: Iterable[Extent], sizes_bytes: Sequence[int]) -> list[int]:
    """The sums of whole files, of parts that cover each of them once.

    Raises:
        CheckpointError: they leave something out, or overlap.
    """
    sums = [0] * len(sizes_bytes)
    ends = [0] * len(sizes_bytes)
    for extent in sorted(extents):
        if extent.start != ends[extent.file]:
            raise CheckpointError(
                f"bytes {ends[extent.file]} and {extent.start} of file {extent.file + 1} of {len(sizes_bytes)} should "
                "be one: its parts overlap, or leave something out"
            )
        sums[extent.file] = _combine(sums[extent.file], extent.crc32, extent.stop - extent.start)
        ends[extent.file] = extent.stop
    for number, (end, size) in enumerate(zip(ends, sizes_bytes, strict=True)):
        if end != size:
            raise CheckpointError(f"file {number + 1} of {len(sizes_bytes)} has {size} bytes, of which {end} are known")
    return sums


def shown(crc32: int) -> str:
    """As it is written down: eight hexadecimal digits."""
    return f"{crc32:08x}"


def _combine(first: int, second: int, second_bytes: int) -> int:
    """The sum of A + B, of the sums of A and of B and the length of B."""
    return _times(_power(second_bytes), first) ^ second


@lru_cache(maxsize=1024)  # parts of few lengths occur again and again
def _power(n_bytes: int) -> int:
    """x^(8 n_bytes)."""
    result = _ONE
    for place in range(n_bytes.bit_length()):
        if n_bytes >> place & 1:
            result = _times(result, _squared(place))
    return result


@cache
def _squared(times: int) -> int:
    """x^8, squared so many times."""
    return _times(_squared(times - 1), _squared(times - 1)) if times else _ONE >> 8


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product

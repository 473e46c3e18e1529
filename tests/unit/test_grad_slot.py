"""The grad slot on a device with streams: small gradients are copied together, and are there when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from streamshard.comm.streams import Streams
from streamshard.unit.buffers import GradSlot, Ledger, Scratch
from tests.simulated import SimulatedDevice, SimulatedStream, simulated_device

MEBIBYTE = 1 << 20
SMALL = 1000  # elements


class _Bench:
    """An open slot of ten places, and what was copied together: how many, on which stream."""

    def __init__(self, device: SimulatedDevice) -> None:
        cpu, numel = torch.device("cpu"), 10 * SMALL
        self.device = device
        streams = Streams(cpu)
        ledger = Ledger(streams)
        scratch = Scratch(0, ledger)
        self.slot = GradSlot(4 * numel, ledger, streams, scratch, "grad slot 0", holds_main_grads=False)
        self.buffer = self.slot.buffer.view(torch.float32)
        self.slot.open(0)
        self.copied: list[tuple[int, SimulatedStream]] = []
        self._copy = torch._foreach_copy_

    def copy(self, places: Any, grads: Any) -> None:
        """In the place of torch's."""
        self.copied.append((len(grads), self.device.current_stream()))
        self._copy(places, grads)

    def write(self, place: int, value: float, *, adds: bool = False, base: int = SMALL) -> None:
        """Value after value; `base` elements of memory are behind each gradient."""
        grad = torch.full((base,), value, dtype=torch.bfloat16)[:SMALL]
        self.slot.write(self._place(place), grad, adds=adds)

    def values(self) -> list[float]:
        """The first of each place; the others are the same."""
        rows = self.buffer.view(10, SMALL)
        assert bool((rows == rows[:, :1]).all())
        return rows[:, 0].tolist()

    def _place(self, place: int) -> Tensor:
        return self.buffer.narrow(0, place * SMALL, SMALL)


@pytest.fixture
def bench() -> Iterator[_Bench]:
    """With what copies lists watched."""
    with simulated_device() as device:
        made = _Bench(device)
        with mock.patch.object(torch, "_foreach_copy_", made.copy):
            yield made


def test_small_gradients_are_copied_together_before_the_reduction(bench: _Bench) -> None:
    """In one call."""
    for place in range(4):
        bench.write(place, place + 1.0)
    assert bench.values() == [0.0] * 10
    bench.slot.finish_writing()
    assert bench.values() == [1.0, 2.0, 3.0, 4.0, *[0.0] * 6]
    assert [count for count, _ in bench.copied] == [4]
    bench.slot.finish_writing()
    assert len(bench.copied) == 1


def test_large_gradients_are_copied_at_once(bench: _Bench) -> None:
    """So is what keeps much memory alive, such as a part of a larger tensor."""
    bench.write(0, 1.0, base=MEBIBYTE // 2 + 1)
    assert bench.values()[0] == 1.0
    bench.write(1, 1.0, base=MEBIBYTE // 2)
    assert bench.values()[1] == 0.0


def test_what_is_collected_is_bounded(bench: _Bench) -> None:
    """By what it keeps alive, all together."""
    for place in range(5):
        bench.write(place, 1.0, base=MEBIBYTE // 4)  # half of what may be
    assert [count for count, _ in bench.copied] == [2, 2]
    bench.slot.flush()
    assert bench.values() == [*[1.0] * 5, *[0.0] * 5]


def test_what_is_added_to_is_there_before(bench: _Bench) -> None:
    """A gradient that comes in two parts."""
    bench.write(0, 1.0)
    bench.write(0, 2.0, adds=True)
    assert bench.values()[0] == 3.0


def test_each_is_copied_on_the_stream_that_made_it(bench: _Bench) -> None:
    """Which is where it is complete, and whose memory it is."""
    main, side = bench.device.current_stream(), SimulatedStream()
    bench.write(0, 1.0)
    with bench.device.stream(side):
        bench.write(1, 1.0)
        bench.write(2, 1.0)
    bench.write(3, 1.0)
    with bench.device.stream(side):
        bench.slot.finish_writing()
    assert bench.copied == [(1, main), (2, side), (1, main)]
    assert bench.values()[:4] == [1.0] * 4


def test_what_nobody_reduced_is_not_the_next_units(bench: _Bench) -> None:
    """A backward has failed, and so has what would have reduced its gradients."""
    bench.write(0, 1.0)
    bench.slot.open(1)
    bench.write(1, 2.0)
    bench.slot.finish_writing()
    assert bench.values()[:2] == [0.0, 2.0]

"""Fences and streams as they are on the CPU: declared, and seen by an observer."""

from __future__ import annotations

import pytest
import torch

from streamshard.comm.streams import Fence, Observer, Rule, StreamName, Streams, Work

COMPUTE, COMM, REPLICA = StreamName


class _Log(Observer):
    """Writes down what it is told, together with what works do."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_record(self, fence: Fence) -> None:
        self.lines.append(f"record {fence.what}")

    def on_wait(self, fence: Fence) -> None:
        self.lines.append(f"wait {fence.what}")


class _FakeWork:
    """A collective that says when it is completed."""

    def __init__(self, log: _Log, name: str) -> None:
        self.log = log
        self.name = name

    def wait(self) -> None:
        self.log.lines.append(f"complete {self.name}")


def _observed() -> tuple[Streams, _Log]:
    streams, log = Streams(torch.device("cpu")), _Log()
    streams.observers = (log,)
    return streams, log


def test_a_wait_completes_recorded_work_once_and_orders_the_streams() -> None:
    """Recording anew and `complete` complete earlier work too, without a wait. Without a record there is no wait."""
    streams, log = _observed()
    fence = Fence(streams, Rule.GRADS_DRAINED, COMM, "slot")
    fence.wait()
    fence.record(_FakeWork(log, "first"))
    fence.record(_FakeWork(log, "second"))
    assert log.lines == ["record slot", "complete first", "record slot"]
    fence.complete()
    fence.complete()
    fence.wait()
    fence.wait()
    assert log.lines[3:] == ["complete second", "wait slot", "wait slot"]


@pytest.mark.parametrize("dropped", [Rule.GRADS_DRAINED, "GRADS_DRAINED"], ids=["by rule", "by what it guards"])
def test_a_dropped_rule_drops_its_waits_only(dropped: Rule | str) -> None:
    """The work is not completed and the wait is not declared; records are, and other rules' waits."""
    streams, log = _observed()
    rule = Rule.GRADS_DRAINED
    streams.dropped_rules = frozenset({dropped})
    fences = [Fence(streams, each, COMM, each.name) for each in Rule]
    for fence in fences:
        fence.record(_FakeWork(log, fence.what))
    for fence in fences:
        fence.wait()
    records = [f"record {each.name}" for each in Rule]
    waits = [line for each in Rule if each is not rule for line in (f"complete {each.name}", f"wait {each.name}")]
    assert log.lines == records + waits


def test_the_host_says_when_it_waits_and_for_what() -> None:
    """Around the work itself, once, whether the wait is declared or not; without work there is nothing to wait for."""
    streams, log = _observed()

    class _Waits(Observer):
        def on_block(self, fence: Fence, work: Work) -> None:
            log.lines.append(f"block {fence.what} {getattr(work, 'name', None)}")

        def on_done(self, fence: Fence, work: Work) -> None:
            log.lines.append(f"done {fence.what} {getattr(work, 'name', None)}")

    fence = Fence(streams, Rule.WEIGHTS_ARRIVED, COMM, "slot")
    with streams.observed_by(_Waits()):
        for name in ("first", "second"):
            fence.record(_FakeWork(log, name))
        fence.wait()
        fence.record()
        fence.wait()
    waits = [[f"block slot {name}", f"complete {name}", f"done slot {name}"] for name in ("first", "second")]
    assert log.lines == ["record slot", *waits[0], "record slot", *waits[1], "wait slot", "record slot", "wait slot"]
